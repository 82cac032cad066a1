"""What is measured on how many GPUs."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from llama_core import LlamaConfig, preset
from llama_parallel import ParallelConfig, ParallelPlan, bubble
from llama_parallel.schedules import stages_of_rank

# picotron has no tied embeddings, and is what SmolLM's numbers are compared with
SMOL = preset("smollm-1.7b").replace(tie_word_embeddings=False)
LLAMA2, LLAMA3 = preset("llama-2-7b"), preset("llama-3-8b")
PLAIN, OVERLAP = ParallelPlan(), ParallelPlan(overlap_tp=True)
SMALL = LlamaConfig(
    vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=8, num_attention_heads=8,
    num_key_value_heads=8, max_position_embeddings=512,
)  # fmt: skip

# tokens/s/GPU of picotron on two H200 (another run, so only a rough guide): its best layout of the kind
_PICOTRON = {"dp2": 42356.0, "tp2": 31491.0, "pp2 1f1b": 34856.0, "cp2 ring 8k": 4900.0}


@dataclass(frozen=True)
class Work:
    """Training steps of one model on one layout."""

    name: str
    model: LlamaConfig
    layout: ParallelConfig = field(default_factory=ParallelConfig)
    plan: ParallelPlan = field(default_factory=ParallelPlan)
    rows: int = 4
    """Sequences in a micro-batch of each data-parallel rank."""
    length: int = 2048
    accumulation: int = 4
    """Micro-batches of a step."""
    baseline: str | None = None
    """The work on one GPU whose tokens/s this one's are held against."""
    master: bool = False
    """float32 parameters with bfloat16 products, instead of bfloat16 throughout."""
    timeout: float = 75.0

    @property
    def gpus(self) -> int:
        return self.layout.num_processes

    @property
    def tokens(self) -> int:
        """Of one step, on all GPUs together."""
        return self.layout.dp * self.accumulation * self.rows * self.length

    @property
    def picotron(self) -> float | None:
        return _PICOTRON.get(self.name) if self.model == SMOL else None

    @property
    def bubble(self) -> float | None:
        """What the schedule leaves idle by its formula."""
        if self.layout.pp == 1:
            return None
        virtual = stages_of_rank(self.plan.schedule, self.plan.virtual_stages)
        return bubble(self.plan.schedule, self.layout.pp, self.accumulation, virtual=virtual)

    def tiny(self) -> Work:
        """The same layout with shapes for a CPU. A cut of 2048 tokens becomes 32."""
        model = SMALL.replace(num_hidden_layers=max(4, 2 * self.layout.pp))
        return replace(self, model=model, length=max(32, self.length // 1024), rows=min(self.rows, 2))


def works(gpus: int) -> list[Work]:
    """In order of interest: what comes last may find no time left."""
    n = gpus
    one = [Work("one", SMOL, timeout=120), Work("one 8k", SMOL, rows=1, length=8192)]
    if n == 1:
        return [*one, Work("8B one", LLAMA3, rows=1, length=8192, accumulation=1)]
    dp = ParallelConfig(dp_replicate=n)
    found = [
        one[0],
        Work(f"dp{n}", SMOL, dp, baseline="one"),
        Work(f"fsdp{n}", SMOL, ParallelConfig(dp_shard=n), baseline="one"),
        Work(
            f"fsdp{n} kept", SMOL, ParallelConfig(dp_shard=n), ParallelPlan(reshard_after_forward=False), baseline="one"
        ),
        Work(f"tp{n}", SMOL, ParallelConfig(tp=n), baseline="one"),
        Work(f"tp{n} overlapped", SMOL, ParallelConfig(tp=n), OVERLAP, baseline="one"),
        *(pipeline(f"pp{n} {name}", SMOL, ParallelConfig(pp=n), name, "one") for name in _SCHEDULES),
        one[1],
        *(context(f"cp{n} {kind} 8k", ParallelConfig(cp=n), kind, 8192) for kind in ("ring", "ulysses")),
        *(work for work in mixes(n) if work.model is SMOL),
        Work("8B one", LLAMA3, rows=1, length=8192, accumulation=1, timeout=90),
        eight(f"8B fsdp{n}", ParallelConfig(dp_shard=n)),
        eight(f"8B tp{n}", ParallelConfig(tp=n)),
        eight(f"8B tp{n} overlapped", ParallelConfig(tp=n), OVERLAP),
        *(work for work in mixes(n) if work.model is not SMOL),
        *(context(f"cp{n} {kind} 32k", ParallelConfig(cp=n), kind, 32768) for kind in ("ring", "ulysses")),
        context(f"cp{n} ring 128k", ParallelConfig(cp=n), "ring", 131072),
        Work(f"fsdp{n} float32", SMOL, ParallelConfig(dp_shard=n), baseline="one", master=True),
        context(f"cp{n} ulysses 128k", ParallelConfig(cp=n), "ulysses", 131072),
    ]
    if n == 8:
        found.append(context("cp8 ring 256k", ParallelConfig(cp=8), "ring", 262144))
    return found


_SCHEDULES = ("1f1b", "interleaved_1f1b", "zero_bubble")


def mixes(gpus: int) -> list[Work]:
    """Several dimensions at once, for 4 and 8 GPUs."""
    if gpus < 4:
        return []
    half = gpus // 2
    pp = ParallelConfig(dp_replicate=half // 2, tp=2, pp=2) if gpus == 8 else ParallelConfig(tp=2, pp=2)
    found = [
        Work(f"dp{half} tp2", SMOL, ParallelConfig(dp_replicate=half, tp=2), baseline="one"),
        Work(f"fsdp{half} tp2", SMOL, ParallelConfig(dp_shard=half, tp=2), baseline="one"),
        *(pipeline(f"{'dp2 ' if gpus == 8 else ''}tp2 pp2 {name}", SMOL, pp, name, "one") for name in _SCHEDULES),
        context(f"fsdp2 cp{half} 32k", ParallelConfig(dp_shard=2, cp=half), "ring", 32768),
        eight(f"8B fsdp{half} tp2", ParallelConfig(dp_shard=half, tp=2)),
        Work(f"7B fsdp{gpus}", LLAMA2, ParallelConfig(dp_shard=gpus), rows=2, length=4096, accumulation=1),
        Work(f"7B fsdp{half} tp2", LLAMA2, ParallelConfig(dp_shard=half, tp=2), rows=4, length=4096, accumulation=1),
    ]
    if gpus == 8:
        found.append(context("fsdp2 tp2 cp2 8k", ParallelConfig(dp_shard=2, tp=2, cp=2), "ring", 8192))
        three = ParallelConfig(dp_shard=2, tp=2, pp=2)
        found += [pipeline(f"8B fsdp2 tp2 pp2 {name}", LLAMA3, three, name, "8B one", 1, 8192) for name in _SCHEDULES]
    return found


def pipeline(
    name: str, model: LlamaConfig, layout: ParallelConfig, schedule: str, baseline: str, rows: int = 4,
    length: int = 2048,
) -> Work:  # fmt: skip
    """As many micro-batches as picotron's run had, at least two for each rank of the pipeline."""
    plan, count = ParallelPlan(schedule=schedule), max(4, 2 * layout.pp)
    return Work(name, model, layout, plan, rows, length, count, baseline)


def context(name: str, layout: ParallelConfig, kind: str, length: int) -> Work:
    """One long sequence. From 128k on a layer is computed twice: what it keeps would not fit.

    Several micro-batches of few tokens each keep the parameters that FSDP gathers: a gathering costs as much for 4096
    tokens of a GPU as for any number.
    """
    count, baseline = (4, "one 8k") if length == 8192 else (1, None)
    plan = ParallelPlan(
        context=kind,
        activation_checkpointing="full" if length > 65536 else "none",
        reshard_after_forward=False if count > 1 else None,
    )
    return Work(name, SMOL, layout, plan, 1, length, count, baseline, timeout=75.0 if length <= 32768 else 120.0)


def eight(name: str, layout: ParallelConfig, plan: ParallelPlan = PLAIN) -> Work:
    """Llama-3-8B at its full context."""
    return Work(name, LLAMA3, layout, plan, rows=1, length=8192, accumulation=1, baseline="8B one", timeout=90)
