"""What benchmarks/train.py measures: works by group, how a step is timed, and where its time goes."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from multigpu_shares import kernels_of, shares_of, top_kernels

from llama_core import LlamaConfig, preset
from llama_parallel import Process
from llama_train.batches import Batch
from llama_train.build import count_parameters
from llama_train.config import DataConfig, OptimizerConfig, TrainConfig
from llama_train.flops import flops_per_token, flops_per_token_torchtitan, mfu
from llama_train.trainer import OneProcess
from llama_train.world import World

Say = Callable[[str, object], None]
PEAK = 989.5e12  # dense bfloat16 of an H100 and H200, which picotron divides by
SMOL = preset("smollm-1.7b").replace(tie_word_embeddings=False)  # as picotron's, which ties nothing
LLAMA = preset("llama-3-8b")
TINY = LlamaConfig(
    vocab_size=512, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=512,
)  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Training steps of one program on one shape."""

    name: str
    who: str
    shape: LlamaConfig
    rows: int
    length: int
    accumulation: int = 1
    master: bool = False
    fp8: bool = False
    compile: bool = False
    checkpointing: str = "none"
    once: bool = False
    """A single step after a short warm-up: one takes a minute."""

    @property
    def tokens(self) -> int:
        return self.rows * self.length * self.accumulation

    def tiny(self) -> Work:
        return replace(self, shape=TINY, rows=min(self.rows, 2), length=64)


_SMOL = Work("SmolLM-1.7B 8 × 2048, pure bf16", "ours", SMOL, 8, 2048)
_LLAMA = Work("Llama-3-8B 1 × 8192, pure bf16", "ours", LLAMA, 1, 8192)
_COMPILED, _EAGER = "transformers, layers compiled, cuDNN attention", "transformers"
_LIGER, _PLAIN = "transformers, Liger", "our model in plain torch, sdpa"

WORKS = {
    "smol": [
        _SMOL,
        replace(_SMOL, who=_COMPILED),
        replace(_SMOL, who="ours, layers compiled", compile=True),
        replace(_SMOL, who=_PLAIN),
        replace(_SMOL, who=_EAGER),
        replace(_SMOL, who=_LIGER),
        replace(_SMOL, who="ours, again"),  # clocks move: how far in this run?
        replace(_SMOL, name="SmolLM-1.7B 4 × 8 × 2048", who="ours, pure bf16", accumulation=4),
        replace(_SMOL, name="SmolLM-1.7B 4 × 8 × 2048", who="ours, float32 master", accumulation=4, master=True),
        replace(_SMOL, name="SmolLM-1.7B 4 × 8 × 2048", who="ours, fp8", accumulation=4, fp8=True),
    ],
    "8b": [
        _LLAMA,
        replace(_LLAMA, who=_COMPILED),
        replace(_LLAMA, who="ours, fp8", fp8=True),
        replace(_LLAMA, who="ours, again"),
        replace(_LLAMA, who=_LIGER),
    ],
    "long": [
        Work(f"Llama-3-8B 1 × {length}, full checkpointing", "ours", LLAMA, 1, length, checkpointing="full", once=True)
        for length in (131072,)
    ],
}
GROUPS = (*WORKS, "loop", "learn")


