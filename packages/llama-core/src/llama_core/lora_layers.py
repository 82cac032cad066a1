"""Low-rank adapters (LoRA; Hu et al. 2021, https://arxiv.org/abs/2106.09685): training them, and merging them.

A layer's weight W becomes W + scale · B A, with A (r, in) and B (out, r). Names and rules are those of PEFT, whose
files `lora_files.py` reads and writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .errors import LISTED, CheckpointError, listed
from .init import fill_normal
from .linear import Linear, Multiplies
from .model import Llama

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraConfig:
    """Which layers get an adapter, and how strong; names and meanings are PEFT's.

    Raises:
        ValueError: a value out of range; the message names value and range.
    """

    r: int = 8
    """Rank."""
    lora_alpha: float = 16.0
    """The scale is lora_alpha / r (lora_alpha / √r with `use_rslora`)."""
    target_modules: tuple[str, ...] | str = "all-linear"
    """Last parts of module names ("q_proj", "layers.3.mlp.up_proj"); "all-linear" for all seven projections."""
    lora_dropout: float = 0.0
    """Share of the adapter's inputs that training drops."""
    use_rslora: bool = False
    """Rank-stabilised scale (Kalajdzievski 2023, https://arxiv.org/abs/2312.03732)."""
    rank_pattern: Mapping[str, int] = field(default_factory=dict, hash=False)
    """Other ranks for modules whose name ends so (a regular expression)."""
    alpha_pattern: Mapping[str, float] = field(default_factory=dict, hash=False)
    """Other alphas, likewise."""
    base_model_name_or_path: str | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Further keys of adapter_config.json; written back unchanged."""

    def __post_init__(self) -> None:
        for r in (self.r, *self.rank_pattern.values()):
            if isinstance(r, bool) or not isinstance(r, int) or r < 1:
                raise ValueError(f"r is {r!r}; a rank is a whole number of at least 1")
        for alpha in (self.lora_alpha, *self.alpha_pattern.values()):
            if isinstance(alpha, bool) or not isinstance(alpha, int | float) or not 0 < alpha < float("inf"):
                raise ValueError(f"lora_alpha is {alpha!r}; it must be a positive number")
        if isinstance(self.lora_dropout, bool) or not isinstance(self.lora_dropout, int | float):
            raise ValueError(f"lora_dropout is {self.lora_dropout!r}; it must be a number")
        if not 0 <= self.lora_dropout < 1:
            raise ValueError(f"lora_dropout is {self.lora_dropout}; the range is 0 to below 1")

    def rank(self, module: str) -> int:
        """Rank for the module of this name."""
        return int(_by_pattern(self.rank_pattern, module, self.r))

    def scale(self, module: str) -> float:
        """What B A is multiplied with in the module of this name."""
        rank = self.rank(module)
        return float(_by_pattern(self.alpha_pattern, module, self.lora_alpha)) / (
            math.sqrt(rank) if self.use_rslora else rank
        )

    def targets(self, module: str) -> bool:
        """Whether the module of this name gets an adapter."""
        if self.target_modules == "all-linear":
            return module.rpartition(".")[2] in PROJECTIONS
        if isinstance(self.target_modules, str):
            return _matches(self.target_modules, module)
        return any(module == target or module.endswith("." + target) for target in self.target_modules)


@dataclass(frozen=True)
class Adapter:
    """A trained adapter: configuration and weights, apart from any model."""

    config: LoraConfig
    weights: Mapping[str, tuple[Tensor, Tensor]]
    """Module name → A (r, in), B (out, r)."""
    replaced: Mapping[str, Tensor] = field(default_factory=dict)
    """Parameter name → its whole new value (PEFT's `modules_to_save`)."""


class LoraLinear(Multiplies, nn.Module):
    """A linear layer with an adapter beside it: x Wᵀ + b + scale · (x Aᵀ) Bᵀ. W and b keep their names."""

    def __init__(self, base: Linear, rank: int, scale: float, dropout: float, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.weight, self.bias = base.weight, base.bias
        self.product = base.product
        self.in_features, self.out_features = base.in_features, base.out_features
        self.scale, self.dropout = scale, dropout
        kind, device = dtype or base.weight.dtype, base.weight.device
        self.lora_A = nn.Parameter(torch.empty(rank, base.in_features, dtype=kind, device=device))
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank, dtype=kind, device=device))

    def forward(self, x: Tensor) -> Tensor:
        """(..., in) → (..., out), in x's dtype; the adapter computes in its own."""
        out = self.product(x, self.weight, self.bias)
        low = F.linear(F.dropout(x, self.dropout, self.training).to(self.lora_A.dtype), self.lora_A)
        return out + (F.linear(low, self.lora_B) * self.scale).to(out.dtype)

    @torch.no_grad()
    def merged(self) -> Linear:
        """An ordinary linear layer with the adapter added to its weight."""
        layer = Linear(self.in_features, self.out_features, bias=False, device="meta")
        add_delta(self.weight, self.lora_A, self.lora_B, self.scale)
        layer.weight, layer.bias = self.weight, self.bias
        layer.product = self.product
        return layer


@torch.no_grad()
def add_delta(weight: Tensor, a: Tensor, b: Tensor, scale: float) -> None:
    """weight (out, in) += scale · B A in place; summed in float32 and rounded once."""
    wide = torch.float64 if weight.dtype == torch.float64 else torch.float32
    delta = b.to(weight.device, wide) @ a.to(weight.device, wide)
    weight.copy_(weight.to(wide).add_(delta, alpha=scale))


