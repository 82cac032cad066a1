"""The `quantization_config` of a Hugging Face folder, and the weights it speaks of, in compressed-tensors' format.

Read are weights of 4 or 8 bits, integers or fp8, with a scale for each output, group of inputs or whole tensor, as
llm-compressor and `llama-infer convert --quantization` write them. What such a file says about rounding activations is
not followed: activations stay as they are, which is the more exact.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from .errors import CheckpointError, listed
from .file_bytes import Scratch
from .rounded_tensor import RoundedTensor
from .stored_tensor import StoredTensor

KEY = "quantization_config"
FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized")
_PARTS = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
_OF_ACTIVATIONS = ("input_scale", "input_zero_point", "output_scale", "output_zero_point", "k_scale", "v_scale")


@dataclass(frozen=True)
class _Scheme:
    targets: tuple[str, ...]
    bits: int
    symmetric: bool

    def is_of(self, module: str) -> bool:
        return any(
            target == "Linear" or module == target or (target.startswith("re:") and re.match(target[3:], module))
            for target in self.targets
        )


def rounded_tensors(settings: Any, entries: Mapping[str, StoredTensor], place: str) -> dict[str, StoredTensor]:
    """The entries of a folder's files under the names of the weights they make up.

    Args:
        settings: the `quantization_config`.
        entries: by the names in the files.
        place: the folder, for errors.

    Raises:
        CheckpointError: another method or format than those above, or parts that are missing.
    """
    schemes = _schemes(settings, place)
    tensors: dict[str, StoredTensor] = {}
    faults: list[str] = []
    for name, stored in entries.items():
        module, _, part = name.rpartition(".")
        if part in _OF_ACTIVATIONS or (part in _PARTS and part not in ("weight_packed", "weight_g_idx")):
            continue
        if part == "weight_g_idx":
            raise CheckpointError(f"{place}: {name}: inputs in another order (actorder) are not read")
        scale = entries.get(f"{module}.weight_scale")
        if part not in ("weight", "weight_packed") or (part == "weight" and scale is None):
            tensors[name] = stored
            continue
        scheme = next((scheme for scheme in schemes if scheme.is_of(module)), None)
        if scale is None or scheme is None:
            faults.append(f"{name} has no {'weight_scale' if scale is None else 'scheme in config_groups'}")
            continue
        zero = None if scheme.symmetric else entries.get(f"{module}.weight_zero_point")
        if not scheme.symmetric and (zero is None or zero.dtype != torch.int32):
            faults.append(f"{module}.weight_zero_point must be there, as int32: packed")
            continue
        if len(scale.shape) != 2 or scale.shape[0] != stored.shape[0]:  # one for the whole tensor
            scale = _ForAllRows(scale, stored.shape[0])
        tensors[f"{module}.weight"] = RoundedTensor(stored, scale, zero, scheme.bits)
    if faults:
        raise CheckpointError(f"{place}: {listed(faults)}")
    return tensors


@dataclass(frozen=True)
class _ForAllRows:
    """One number (…) as (rows, 1)."""

    one: StoredTensor
    rows: int
    granule: int = 1

    @property
    def shape(self) -> tuple[int, ...]:
        return self.rows, 1

    @property
    def dtype(self) -> torch.dtype:
        return self.one.dtype

    def read_rows(self, start: int, stop: int, out: Tensor, scratch: Scratch) -> None:
        number = torch.empty(self.one.shape, dtype=self.dtype)
        self.one.read_rows(0, self.one.shape[0] if self.one.shape else 1, number, scratch)
        out.copy_(number.reshape(1, 1).expand(stop - start, 1))


def _schemes(settings: Any, place: str) -> list[_Scheme]:
    where = f"{place}: {KEY}"
    if not isinstance(settings, dict) or settings.get("quant_method") != "compressed-tensors":
        method = settings.get("quant_method") if isinstance(settings, dict) else settings
        raise CheckpointError(f"{where} has the quant_method {method!r}; only 'compressed-tensors' is read")
    groups = settings.get("config_groups")
    if not isinstance(groups, dict) or not groups:
        raise CheckpointError(f"{where} must have config_groups")
    schemes = []
    for name, group in groups.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        targets = group.get("targets") if isinstance(group, dict) else None
        if not isinstance(weights, dict) or not isinstance(targets, list):
            raise CheckpointError(f"{where}: {name} must have weights and targets")
        form = group.get("format") or settings.get("format")
        bits, kind = weights.get("num_bits"), weights.get("type")
        if (
            form not in FORMATS
            or not isinstance(bits, int)
            or (kind, bits) not in (("int", 4), ("int", 8), ("float", 8))
        ):
            raise CheckpointError(
                f"{where}: {name} is {form!r} with {bits} bits of type {kind!r}; read are {', '.join(FORMATS)} with "
                "4 or 8 bits of 'int', or 8 of 'float'"
            )
        schemes.append(_Scheme(tuple(map(str, targets)), bits, weights.get("symmetric") is not False))
    return schemes


def quantization_settings(kind: str, bits: int, group: int | None) -> dict[str, Any]:
    """A `quantization_config` that says: all linear layers but the output head are rounded like this.

    Args:
        kind: "int" (packed; with a zero point where there are groups) or "float" (e4m3).
        bits: 4 or 8.
        group: inputs that share a scale; None for all of an output.
    """
    weights = {
        "num_bits": bits,
        "type": kind,
        "symmetric": group is None,
        "strategy": "channel" if group is None else "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "block_structure": None,
        "observer": "minmax",
        "observer_kwargs": {},
    }
    form = "pack-quantized" if kind == "int" else "float-quantized"
    group_0 = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors",
        "format": form,
        "quantization_status": "compressed",
        "config_groups": {"group_0": {**group_0, "format": form}},
        "ignore": ["lm_head"],
        "kv_cache_scheme": None,
        "global_compression_ratio": None,
    }
