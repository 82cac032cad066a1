"""What a step really sends equals the planner's formulas, to the byte, for every dimension."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from llama_core import LlamaConfig
from llama_parallel import ParallelConfig, ParallelPlan, accumulate_gradients, clip_grad_norm_
from llama_parallel.parity import Task, make_parallel, shares
from llama_parallel.planner import Work, volumes
from llama_parallel.testing import run_ranks
from llama_parallel.trace import CommTrace

MODEL = LlamaConfig(
    vocab_size=96,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
)
ROWS, LENGTH = 4, 16


def _sent(rank: int, layout: ParallelConfig, plan: ParallelPlan, accumulation: int) -> Any:
    generator = torch.Generator().manual_seed(1)
    tokens = torch.randint(MODEL.vocab_size, (1, ROWS, LENGTH), generator=generator)
    parallel = make_parallel(Task(MODEL, tokens, tokens, dtype=torch.float32), layout, plan)
    with CommTrace(parallel.mesh) as trace:
        for _ in range(2):  # in a first step, stages greet each other
            trace.next_step()
            accumulate_gradients(parallel, shares(parallel, tokens[0], tokens[0], accumulation))
            clip_grad_norm_(parallel.model, 1.0, parallel.mesh)
    return parallel.mesh.get_local_rank("pp"), trace.sums(2), trace.rows(), trace.table(2)


def _wanted(work: Work, pipeline_rank: int) -> dict[str, float]:
    found: dict[str, float] = {}
    for volume in volumes(work, pipeline_rank):
        found[volume.kind] = found.get(volume.kind, 0.0) + volume.sent
    return found


LAYOUTS = {
    "tp2": (ParallelConfig(tp=2), {}, 1),
    "tp4, k and v whole on each rank": (ParallelConfig(tp=4), {}, 1),
    "tp2, whole sequences": (ParallelConfig(tp=2), {"sequence_parallel": False}, 1),
    "tp2, full checkpointing": (ParallelConfig(tp=2), {"activation_checkpointing": "full"}, 1),
    "tp2, selective checkpointing": (ParallelConfig(tp=2), {"activation_checkpointing": "selective"}, 1),
    "dp_shard 2": (ParallelConfig(dp_shard=2), {}, 1),
    "dp_shard 2, two micro-batches": (ParallelConfig(dp_shard=2), {}, 2),
    "dp_shard 2, bfloat16 products": (ParallelConfig(dp_shard=2), {"compute_dtype": torch.bfloat16}, 1),
    "dp_replicate 2": (ParallelConfig(dp_replicate=2), {}, 2),
    "dp_replicate 2 · dp_shard 2": (ParallelConfig(dp_replicate=2, dp_shard=2), {}, 1),
    "cp2, ring": (ParallelConfig(cp=2), {}, 1),
    "cp2, ring, full checkpointing": (ParallelConfig(cp=2), {"activation_checkpointing": "full"}, 1),
    "cp2, Ulysses": (ParallelConfig(cp=2), {"context": "ulysses"}, 1),
    "pp2": (ParallelConfig(pp=2), {}, 2),
    "dp_shard 2 · pp2": (ParallelConfig(dp_shard=2, pp=2), {}, 2),
    "dp_shard 2 · tp2": (ParallelConfig(dp_shard=2, tp=2), {}, 2),
    "tp2 · pp2": (ParallelConfig(tp=2, pp=2), {}, 2),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_bytes_sent_are_those_of_the_formulas(name: str) -> None:
    layout, options, accumulation = LAYOUTS[name]
    plan = ParallelPlan(**options)
    work = Work(
        MODEL,
        layout,
        LENGTH,
        ROWS,
        micro_batch=ROWS // layout.dp // accumulation,
        precision="mixed" if plan.compute_dtype is not None else "float32",
        checkpointing=plan.activation_checkpointing,
        context=plan.context,
        sequence_parallel=plan.sequence_parallel,
    )
    for pipeline_rank, sums, rows, _ in run_ranks(_sent, layout.num_processes, layout, plan, accumulation):
        found = {kind: sent for kind, (_, sent, _) in sums.items() if sent}
        assert found == pytest.approx(_wanted(work, pipeline_rank), rel=1e-12), rows


def test_rows_say_what_went_where_and_how_long_it_took() -> None:
    (_, sums, rows, table), _ = run_ranks(_sent, 2, ParallelConfig(tp=2), ParallelPlan(), 1)
    assert {row["step"] for row in rows} == {1, 2}
    second = [row for row in rows if row["step"] == 2]
    assert all(row["seconds"] > 0 for row in second)
    assert sum(row["calls"] for row in second) == sum(calls for calls, _, _ in sums.values())
    assert {row["dim"] for row in second if row["kind"] == "tp"} == {"tp"}
    gathers = [row for row in second if row["operation"] == "all_gather" and row["dtype"] == "float32"]
    assert all(row["sent"] == row["calls"] * 4 * math.prod(row["shape"]) for row in gathers)  # to one other rank
    assert "MB sent" in table.splitlines()[0]
