"""Every setting of a training run: one frozen dataclass tree is the defaults, the TOML keys, the flags and the help.

This file imports nothing heavy, so that `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .config_checkpoint import CheckpointConfig as CheckpointConfig
from .config_checks import is_text as _is_text
from .config_checks import require as require
from .config_data import DataConfig as DataConfig
from .config_logging import EvaluationConfig as EvaluationConfig
from .config_logging import LoggingConfig as LoggingConfig
from .config_lora import LoraSettings as LoraSettings
from .config_model import ModelConfig as ModelConfig
from .config_optimizer import OptimizerConfig as OptimizerConfig
from .config_optimizer import ScheduleConfig as ScheduleConfig
from .config_parallel import ParallelSettings as ParallelSettings
from .config_profile import ProfileConfig as ProfileConfig


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    name: str = "run"
    """Name of the run."""
    folder: str | None = None
    """Run folder; unset means runs/NAME in the current directory."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest checkpoint of the run folder, if it has one; never: refuse a used folder."""
    resume_from: str | None = None
    """Checkpoint of another run (RUN/checkpoints/step-…, or RUN for its newest) to go on from as this run, optimizer
    and place in the data included: a cool-down with another [schedule], say. The run's own checkpoints come first."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU."""
    fp8: bool = False
    """Matrix products of the decoder's layers in 8 bits, forward and backward, on GPUs of compute capability 8.9 or
    more; a CPU rounds alike, slowly. Weights, gradients, attention, embedding and head keep dtype."""
    seed: int = 0
    """Fixes initial weights, order of the data and the text sample."""
    kernels: Literal["auto", "plain"] = "auto"
    """auto takes llama_kernels on a GPU; plain is readable PyTorch everywhere."""
    attention: Literal["auto", "sdpa", "flash", "triton", "plain"] = "auto"
    """auto takes the fastest on a GPU and sdpa, PyTorch's own, on a CPU; plain is the formula and keeps every score."""
    compile: bool = False
    """Whether torch.compile is applied to every layer."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again in the backward pass instead of being stored."""
    trace_comm: bool = False
    """Print what each shown step sent between processes, by kind; nothing then overlaps, so the run is slower."""
    threads: int | None = None
    """Threads of a process on a CPU; unset means PyTorch's choice. On cores busy with other work, fewer are faster."""
    model: ModelConfig = field(default_factory=ModelConfig)
    lora: LoraSettings = field(default_factory=LoraSettings)
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)
    profile: ProfileConfig = field(default_factory=ProfileConfig)

    def __post_init__(self) -> None:
        usable = bool(self.name) and not set(self.name) & set('/\\:*?"<>|') and self.name not in (".", "..")
        require(usable, "name", self.name, 'a file name, with none of / \\ : * ? " < > |')
        require(_is_text(self.name), "name", self.name, "UTF-8 text without NUL")
        require(self.folder is None or _is_text(self.folder), "folder", self.folder, "UTF-8 text without NUL")
        origin = self.resume_from
        require(origin is None or (bool(origin) and _is_text(origin)), "resume_from", origin, "the path of a folder")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")
        if self.lora.rank and self.model.start_from is None:
            raise ValueError(f"lora.rank is {self.lora.rank}; adapters need a model to adapt: set model.start_from")
        # PyTorch's pool of threads crashes the process where the system refuses one of them.
        require(self.threads is None or 1 <= self.threads <= 1024, "threads", self.threads, "1 to 1024")

    @property
    def rows_per_step(self) -> int:
        """Sequences that make one optimizer step, over all processes; a resolved `parallel.dp_shard` is needed."""
        return self.data.rows_per_step * self.parallel.dp_replicate * max(1, self.parallel.dp_shard)
