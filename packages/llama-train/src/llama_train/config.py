"""Every setting of a training run: one frozen dataclass tree is the defaults, the TOML keys, the flags and the help.

This file imports nothing heavy, so that `--help` and a misspelt key answer at once.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from .config_checks import finite_and as _finite_and
from .config_checks import is_text as _is_text
from .config_checks import require as require
from .config_parallel import ParallelSettings as ParallelSettings


@dataclass(frozen=True)
class ModelConfig:
    """Shape of the model: a preset, explicit numbers, or a preset with some numbers changed."""

    preset: str | None = None
    """Name of a preset of llama_core, such as smollm2-135m; unset means the numbers below are all of it."""
    hidden_size: int | None = None
    """Width of the residual stream."""
    intermediate_size: int | None = None
    """Width of the feed-forward part."""
    num_hidden_layers: int | None = None
    """Number of decoder layers."""
    num_attention_heads: int | None = None
    """Query heads."""
    num_key_value_heads: int | None = None
    """Key and value heads; unset means as many as query heads."""
    head_dim: int | None = None
    """Width of a head; unset means hidden_size / num_attention_heads."""
    rope_theta: float | None = None
    """Base of the rotary frequencies."""
    rms_norm_eps: float | None = None
    """Added to the mean square in RMSNorm."""
    initializer_range: float | None = None
    """Standard deviation of fresh weights."""
    max_position_embeddings: int | None = None
    """Longest sequence the model says it can read; unset means data.sequence_length, or the preset's."""
    tie_word_embeddings: bool | None = None
    """Whether the output head is the embedding table."""

    def __post_init__(self) -> None:
        for name in (
            "hidden_size",
            "intermediate_size",
            "num_hidden_layers",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "max_position_embeddings",
        ):
            value = getattr(self, name)
            require(value is None or value >= 1, f"model.{name}", value, "at least 1")
        for name in ("rope_theta", "rms_norm_eps", "initializer_range"):
            number = getattr(self, name)
            require(number is None or _finite_and(number, number > 0), f"model.{name}", number, "above 0")


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and the shape of a batch."""

    source: str = "stdlib"
    """"stdlib" (source text of this Python's own standard library), a text file, or a folder of text files."""
    sources: tuple[str, ...] = ()
    """Folders of `llama-train prepare`, in place of source."""
    weights: tuple[float, ...] = ()
    """Parts of the rows that come from each of the sources, in any unit; unset means as many from each."""
    held_out: str | None = None
    """Folder of `llama-train prepare` that measures the model; unset means held_out_fraction of the documents."""
    packing: Literal["cut", "best-fit"] = "cut"
    """With sources: cut takes all documents as one text, cut into rows; best-fit keeps those that fit whole."""
    mask_documents: bool = True
    """With sources: whether attention and positions stay inside a document."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files of a folder are read."""
    held_out_fraction: float = 0.05
    """Part of the text, by whole files, that is never trained on and measures the model."""
    tokenizer: str | None = None
    """Folder or tokenizer.json of an existing tokenizer; unset means a byte-level BPE trained on the training part."""
    vocab_size: int = 2048
    """Vocabulary of the tokenizer that is trained."""
    sequence_length: int = 128
    """Tokens in a row of the batch."""
    micro_batch_size: int = 16
    """Rows that pass through the model at once."""
    gradient_accumulation_steps: int = 1
    """Micro-batches whose gradients make one step."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", self.source, '"stdlib" or the path of a file or folder')
        require(
            all(suffix.startswith(".") for suffix in self.suffixes) and bool(self.suffixes),
            "data.suffixes",
            self.suffixes,
            'a list of endings such as ".txt"',
        )
        for name in self.sources:
            require(bool(name) and _is_text(name), "data.sources", name, "the path of a folder")
        wanted = "nothing, or a number above 0 for each of data.sources"
        fit = len(self.weights) in (0, len(self.sources)) and all(_finite_and(w, w > 0) for w in self.weights)
        require(fit, "data.weights", self.weights, wanted)
        if not self.sources and (self.held_out is not None or self.packing != "cut"):
            raise ValueError("data.held_out and data.packing are for data.sources, which is not given")
        fraction = self.held_out_fraction
        require(0 < fraction < 1, "data.held_out_fraction", fraction, "above 0 and below 1")
        # 256 bytes and two special tokens have an id each whatever the text.
        # The trainer of the tokenizers package reserves memory for all of them at once, and aborts where there is none.
        require(258 <= self.vocab_size <= 2**20, "data.vocab_size", self.vocab_size, "258 to 1048576")
        require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2")
        for name in ("micro_batch_size", "gradient_accumulation_steps"):
            require(getattr(self, name) >= 1, f"data.{name}", getattr(self, name), "at least 1")

    @property
    def masks_documents(self) -> bool:
        """Whether batches say where documents begin; text that the run itself reads is one row of tokens."""
        return self.mask_documents and bool(self.sources)

    @property
    def rows_per_step(self) -> int:
        """Sequences that one data-parallel rank gives to an optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps


@dataclass(frozen=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) and gradient clipping."""

    learning_rate: float = 3e-4
    """The highest rate, reached after warm-up."""
    betas: tuple[float, float] = (0.9, 0.95)
    """Decay of the running mean and mean square of the gradient."""
    eps: float = 1e-8
    """Added to the root of the mean square."""
    weight_decay: float = 0.1
    """Decoupled decay of matrices; norms and biases are never decayed."""
    max_grad_norm: float = 1.0
    """Gradients of a larger norm are scaled down to it; 0 means no clipping."""
    master_weights: bool = True
    """With dtype bfloat16: the optimizer keeps weights and sums gradients in float32. No effect in float32."""

    def __post_init__(self) -> None:
        rate = self.learning_rate
        require(_finite_and(rate, rate > 0), "optimizer.learning_rate", rate, "above 0")
        require(
            all(0 <= beta < 1 for beta in self.betas), "optimizer.betas", self.betas, "two numbers from 0 to below 1"
        )
        require(_finite_and(self.eps, self.eps > 0), "optimizer.eps", self.eps, "above 0")
        for name in ("weight_decay", "max_grad_norm"):
            value = getattr(self, name)
            require(_finite_and(value, value >= 0), f"optimizer.{name}", value, "0 or more")


@dataclass(frozen=True)
class ScheduleConfig:
    """How long to train and the learning rate of every step: linear warm-up, then half a cosine."""

    steps: int = 1000
    """Optimizer steps of the whole run."""
    warmup_steps: int = 100
    """Steps over which the rate rises to optimizer.learning_rate."""
    final_ratio: float = 0.1
    """Rate of the last step, as a part of optimizer.learning_rate."""

    def __post_init__(self) -> None:
        require(self.steps >= 1, "schedule.steps", self.steps, "at least 1")
        wanted = f"0 to schedule.steps, {self.steps}"
        require(0 <= self.warmup_steps <= self.steps, "schedule.warmup_steps", self.warmup_steps, wanted)
        require(0 <= self.final_ratio <= 1, "schedule.final_ratio", self.final_ratio, "0 to 1")


@dataclass(frozen=True)
class CheckpointConfig:
    """When the run is saved. It is also saved at its end and when it is told to stop."""

    every: int = 1000
    """Steps between checkpoints; 0 means none on the way."""
    keep: int = 2
    """How many of the newest checkpoints stay."""
    export: bool = True
    """Whether the finished model is written as a Hugging Face folder, RUN/hf."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "checkpoint.every", self.every, "0 or more")
        require(self.keep >= 1, "checkpoint.keep", self.keep, "at least 1")


@dataclass(frozen=True)
class EvaluationConfig:
    """Held-out loss and the text sample."""

    every: int = 0
    """Steps between evaluations; 0 means only at the end."""
    max_tokens: int | None = None
    """At most so many held-out tokens are scored; unset means all."""
    sample_prompt: str = "def "
    """What the text sample at the end continues."""
    sample_tokens: int = 64
    """Length of the text sample; 0 means none."""
    sample_temperature: float = 0.7
    """0 picks the likeliest token each time."""

    def __post_init__(self) -> None:
        require(self.every >= 0, "evaluation.every", self.every, "0 or more")
        require(self.max_tokens is None or self.max_tokens >= 1, "evaluation.max_tokens", self.max_tokens, "at least 1")
        require(self.sample_tokens >= 0, "evaluation.sample_tokens", self.sample_tokens, "0 or more")
        require(_is_text(self.sample_prompt), "evaluation.sample_prompt", self.sample_prompt, "UTF-8 text without NUL")
        temperature = self.sample_temperature
        require(_finite_and(temperature, temperature >= 0), "evaluation.sample_temperature", temperature, "0 or more")


@dataclass(frozen=True)
class LoggingConfig:
    """What is shown while training."""

    every: int = 10
    """Steps between lines. metrics.jsonl in the run folder gets the same figures."""
    progress: bool = True
    """Whether a terminal shows a progress bar; a file or pipe never does."""

    def __post_init__(self) -> None:
        require(self.every >= 1, "logging.every", self.every, "at least 1")


@dataclass(frozen=True)
class TrainConfig:
    """One training run."""

    name: str = "run"
    """Name of the run."""
    folder: str | None = None
    """Run folder; unset means runs/NAME in the current directory."""
    resume: Literal["auto", "never"] = "auto"
    """auto: continue from the newest checkpoint of the run folder, if it has one; never: refuse a used folder."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one."""
    dtype: Literal["auto", "float32", "bfloat16", "float64"] = "auto"
    """Type of weights and activations; auto is float32 on a CPU and bfloat16 on a GPU."""
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
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    logging: LoggingConfig = field(default_factory=LoggingConfig)
    parallel: ParallelSettings = field(default_factory=ParallelSettings)

    def __post_init__(self) -> None:
        usable = bool(self.name) and not set(self.name) & set('/\\:*?"<>|') and self.name not in (".", "..")
        require(usable, "name", self.name, 'a file name, with none of / \\ : * ? " < > |')
        require(_is_text(self.name), "name", self.name, "UTF-8 text without NUL")
        require(self.folder is None or _is_text(self.folder), "folder", self.folder, "UTF-8 text without NUL")
        require(0 <= self.seed < 2**63, "seed", self.seed, "0 to 2^63 - 1")
        require(self.threads is None or self.threads >= 1, "threads", self.threads, "at least 1")

    @property
    def rows_per_step(self) -> int:
        """Sequences that make one optimizer step, over all processes; a resolved `parallel.dp_shard` is needed."""
        return self.data.rows_per_step * self.parallel.dp_replicate * max(1, self.parallel.dp_shard)
