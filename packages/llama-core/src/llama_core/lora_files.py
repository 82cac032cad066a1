"""Adapters in PEFT's format: adapter_config.json beside adapter_model.safetensors."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .atomic import new_folder
from .errors import CheckpointError, listed
from .file_bytes import FileBytes, Scratch
from .generation_config import read_json_object
from .lora_layers import Adapter, LoraConfig
from .pth_file import load_pth
from .safetensors_file import read_header
from .safetensors_write import write_safetensors

CONFIG, WEIGHTS, PICKLED = "adapter_config.json", "adapter_model.safetensors", "adapter_model.bin"
_PREFIX = "base_model.model."
_LOW_RANK = re.compile(r"(.+)\.lora_([AB])(\.\w+)?\.weight")
_WHOLE = re.compile(r"(.+?)(\.base_layer|\.modules_to_save(\.\w+)?)?\.(weight|bias)")
# Settings that change what the adapter computes and that we do not have; each must have one of these values.
_MUST_BE: dict[str, tuple[Any, ...]] = {
    "bias": ("none", None),
    "fan_in_fan_out": (False, None),
    "use_dora": (False, None),
    "use_qalora": (False, None),
    "use_bdlora": (False, None),
    "lora_bias": (False, None),
    "layer_replication": (None, []),
    "target_parameters": (None, []),
    "trainable_token_indices": (None, [], {}),
    "alora_invocation_tokens": (None, []),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "velora_config": (None,),
    "monteclora_config": (None,),
}
_OURS = ("r", "lora_alpha", "lora_dropout", "use_rslora", "rank_pattern", "alpha_pattern", "base_model_name_or_path")


def load_adapter(path: str | Path) -> Adapter:
    """Read an adapter.

    Raises:
        CheckpointError: a file is missing or damaged, or the adapter needs something that is not supported (DoRA,
            biases, adapters on embeddings …); the message names it.
    """
    folder = Path(path)
    if not (folder / CONFIG).is_file():
        raise CheckpointError(f"{folder} holds no {CONFIG}; an adapter in PEFT's format is a folder with one")
    settings = read_json_object(folder / CONFIG)
    try:
        config = _config(settings)
    except (ValueError, TypeError) as error:
        raise CheckpointError(f"{folder / CONFIG}: {error}") from None
    if (folder / WEIGHTS).is_file():
        file, tensors = folder / WEIGHTS, _read_safetensors(folder / WEIGHTS)
    elif (folder / PICKLED).is_file():
        file, tensors = folder / PICKLED, {name: t.clone() for name, t in load_pth(folder / PICKLED).items()}
    else:
        raise CheckpointError(f"{folder} holds neither {WEIGHTS} nor {PICKLED}")
    return _adapter(file, config, tensors)


def save_adapter(adapter: Adapter, path: str | Path, overwrite: bool = False) -> None:
    """Write an adapter so that PEFT reads it. The folder appears complete or not at all.

    Raises:
        CheckpointError: the target is taken.
    """
    config = adapter.config
    targets = config.target_modules
    if targets == "all-linear":
        targets = tuple(sorted({name.rpartition(".")[2] for name in adapter.weights}))
    settings = {
        **config.extra,
        **{name: getattr(config, name) for name in _OURS},
        "rank_pattern": dict(config.rank_pattern),
        "alpha_pattern": dict(config.alpha_pattern),
        "target_modules": targets if isinstance(targets, str) else list(targets),
        "modules_to_save": sorted({name.rpartition(".")[0].rpartition(".")[2] for name in adapter.replaced}) or None,
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
    }
    tensors: dict[str, Tensor] = {}
    for name, (a, b) in adapter.weights.items():
        tensors |= {f"{_PREFIX}{name}.lora_A.weight": a, f"{_PREFIX}{name}.lora_B.weight": b}
    tensors |= {f"{_PREFIX}{name}": value for name, value in adapter.replaced.items()}
    with new_folder(path, overwrite, stale=("adapter_model.*", CONFIG)) as folder:
        (folder / CONFIG).write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n", encoding="utf-8")
        write_safetensors(folder / WEIGHTS, tensors)


def _config(settings: Mapping[str, Any]) -> LoraConfig:
    if settings.get("peft_type") != "LORA":
        raise ValueError(f"peft_type is {settings.get('peft_type')!r}; only 'LORA' is supported")
    for name, allowed in _MUST_BE.items():
        if settings.get(name) not in allowed:
            raise ValueError(f"{name} is {settings[name]!r}, which is not supported; it must be {allowed[0]!r}")
    known = {name: settings[name] for name in _OURS if settings.get(name) is not None}
    for name in ("rank_pattern", "alpha_pattern"):
        if not isinstance(known.get(name, {}), dict):
            raise ValueError(f"{name} is {known[name]!r}; it must be an object of module name → number")
    if not isinstance(known.get("use_rslora", False), bool):
        raise ValueError(f"use_rslora is {known['use_rslora']!r}; it must be true or false")
    targets = settings.get("target_modules")
    if isinstance(targets, list) and all(isinstance(target, str) for target in targets):
        targets = tuple(targets)
    elif not isinstance(targets, str):
        raise ValueError(f"target_modules is {targets!r}; it must be a list of module names, or a text")
    extra = {name: value for name, value in settings.items() if name not in (*_OURS, "target_modules")}
    return LoraConfig(**known, target_modules=targets, extra=extra)


def _read_safetensors(path: Path) -> dict[str, Tensor]:
    with FileBytes(path) as file:
        entries, _ = read_header(file)
        tensors = {name: torch.empty(entry.shape, dtype=entry.dtype) for name, entry in entries.items()}
        scratch = Scratch()
        for name, entry in entries.items():
            if entry.shape:
                entry.read_rows(0, entry.shape[0], tensors[name], scratch)
    return tensors


def _adapter(file: Path, config: LoraConfig, tensors: Mapping[str, Tensor]) -> Adapter:
    halves: dict[str, dict[str, Tensor]] = {}
    replaced: dict[str, Tensor] = {}
    unknown = []
    for key, tensor in tensors.items():
        name = key.removeprefix(_PREFIX)
        if not tensor.dtype.is_floating_point:
            unknown.append(f"{key} ({tensor.dtype})")
        elif match := _LOW_RANK.fullmatch(name):
            halves.setdefault(match[1], {})[match[2]] = tensor
        elif (match := _WHOLE.fullmatch(name)) and "lora_" not in name:
            replaced[f"{match[1]}.{match[4]}"] = tensor
        else:
            unknown.append(key)
    if unknown:
        raise CheckpointError(f"{file}: {len(unknown)} tensors are no LoRA of linear layers: {listed(unknown)}")
    if single := [
        f"{name}.lora_{half}" for name, pair in halves.items() if len(pair) < 2 for half in {"A", "B"} - set(pair)
    ]:
        raise CheckpointError(f"{file}: {len(single)} missing: {listed(single)}")
    if flat := [name for name, pair in halves.items() if pair["A"].dim() != 2 or pair["B"].dim() != 2]:
        raise CheckpointError(f"{file}: A and B must be matrices: {listed(flat)}")
    return Adapter(config, {name: (pair["A"], pair["B"]) for name, pair in halves.items()}, replaced)
