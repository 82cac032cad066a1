"""From a model and a layout to the settings of a run, with the arithmetic that they amount to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from llama_core import PRESETS, LlamaConfig, load_tokenizer, preset
from llama_parallel.planner import Memory, Work, predict_memory
from llama_train.build import count_parameters, model_config
from llama_train.config import ModelConfig, ScheduleConfig, TrainConfig
from llama_train.layout_choice import check_parallel
from llama_train.locate import EMBEDDED, locate
from llama_train.metrics import human
from llama_train.out_of_memory import work_of

_NUMBERS = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "initializer_range",
    "max_position_embeddings",
    "tie_word_embeddings",
)


def choose_model(name: str, changes: dict[str, int], from_scratch: bool) -> tuple[ModelConfig, str | None]:
    """The section [model], and the tokenizer that belongs to it, if there is one here.

    Args:
        name: a preset, or the path of a model.
        changes: numbers of the shape that are not the model's own.
        from_scratch: whether a model given by its path lends its shape and tokenizer alone.

    Raises:
        ValueError: neither a preset nor a model; changed numbers beside stored weights.
    """
    if name in PRESETS:
        return ModelConfig(preset=name, **changes), None  # type: ignore[arg-type]  # whole numbers all
    if name != EMBEDDED and not Path(name).expanduser().exists() and "/" not in name and "\\" not in name:
        preset(name)  # raises, with the nearest name
    if not from_scratch:
        if changes:
            flags = ", ".join(f"--{key.replace('_', '-')}" for key in changes)
            raise ValueError(f"{flags}: the weights of {name} have its own shape; add --from-scratch to train new ones")
        return ModelConfig(start_from=name), None
    shape = model_config(ModelConfig(start_from=name), vocab_size=1, sequence_length=1, bos_id=None, eos_id=None)
    if shape.rope.rope_type != "default":
        raise ValueError(
            f"{name} has rotary scaling of type {shape.rope.rope_type}, for which [model] has no keys: take one of the "
            f"presets ({', '.join(PRESETS)})"
        )
    numbers = {key: getattr(shape, key) for key in _NUMBERS}
    numbers |= {"head_dim": shape.head_width, "rope_theta": shape.rope.rope_theta, **changes}
    if "num_attention_heads" in changes and "hidden_size" not in changes:
        del numbers["head_dim"]
    if "num_attention_heads" in changes and "num_key_value_heads" not in changes:
        del numbers["num_key_value_heads"]
    return ModelConfig(**numbers), name


def shape_of(config: TrainConfig) -> LlamaConfig:
    """The model's shape, its vocabulary as far as it is known before the text is read."""
    data, tokenizer = config.data, config.data.tokenizer
    if tokenizer is None and data.sources and (Path(data.sources[0]) / "tokenizer").exists():
        tokenizer = str(Path(data.sources[0]) / "tokenizer")
    vocabulary = data.vocab_size if tokenizer is None else load_tokenizer(locate(tokenizer)).vocab_size
    length = data.sequence_length
    return model_config(config.model, vocab_size=vocabulary, sequence_length=length, bos_id=None, eos_id=None)


def accumulation_of(rows: int, micro_batch: int, dp: int) -> int:
    """Micro-batches of a rank that make up a global batch of so many rows.

    Raises:
        ValueError: they do not divide; the nearest numbers that do.
    """
    unit = micro_batch * dp
    if rows % unit:
        near = [str(size) for size in (rows // unit * unit, -(-rows // unit) * unit) if size]
        raise ValueError(
            f"--global-batch is {rows}; with micro-batches of {micro_batch} rows on {dp} data-parallel ranks it must "
            f"be a multiple of {unit}, such as {' or '.join(near)}"
        )
    return rows // unit


def with_schedule(config: TrainConfig, steps: int | None, tokens: int | None) -> TrainConfig:
    """So many steps or tokens, warmed up over a tenth of them, 100 steps at most."""
    schedule = ScheduleConfig(steps=steps, tokens=tokens, warmup_steps=0)
    total = schedule.resolved(config.rows_per_step * config.data.sequence_length).total
    return replace(config, schedule=replace(schedule, warmup_steps=min(ScheduleConfig.warmup_steps, total // 10)))


@dataclass(frozen=True)
class Sums:
    """What a run amounts to."""

    parameters: int
    vocabulary: int
    tokens_per_step: int
    steps: int
    memory: Memory
    """Predicted peak of the rank that needs most."""


def sums(config: TrainConfig) -> Sums:
    """Check the layout, and reckon.

    Raises:
        ValueError: the layout cannot train this model; the nearest ones that can are named.
    """
    shape = shape_of(config)
    check_parallel(config, shape)
    tokens = config.rows_per_step * config.data.sequence_length
    steps = config.schedule.resolved(tokens).total
    return Sums(count_parameters(shape), shape.vocab_size, tokens, steps, predict(config, shape))


def planned_work(config: TrainConfig, shape: LlamaConfig) -> Work:
    """A step of the run as the planner sees it; device and dtype that are left open are a GPU's."""
    device = "cuda" if config.device == "auto" else config.device
    dtype = config.dtype if config.dtype != "auto" else "bfloat16" if device == "cuda" else "float32"
    return replace(work_of(replace(config, device=device, dtype=dtype)), model=shape)


def predict(config: TrainConfig, shape: LlamaConfig) -> Memory:
    """Peak of the rank that needs most; a CPU's matrix products reserve no work space."""
    work = planned_work(config, shape)
    return predict_memory(work, workspace=0.0) if config.device == "cpu" else predict_memory(work)


def describe(config: TrainConfig, found: Sums, gpu_memory: float) -> list[str]:
    """The sums in lines, for the terminal and for the file's heading."""
    data, settings = config.data, config.parallel
    dp = settings.dp_replicate * settings.dp_shard
    rows, length = config.rows_per_step, data.sequence_length
    unit, size = ("GB", 1e9) if found.memory.total >= 1e8 else ("MB", 1e6)
    parts = ", ".join(
        f"{name} {getattr(found.memory, name) / size:.2f}"
        for name in ("weights", "gradients", "optimizer", "activations", "buffers")
    )
    learned = config.model.start_from is None and data.tokenizer is None and not data.sources
    learning = ", of a tokenizer that is learned from the text (--tokenizer names one)" if learned else ""
    lines = [
        f"model      {human(found.parameters)} parameters, vocabulary {found.vocabulary:,}{learning}",
        f"batch      {_rows(data.micro_batch_size)} × {data.gradient_accumulation_steps} accumulated × {dp} "
        f"data-parallel = {_rows(rows)} of {length} tokens = {human(found.tokens_per_step)} tokens a step",
        f"length     {found.steps} steps = {human(found.steps * found.tokens_per_step)} tokens; "
        f"a billion tokens are {-(-(10**9) // found.tokens_per_step):,} steps",
    ]
    per_process = "process" if config.device == "cpu" else "GPU"
    line = f"memory     {found.memory.total / size:.2f} {unit} a {per_process} (predicted): {parts}"
    if config.device != "cpu" and found.memory.total > 0.95 * gpu_memory * 1e9:
        line += f"; more than {gpu_memory:g} GB hold: see `llama-train plan`, or set activation_checkpointing"
    return [*lines, line]


def _rows(count: int) -> str:
    return f"{count} row" if count == 1 else f"{count} rows"