def run_group(group: str, seconds: float, tiny: bool, profile: bool, skip: list[str], say: Say) -> None:
    """Measure and tell. A work that fails is told, and the next begins."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if not tiny and device.type != "cuda":
        raise SystemExit("there is no GPU: only --tiny runs here")
    if group in ("loop", "learn"):
        import train_loop

        getattr(train_loop, group)(device, tiny, say)
        return
    for work in WORKS[group]:
        if any(name in (work.who, f"{group}: {work.who}") for name in skip):
            continue
        if tiny:
            work = work.tiny()
        started = time.monotonic()
        try:
            if device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()
            measure(work, device, seconds, profile, say)
        except Exception as error:  # the others are to be measured all the same
            say("failed", f"{work.name}, {work.who}: {type(error).__name__}: {str(error)[:300]}")
        print(f"{work.name}, {work.who}: {time.monotonic() - started:.1f} s in all", flush=True)
        free()


def measure(work: Work, device: torch.device, seconds: float, profile: bool, say: Say) -> None:
    """Build, warm up, time whole steps without waiting between them, tell."""
    step = step_of(work, device)
    loss = step()
    if loss is not None:
        loss = float(loss)  # of the initial weights: about log V for everyone
    if not work.once:
        step()
    started = time.perf_counter()
    step()
    wait(device)
    one = time.perf_counter() - started
    steps = 1
    if not work.once:
        steps = min(20, max(8, round(seconds / one)))
        if device.type == "cpu":
            steps = 2
        started = time.perf_counter()
        for _ in range(steps):
            step()
        wait(device)
        one = (time.perf_counter() - started) / steps
    speed, shape = work.tokens / one, work.shape
    width = shape.num_attention_heads * shape.head_width
    sizes = (shape.num_hidden_layers, width, work.length)
    count, table = count_parameters(shape), shape.vocab_size * shape.hidden_size
    say(
        "step",
        {
            "work": work.name,
            "who": work.who,
            "seconds": one,
            "steps": steps,
            "loss": loss,
            "speed": speed,
            "mfu": mfu(speed, flops_per_token(count, *sizes), PEAK),
            "mfu_torchtitan": mfu(speed, flops_per_token_torchtitan(count, table, *sizes), PEAK),
            "peak": torch.cuda.max_memory_allocated() if device.type == "cuda" else 0,
        },
    )
    if profile and not work.once and work.who.startswith("ours") and device.type == "cuda":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            step()
            wait(device)
        kernels = kernels_of(profiler)
        print(f"\n{work.name}, {work.who}: {shares_of(kernels)}\n{top_kernels(kernels, limit=36)}", flush=True)


def step_of(work: Work, device: torch.device) -> Callable[[], object]:
    """One optimizer step of the work's program, which returns the loss."""
    generator = torch.Generator().manual_seed(0)
    rows = [
        torch.randint(work.shape.vocab_size, (work.rows, work.length + 1), generator=generator)
        for _ in range(work.accumulation)
    ]
    if not work.who.startswith("our"):
        import train_rivals

        tokens = rows[0].to(device)
        how = {_COMPILED: "compiled", _EAGER: "eager", _LIGER: "liger"}[work.who]
        return train_rivals.step_of(work.shape, tokens, device, how)
    trainer = OneProcess(config_of(work, device), work.shape, World(Process(), device))
    batches = [Batch(x[:, :-1].contiguous(), x[:, 1:].contiguous()) for x in rows]
    if device.type == "cuda":
        batches = [batch.pinned() for batch in batches]  # as the loop has them

    def step() -> object:
        return trainer.step(batches, 3e-4, 0.0).loss

    if work.once:  # kernels are compiled and handles made on rows of another length
        cut = min(512, work.length)
        short = [Batch(x[:, :cut].contiguous(), x[:, 1 : cut + 1].contiguous()) for x in rows]
        trainer.step(short, 3e-4, 0.0)
        first = [lambda: trainer.step(short, 3e-4, 0.0).loss]
        return lambda: first.pop()() if first else step()
    return step


def config_of(work: Work, device: torch.device) -> TrainConfig:
    """The settings of llama-train that make this work."""
    plain = work.who == _PLAIN
    return TrainConfig(
        device=device.type,
        dtype="bfloat16",
        fp8=work.fp8,
        kernels="plain" if plain else "auto",
        attention="sdpa" if plain else "auto",
        compile=work.compile,
        activation_checkpointing=work.checkpointing,  # type: ignore[arg-type]
        data=DataConfig(
            sequence_length=work.length,
            micro_batch_size=work.rows,
            gradient_accumulation_steps=work.accumulation,
        ),
        optimizer=OptimizerConfig(master_weights=work.master, max_grad_norm=0.0),
    )


def free() -> None:
    """Everything that the last work held."""
    gc.collect()
    torch.compiler.reset()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def wait(device: torch.device) -> None:
    """For all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize()
