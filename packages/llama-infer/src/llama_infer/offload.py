"""A model spread over GPUs, main memory and disk by accelerate (extra `offload`): for one that fits in no single place.

accelerate decides which layers go where, front to back, and moves each layer's weights to where it computes when its
turn comes. Slow, but it runs: every step reads again what lies on disk.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import tempfile
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from llama_core import Attend, Llama
from llama_core.checkpoint import Checkpoint, check, fill
from llama_core.load import open_checkpoint
from llama_core.model import DecoderLayer
from llama_core.rope import RotaryEmbedding

from .cpu import use_onednn
from .placement import ops_for

GPU_SHARE = 0.85
"""Of what is free on a GPU, for weights, where nobody says more: the cache and activations want the rest."""


class Spread:
    """How to spread a model.

    Args:
        max_memory: for weights, by number of a GPU or "cpu": bytes, or texts such as "200MB" and "10GiB". By default
            what is free.
        folder: for weights on disk; by default a temporary one, which goes with the model.

    Attributes:
        told: a sentence that says what went where, after `load`.
    """

    def __init__(self, max_memory: Mapping[int | str, int | str] | None = None, folder: Path | None = None) -> None:
        self.max_memory, self.folder = max_memory, folder
        self.told = ""

    @classmethod
    def of(
        cls,
        device_map: str | None,
        max_memory: Mapping[int | str, int | str] | None = None,
        folder: str | Path | None = None,
        held: bool = False,
    ) -> Spread | None:
        """From the settings of `LLM`; None where it has none of them.

        Raises:
            ValueError: another map than "auto", settings of it without it, or a model that the user holds.
        """
        if device_map is None:
            if max_memory is not None or folder is not None:
                raise ValueError("max_memory and offload_folder are of device_map='auto'; add it")
            return None
        if device_map != "auto":
            raise ValueError(f"device_map must be 'auto' or None, got {device_map!r}")
        if held:
            raise ValueError("device_map spreads a model as it is loaded; give its path, not a Llama")
        return cls(max_memory, None if folder is None else Path(folder).expanduser())

    def load(
        self,
        path: Path,
        dtype: torch.dtype,
        device: torch.device,
        *,
        kernels: str = "auto",
        quantization: str | None = None,
        ranks: object | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> Llama:
        """Load a model to wherever there is room for each of its layers.

        Args:
            path: what `llama_core.load_model` takes.
            dtype: of the weights.
            device: where everything computes that does not lie on another GPU; the embedding must fit there.
            quantization, ranks: None.
            kernels, progress: as in `LLM`.

        Raises:
            ValueError: accelerate is missing, a budget that is no size, or one too small for the embedding or a layer.
        """
        if quantization is not None or ranks is not None:
            raise ValueError(
                "device_map spreads weights as they are, in one process; leave quantization and tensor_parallel_size "
                "out"
            )
        try:
            from accelerate import dispatch_model
        except ImportError:
            raise ValueError("device_map needs accelerate; install llama-infer[offload]") from None
        checkpoint = open_checkpoint(path)
        try:
            check(checkpoint)
            model, places, spool = _placed(checkpoint, dtype, device, self.max_memory, self.folder, kernels, progress)
        finally:
            checkpoint.close()
        model.tie_weights()
        model.model.rotary_emb = RotaryEmbedding(model.config)
        if kernels == "auto" and device.type == "cpu":
            use_onednn(model)
        self.told = _told(model, places, None if self.folder is None else spool, dtype)
        main = _main(device)
        if set(places.values()) - {main}:
            # A layer's weights come together: norms are called by other methods than `forward`, which no hook sees.
            together = ["DecoderLayer"]
            with _quiet():
                dispatch_model(
                    model, places, main, offload_dir=spool, force_hooks=True, preload_module_classes=together
                )
        else:
            model.model.rotary_emb.to(device)
        for number, layer in enumerate(model.model.layers):
            place = _place_of(f"model.layers.{number}", places)
            assert isinstance(layer, DecoderLayer)
            if isinstance(place, int) and place != main:  # the cache is in one place
                layer.self_attn.register_forward_pre_hook(_attends_on(device))
        return model


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Without accelerate's warning that weights are not in memory: that is what was asked for, and `told` says it."""
    logger = logging.getLogger("accelerate.big_modeling")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _placed(
    checkpoint: Checkpoint,
    dtype: torch.dtype,
    device: torch.device,
    max_memory: Mapping[int | str, int | str] | None,
    folder: Path | None,
    kernels: str,
    progress: Callable[[int, int], None] | None,
) -> tuple[Llama, dict[str, Any], Path]:
    """The model with its weights where they go, the places of its modules, and the folder of those on disk."""
    from accelerate import infer_auto_device_map
    from accelerate.utils import get_max_memory, offload_weight, save_offload_index

    with torch.device("meta"):
        model = Llama(checkpoint.config, ops_for(device, kernels))
    model = model.to(dtype).eval().requires_grad_(False)
    try:
        budgets = get_max_memory(None if max_memory is None else dict(max_memory))
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"max_memory {dict(max_memory or {})} is not understood: {error}") from None
    if device.type == "cpu":
        budgets = {place: size for place, size in budgets.items() if place == "cpu"}
    elif max_memory is None:
        budgets = {place: int(size * GPU_SHARE) if place != "cpu" else size for place, size in budgets.items()}
    places: dict[str, Any] = infer_auto_device_map(model, budgets, no_split_module_classes=["DecoderLayer"])
    main = _main(device)
    if _place_of("model.embed_tokens", places) != main:
        wanted = model.get_parameter("model.embed_tokens.weight").nbytes
        raise ValueError(
            f"max_memory leaves no room on {device} for the embedding of {wanted:,} bytes (and for a layer to pass "
            f"through); the budgets were {dict(budgets)} bytes"
        )
    weights = _Weights(checkpoint, progress, sum(parameter.nbytes for parameter in model.parameters()))
    index: dict[str, Any] = {}
    spool = Path(tempfile.mkdtemp(prefix="llama-infer-")) if folder is None else folder
    if folder is None:
        weakref.finalize(model, shutil.rmtree, spool, ignore_errors=True)
    else:
        spool.mkdir(parents=True, exist_ok=True)
    with torch.no_grad():
        for name, parameter in list(model.named_parameters()):
            place = _place_of(name, places)
            here = torch.empty(parameter.shape, dtype=dtype, device="cpu" if place == "disk" else place)
            weights.read(name, here)
            if place == "disk":
                index = offload_weight(here, name, spool, index)
            else:
                holder, _, last = name.rpartition(".")
                setattr(model.get_submodule(holder), last, nn.Parameter(here, requires_grad=False))
    save_offload_index(index, spool)
    return model, places, spool


