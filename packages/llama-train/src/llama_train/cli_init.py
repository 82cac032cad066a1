"""`llama-train init --model MODEL ... RUN.toml`: the complete settings of a new run."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

import tyro

from .config_checks import finite_and, require

_EXAMPLES = """
Examples:
  llama-train init --model smollm2-135m first.toml
  llama-train init --model smollm2-135m --num-hidden-layers 12 --dp 4 --global-batch 64 --seq 2048 small.toml
  llama-train init --model llama-3-8b --dp 8 --tp 2 --micro-batch 2 --tokens 20000000000 --sources shards/web 8b.toml
  llama-train init --model path/to/Llama-3.2-1B --source my-text tune.toml        goes on from its weights
  llama-train init --model path/to/Llama-3.2-1B --from-scratch --num-hidden-layers 8 new.toml
"""


@dataclass(frozen=True)
class InitConfig:
    """Write the settings of a new run: every key with its help, defaults as comments. Prints what the run amounts to.

    A layout that cannot train the model is refused with the nearest that can. No file is ever replaced.
    """

    output: Annotated[str, tyro.conf.Positional]
    """The TOML file to write; `llama-train run` takes it."""
    model: str
    """A preset of llama_core, such as smollm2-135m; or a model to go on from: a folder, a .gguf file, "embedded"."""
    from_scratch: bool = False
    """With a model given by its path: take its shape and tokenizer, and fresh weights."""
    hidden_size: int | None = None
    """Another width than the model's."""
    intermediate_size: int | None = None
    """Another width of the feed-forward part."""
    num_hidden_layers: int | None = None
    """Another number of layers."""
    num_attention_heads: int | None = None
    """Another number of query heads."""
    num_key_value_heads: int | None = None
    """Another number of key and value heads."""
    dp: int = 1
    """Data-parallel ranks that share parameters in shards (FSDP)."""
    dp_replicate: int = 1
    """Groups of them, each with the whole model."""
    tp: int = 1
    """Tensor-parallel ranks."""
    pp: int = 1
    """Pipeline stages."""
    cp: int = 1
    """Context-parallel ranks."""
    global_batch: int | None = None
    """Rows of one step over all ranks: fixes how many micro-batches are accumulated."""
    accumulation: int | None = None
    """Micro-batches that each rank accumulates, if not by --global-batch; unset means one for each pipeline stage."""
    micro_batch: int = 1
    """Rows at once."""
    seq: int | None = None
    """Tokens in a row; unset means 2048, or what the model can read if that is less."""
    steps: int | None = None
    """Steps of the run; unset means 1000."""
    tokens: int | None = None
    """Tokens of the run, in place of --steps."""
    learning_rate: float = 3e-4
    """The highest."""
    source: str = "stdlib"
    """Text file or folder; stdlib is the source text of Python's own library, to try things."""
    sources: tuple[str, ...] = ()
    """Folders of `llama-train prepare`, in place of --source."""
    tokenizer: str | None = None
    """Folder or tokenizer.json; unset means the model's own, or one learned from the text."""
    vocab_size: int = 2048
    """Vocabulary of a tokenizer that is learned from the text."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """auto is bfloat16 on a GPU and float32 on a CPU."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto takes a GPU where there is one; the prediction is then for a GPU."""
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    """What is computed again to save memory."""
    compile: bool = False
    """Whether torch.compile is applied to every layer."""
    gpu_memory: float = 80.0
    """GB of a GPU, for the warning that it is too little."""
    name: str | None = None
    """Of the run, whose folder is runs/NAME; unset means that of the file."""

    def __post_init__(self) -> None:
        for name in ("dp", "dp_replicate", "tp", "pp", "cp", "micro_batch", "global_batch", "accumulation"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
        require(self.seq is None or self.seq >= 2, "--seq", self.seq, "at least 2")
        require(self.output.endswith(".toml"), "the file", self.output, "a name that ends in .toml")
        require(finite_and(self.gpu_memory, self.gpu_memory > 0), "--gpu-memory", self.gpu_memory, "above 0 (GB)")
        if self.global_batch is not None and self.accumulation is not None:
            raise ValueError("--global-batch and --accumulation say the same: give one of them")


def main(arguments: list[str]) -> int:
    """Write and tell; the exit status."""
    description = (InitConfig.__doc__ or "") + "\n" + _EXAMPLES
    asked = tyro.cli(InitConfig, args=arguments, prog="llama-train init", description=description)
    path = Path(asked.output)
    if path.exists():
        raise ValueError(f"{path} exists, and is left as it is: give another name, or move it away")

    import shlex

    from .config import DataConfig, OptimizerConfig, ParallelSettings, TrainConfig
    from .manage.commented_toml import commented_toml
    from .manage.new_run import accumulation_of, choose_model, describe, shape_of, sums, with_schedule
    from .manage.run_files import run_path

    keys = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    changes = {key: getattr(asked, key) for key in keys if getattr(asked, key) is not None}
    model, tokenizer = choose_model(asked.model, changes, asked.from_scratch)
    if asked.global_batch is not None:
        accumulation = accumulation_of(asked.global_batch, asked.micro_batch, asked.dp * asked.dp_replicate)
    else:
        accumulation = asked.accumulation or asked.pp
    data = DataConfig(
        source=asked.source,
        sources=asked.sources,
        tokenizer=asked.tokenizer or tokenizer,
        vocab_size=asked.vocab_size,
        sequence_length=asked.seq or 2,
        micro_batch_size=asked.micro_batch,
        gradient_accumulation_steps=accumulation,
    )
    config = TrainConfig(
        name=asked.name or path.stem,
        device=asked.device,
        dtype=asked.dtype,
        activation_checkpointing=asked.activation_checkpointing,
        compile=asked.compile,
        model=model,
        data=data,
        optimizer=OptimizerConfig(learning_rate=asked.learning_rate),
        parallel=ParallelSettings(
            dp_shard=asked.dp, dp_replicate=asked.dp_replicate, tp=asked.tp, pp=asked.pp, cp=asked.cp
        ),
    )
    if asked.seq is None:
        length = min(2048, shape_of(config).max_position_embeddings)
        config = replace(config, data=replace(data, sequence_length=length))
    config = with_schedule(config, asked.steps, asked.tokens)
    found = sums(config)
    lines = describe(config, found, asked.gpu_memory)
    command = shlex.join(["llama-train", "init", *arguments])
    text = commented_toml(config, "\n".join(["A run of llama-train, written by", f"  {command}", "", *lines]))
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError:
        raise ValueError(f"{path} exists, and is left as it is: give another name, or move it away") from None
    print("\n".join(lines))
    print(f"written    {path}")
    if run_path(config).exists():
        print(
            f"note       {run_path(config)} exists: the run goes on there if it is the same, and is refused otherwise"
        )
    processes = asked.dp * asked.dp_replicate * asked.tp * asked.pp * asked.cp
    start = "llama-train run" if processes == 1 else f"torchrun --nproc-per-node {processes} -m llama_train run"
    print(f"start      {start} {shlex.quote(str(path))}")
    if processes > 8:
        print(f"cluster    llama-train submit {shlex.quote(str(path.parent))}")
    return 0
