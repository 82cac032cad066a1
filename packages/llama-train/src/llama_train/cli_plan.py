"""`llama-train plan`: which layout to train a model with, before anything is launched."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Literal

import tyro

from .config_checks import finite_and, require


@dataclass(frozen=True)
class PlanConfig:
    """Which layout of so many GPUs trains a model fastest: predicted memory, communication, bubble and step time.

    Needs no GPU and starts nothing. Exits with 0 where something fits; else with 1, saying what would.
    """

    model: str
    """A preset of llama_core, such as llama-3-70b, or a Hugging Face folder with config.json."""
    gpus: int
    """How many GPUs there are."""
    gpu_memory: float = 80.0
    """Of each, in GB of 10⁹ bytes."""
    seq: int = 8192
    """Tokens in a row."""
    global_batch: int = 512
    """Rows of one optimizer step, over all GPUs."""
    precision: Literal["mixed", "master", "bfloat16", "float32"] = "mixed"
    """mixed: float32 weights, bfloat16 products (a run's default); bfloat16: no float32 anywhere."""
    hardware: Literal["h100", "h200"] = "h100"
    """Whose rates to reckon with."""
    gpus_per_node: int = 8
    """GPUs that NVLink joins."""
    micro_batch: int | None = None
    """Rows at once; unset considers powers of two."""
    limit: int = 8
    """Layouts to list."""
    json: bool = False
    """Print JSON."""

    def __post_init__(self) -> None:
        for name in ("gpus", "seq", "global_batch", "gpus_per_node", "limit", "micro_batch"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
        # Beyond these the divisors alone, of which layouts are made, take for ever.
        require(self.gpus <= 2**17, "--gpus", self.gpus, f"1 to {2**17}")
        require(self.seq <= 2**27, "--seq", self.seq, f"1 to {2**27}")
        memory = self.gpu_memory
        require(finite_and(memory, memory > 0), "--gpu-memory", memory, "above 0 (GB)")


def main(arguments: list[str]) -> int:
    """Print the plan; 0 where something fits."""
    config = tyro.cli(PlanConfig, args=arguments, prog="llama-train plan")

    from dataclasses import replace
    from pathlib import Path

    from llama_core import LlamaConfig, preset
    from llama_parallel.planner import H100, H200, describe_plan, plan

    folder = Path(config.model)
    if (folder / "config.json").is_file():
        shape = LlamaConfig.from_hf(json.loads((folder / "config.json").read_text(encoding="utf-8")))
    else:
        shape = preset(config.model)
    rates = {"h100": H100, "h200": H200}[config.hardware]
    result = plan(
        shape,
        config.gpus,
        config.gpu_memory,
        config.seq,
        config.global_batch,
        precision=config.precision,
        hardware=replace(rates, gpus_per_node=config.gpus_per_node),
        micro_batch=config.micro_batch,
    )
    print(json.dumps(result.to_dict(config.limit), indent=2) if config.json else describe_plan(result, config.limit))
    return 0 if result.best is not None else 1