class _Weights:
    def __init__(self, checkpoint: Checkpoint, progress: Callable[[int, int], None] | None, total: int) -> None:
        self.checkpoint, self.progress, self.total, self.done = checkpoint, progress, total, 0

    def read(self, name: str, into: Tensor) -> None:
        fill(self.checkpoint, {name: into})
        self.done += into.nbytes
        if self.progress is not None:
            self.progress(self.done, self.total)


def _main(device: torch.device) -> int | str:
    """By accelerate's name."""
    return (device.index or 0) if device.type == "cuda" else "cpu"


def _place_of(name: str, places: Mapping[str, Any]) -> Any:
    """Where a module or parameter goes: what is said of it, or of the nearest module around it."""
    while name not in places and name:
        name = name.rpartition(".")[0]
    return places[name]


def _attends_on(device: torch.device) -> Callable[[nn.Module, tuple[Any, ...]], tuple[Any, ...]]:
    """A hook that has a layer on another GPU attend where the cache is."""

    def hook(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
        x, cos, sin, attend, layer = inputs
        return x, cos, sin, _Moved(attend, device), layer

    return hook


class _Moved:
    def __init__(self, attend: Attend, device: torch.device) -> None:
        self.attend, self.device = attend, device

    def __call__(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return self.attend(layer, q.to(self.device), k.to(self.device), v.to(self.device)).to(q.device)


def _told(model: Llama, places: Mapping[str, Any], folder: Path | None, dtype: torch.dtype) -> str:
    """ "weights: 199 MB on cpu (embed_tokens, layers 0 … 5), 338 MB on disk (layers 6 … 29, norm)"."""
    sizes: dict[Any, int] = {}
    for name, parameter in model.named_parameters():
        place = _place_of(name, places)
        sizes[place] = sizes.get(place, 0) + parameter.numel() * dtype.itemsize
    parts = []
    for place, size in sizes.items():
        layers = [n for n in range(len(model.model.layers)) if _place_of(f"model.layers.{n}", places) == place]
        what = [name for name in ("embed_tokens", "norm") if _place_of(f"model.{name}", places) == place]
        if layers:
            what.append(f"layers {layers[0]} … {layers[-1]}")
        where = (
            f"GPU {place}" if isinstance(place, int) else f"disk at {folder}" if place == "disk" and folder else place
        )
        parts.append(f"{size / 1e6:,.0f} MB on {where} ({', '.join(what) or 'the head'})")
    return f"weights: {', '.join(parts)}"
