"""Memory of a rank of Llama 3 70B on 64 GPUs: the real step on fake tensors, beside the planner's formulas.

    python benchmarks/memory_70b.py

Needs no GPU and no memory; about half a minute for each layout.
"""

from __future__ import annotations

from llama_core import preset
from llama_parallel import ParallelConfig
from llama_parallel.fake_memory import memory_at
from llama_parallel.layout import describe
from llama_parallel.planner import Work, predict_memory

LAYOUTS = (
    (ParallelConfig(dp_shard=64), "full", 1),
    (ParallelConfig(dp_shard=8, tp=8), "full", 1),
    (ParallelConfig(dp_shard=4, tp=8, pp=2), "selective", 4),
)
GB = 1e9


def main() -> None:
    print(f"{'layout':24} {'checkpointing':14} {'weights':>8} {'gradients':>9} {'optimizer':>9} {'rest':>6}", end=" ")
    print(f"{'total':>6} {'planner':>8}   (GB, mixed precision, 8192 tokens, micro-batches of 1)")
    for layout, checkpointing, micro_batches in LAYOUTS:
        rows = layout.dp * micro_batches
        work = Work(preset("llama-3-70b"), layout, 8192, rows, checkpointing=checkpointing)
        found, wanted = memory_at(work), predict_memory(work)
        print(
            f"{describe(layout):24} {checkpointing:14} {found.weights / GB:8.1f} {found.gradients / GB:9.1f} "
            f"{found.optimizer / GB:9.1f} {found.rest / GB:6.1f} {found.total / GB:6.1f} "
            f"{(wanted.total - wanted.slack) / GB:8.1f}",
            flush=True,
        )


if __name__ == "__main__":
    main()
