"""The planner's memory against peaks that were measured: SmolLM-1.7B shape without tied embeddings, pure bfloat16,
one or two H200, torch 2.11 (benchmarks/results/multigpu-2xh200.md)."""

from __future__ import annotations

import pytest

from llama_core import preset
from llama_parallel import ParallelConfig
from llama_parallel.planner import Work, predict_memory
from llama_parallel.planner.activations import widths

MODEL = preset("smollm-1.7b").replace(tie_word_embeddings=False)
SHORT = {"sequence_length": 2048, "micro_batch": 4}
LONG = {"sequence_length": 8192, "micro_batch": 1}


@pytest.mark.parametrize(
    ("gigabytes", "layout", "micro_batches", "settings"),
    [
        (31.8, {}, 4, SHORT),
        (31.8, {"dp_replicate": 2}, 4, SHORT),
        (30.2, {"dp_shard": 2}, 4, SHORT),
        (17.3, {"tp": 2}, 4, SHORT),
        (25.8, {"pp": 2}, 4, SHORT),
        (28.3, {"pp": 2}, 4, {**SHORT, "schedule": "interleaved_1f1b", "stages_per_rank": 2}),
        (25.9, {"pp": 2}, 4, {**SHORT, "schedule": "zero_bubble"}),
        (21.7, {"cp": 2}, 4, LONG),
        (22.1, {"cp": 2}, 4, {**LONG, "context": "ulysses"}),
        (39.2, {"cp": 2}, 1, {**LONG, "sequence_length": 32768}),
        (40.8, {"cp": 2}, 1, {**LONG, "sequence_length": 32768, "context": "ulysses"}),
    ],
)
def test_within_a_tenth_of_the_measured_peak(
    gigabytes: float, layout: dict[str, int], micro_batches: int, settings: dict[str, int | str]
) -> None:
    config = ParallelConfig(**layout)
    rows = micro_batches * int(settings["micro_batch"]) * config.dp
    work = Work(MODEL, config, global_batch=rows, precision="bfloat16", **settings)  # type: ignore[arg-type]
    # When these were measured, SwiGLU's result was kept for the down product everywhere: for all layers of a
    # micro-batch on one stage, and, on the first of two stages, for half of the layers of two.
    kept_then = MODEL.num_hidden_layers * widths(work).inner * work.tokens if widths(work).inner_extra == 0 else 0.0
    assert (predict_memory(work).total + kept_then) / 1e9 == pytest.approx(gigabytes, rel=0.1)