def apply_lora(
    model: Llama, adapter: LoraConfig | Adapter, *, seed: int = 0, dtype: torch.dtype | None = None
) -> list[str]:
    """Put adapters into a model, in place, and freeze everything else.

    Args:
        model: not packed.
        adapter: a configuration (fresh adapters: A random, B zero, so that the model is unchanged at first) or a
            loaded adapter.
        seed: of the fresh A.
        dtype: of A and B; the weight's by default. float32 beside a bfloat16 model trains better.

    Returns:
        Names of the modules that got one.

    Raises:
        ValueError: no module fits, the shapes do not, or the model has adapters already.
    """
    config = adapter if isinstance(adapter, LoraConfig) else adapter.config
    layers = _layers(model)
    if isinstance(adapter, Adapter):
        check_adapter(model, adapter)
        names = list(adapter.weights)
    else:
        names = [name for name in layers if config.targets(name)]
    if not names:
        raise ValueError(f"target_modules is {config.target_modules!r}; it fits none of {listed(layers, 8)}")
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            raise ValueError(f"{name} has an adapter already; merge it first")
    if "lm_head" in names and model.config.tie_word_embeddings:
        raise ValueError("lm_head is tied to the embedding; an adapter on it would change both")
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for name in names:
        layer = LoraLinear(layers[name], config.rank(name), config.scale(name), config.lora_dropout, dtype)
        with torch.no_grad():
            if isinstance(adapter, Adapter):
                layer.lora_A.copy_(adapter.weights[name][0])
                layer.lora_B.copy_(adapter.weights[name][1])
            elif not layer.lora_A.is_meta:
                draw_adapter(layer.lora_A, f"{name}.lora_A", seed, tuple(layer.lora_A.shape), (0, 0))
        layer.train(model.training)
        _replace(model, name, layer)
    if isinstance(adapter, Adapter):
        _put_replaced(model, adapter)
    return names


@torch.no_grad()
def draw_adapter(out: Tensor, name: str, seed: int, shape: tuple[int, ...], offsets: tuple[int, ...]) -> None:
    """Fill a fresh lora_A or lora_B, or the block of it that starts at `offsets`, the same on every layout and device.

    A has the variance of PEFT's uniform draw, 1 / (3 · in); B is zero.

    Args:
        out: (rows, columns), the block.
        name: the parameter's full name, which ends in lora_A or lora_B.
        seed: of all adapters of a model.
        shape: of the whole parameter.
        offsets: index of the block's first element in it.
    """
    if name.endswith("lora_B"):
        out.zero_()
    else:
        fill_normal(out, name, seed, 1 / math.sqrt(3 * shape[1]), shape, offsets)


def merge_lora(model: Llama, adapter: Adapter | None = None) -> None:
    """Add adapters to the weights, in place: those that `apply_lora` put in, or a loaded one.

    Raises:
        ValueError: there is no adapter in the model and none is given, or it does not fit.
    """
    inside = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    for name, module in inside.items():
        _replace(model, name, module.merged())
    if adapter is None:
        if not inside:
            raise ValueError("the model has no adapters to merge")
        return
    check_adapter(model, adapter)
    layers = _layers(model)
    for name, (a, b) in adapter.weights.items():
        add_delta(layers[name].weight, a, b, adapter.config.scale(name))
    _put_replaced(model, adapter)


def adapter_of(model: Llama, config: LoraConfig) -> Adapter:
    """The adapters that are in a model, to be saved.

    Raises:
        ValueError: there are none.
    """
    inside = {name: module for name, module in model.named_modules() if isinstance(module, LoraLinear)}
    if not inside:
        raise ValueError("the model has no adapters")
    return Adapter(config, {name: (m.lora_A.detach(), m.lora_B.detach()) for name, m in inside.items()})


def check_adapter(model: Llama, adapter: Adapter) -> None:
    """Compare names, shapes and ranks with a model.

    Raises:
        CheckpointError: one message that lists everything that does not fit.
    """
    layers, parameters = _layers(model), dict(model.named_parameters(remove_duplicate=False))
    faults = []
    if absent := [name for name in adapter.weights if name not in layers]:
        faults.append(f"{len(absent)} for modules that the model does not have: {listed(absent)}")
    for name, (a, b) in adapter.weights.items():
        if name in layers:
            rank, shape = adapter.config.rank(name), tuple(layers[name].weight.shape)
            if tuple(a.shape) != (rank, shape[1]) or tuple(b.shape) != (shape[0], rank):
                faults.append(
                    f"{name}: A {list(a.shape)} and B {list(b.shape)} do not fit rank {rank} and weight {list(shape)}"
                )
    for name, value in adapter.replaced.items():
        if name not in parameters:
            faults.append(f"{name} is no parameter of the model")
        elif parameters[name].shape != value.shape:
            faults.append(f"{name} is {list(value.shape)}, must be {list(parameters[name].shape)}")
    if faults:
        more = [f"… and {len(faults) - LISTED} more"] if len(faults) > LISTED else []
        raise CheckpointError("\n  ".join(["the adapter does not fit the model:", *faults[:LISTED], *more]))


def _layers(model: Llama) -> dict[str, Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, Linear)}


def _put_replaced(model: Llama, adapter: Adapter) -> None:
    with torch.no_grad():
        for name, value in adapter.replaced.items():
            model.get_parameter(name).copy_(value)


def _replace(model: Llama, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _by_pattern(patterns: Mapping[str, Any], module: str, default: Any) -> Any:
    return next((value for pattern, value in patterns.items() if _matches(rf"(.*\.)?({pattern})", module)), default)


def _matches(pattern: str, module: str) -> bool:
    try:
        return re.fullmatch(pattern, module) is not None
    except re.error as error:
        raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
