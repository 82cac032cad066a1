"""Keys of [lora]: adapters in place of a full fine-tune."""

from __future__ import annotations

from dataclasses import dataclass

from .config_checks import finite_and, require

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True)
class LoraSettings:
    """Low-rank adapters (Hu et al. 2021) on the model of model.start_from, whose own weights stay as they are."""

    rank: int = 0
    """Rank of every adapter; 0 means none: all weights are trained."""
    alpha: float = 16.0
    """An adapter counts alpha / rank."""
    dropout: float = 0.0
    """Part of an adapter's inputs that training drops."""
    target_modules: tuple[str, ...] = PROJECTIONS
    """Which layers get one: last parts of their names, such as q_proj or layers.3.mlp.up_proj."""

    def __post_init__(self) -> None:
        require(self.rank >= 0, "lora.rank", self.rank, "0 (no adapters) or more")
        require(finite_and(self.alpha, self.alpha > 0), "lora.alpha", self.alpha, "above 0")
        require(0 <= self.dropout < 1, "lora.dropout", self.dropout, "0 to below 1")
        for name in self.target_modules:
            known = name.rpartition(".")[2] in PROJECTIONS
            require(known, "lora.target_modules", name, f"a name that ends in one of {', '.join(PROJECTIONS)}")
        require(bool(self.target_modules), "lora.target_modules", self.target_modules, "at least one name")
