"""The planner: what fits, what is recommended, what it says where nothing fits, and what it refuses."""

from __future__ import annotations

import json

import pytest

from llama_core import Llama, preset
from llama_parallel import ParallelConfig, check_layout
from llama_parallel.planner import H100, Hardware, Work, describe_plan, plan, predict_cost, predict_memory
from llama_parallel.planner.parameters import elements, stages

SMALL = preset("smollm-1.7b")


def test_what_is_recommended_fits_runs_and_is_the_fastest() -> None:
    result = plan(SMALL, 8, 40, 2048, 64)
    best = result.best
    assert best is not None
    assert best.memory.total <= 40e9
    assert best.cost.step == min(candidate.cost.step for candidate in result.candidates)
    for candidate in result.candidates:
        assert candidate.layout.num_processes == 8
        check_layout(candidate.layout, SMALL, sequence_length=2048, global_batch=64)
        assert candidate.memory.total <= 40e9
    assert len({candidate.layout for candidate in result.candidates}) == len(result.candidates)


def test_text_names_the_layout_and_its_figures() -> None:
    text = describe_plan(plan(SMALL, 2, 80, 2048, 16), limit=2)
    for word in ("Recommended:", "weights", "optimizer", "activations", "tokens/s", "MFU", "bubble", "… and"):
        assert word in text
    assert max(map(len, text.splitlines())) <= 160


def test_where_nothing_fits_it_says_what_would() -> None:
    result = plan(SMALL, 1, 16, 2048, 8)
    assert result.best is None
    assert result.smallest is not None
    assert result.smallest.memory.total > 16e9
    text = describe_plan(result)
    assert "Nothing fits." in text
    more = next(line for line in result.advice if "GPUs of 16 GB would do" in line)
    assert plan(SMALL, int(more.split()[0]), 16, 2048, 8).best is not None


def test_plan_is_plain_data() -> None:
    data = json.loads(json.dumps(plan(SMALL, 2, 80, 2048, 16).to_dict(limit=3)))
    assert data["fits"]
    assert len(data["candidates"]) == 3
    memory = data["candidates"][0]["memory"]
    assert memory["total"] == pytest.approx(sum(value for name, value in memory.items() if name != "total"))


@pytest.mark.parametrize("name", ["tiny", "tiny-tied", "smollm-135m", "llama-3-8b"])
def test_parameters_are_those_of_the_model(name: str) -> None:
    import torch

    with torch.device("meta"):
        model = Llama(preset(name))
    (stage,) = stages(preset(name), 1)
    assert sum(map(elements, stage.groups(preset(name), 1))) == model.num_parameters()


def test_tensor_parallelism_stays_inside_a_host() -> None:
    result = plan(SMALL, 8, 80, 2048, 64, hardware=Hardware(gpus_per_node=2))
    assert {candidate.layout.tp for candidate in result.candidates} == {1, 2}


def test_more_of_everything_needs_more_memory_and_time() -> None:
    base = Work(SMALL, ParallelConfig(), 2048, 16, micro_batch=2)

    def total(**changes: object) -> float:
        return predict_memory(Work(**{**vars(base), **changes})).total  # type: ignore[arg-type]

    assert total() < total(micro_batch=4)
    assert total(checkpointing="full") < total(checkpointing="selective") < total()
    assert total(precision="bfloat16") < total(precision="mixed")
    assert total() < total(kernels=False)
    assert total(layout=ParallelConfig(dp_shard=8)) < total(layout=ParallelConfig(dp_replicate=8))
    slow = predict_cost(base, Hardware(product_flops=1e14))
    assert slow.step > predict_cost(base, H100).step


def test_bandwidth_follows_where_a_group_lies() -> None:
    assert H100.links(1, 8) == (H100.nvlink_bandwidth, H100.latency)
    assert H100.links(8, 8) == (H100.network_bandwidth, H100.network_latency)  # one of each host: one adapter
    assert H100.links(1, 16)[0] == 8 * H100.network_bandwidth  # eight rings, through eight adapters


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus": 0}, "gpus = 0"),
        ({"gpu_memory": 0.0}, "gpu_memory = 0"),
        ({"sequence_length": -1}, "sequence_length = -1"),
        ({"precision": "int8"}, "'int8' is unknown; choose from mixed"),
        ({"schedules": ["dualpipe"]}, "'dualpipe' is unknown"),
        ({"micro_batch": 0}, "micro_batch = 0"),
    ],
)
def test_refused(changes: dict[str, object], message: str) -> None:
    asked = {"gpus": 2, "gpu_memory": 80.0, "sequence_length": 2048, "global_batch": 8, **changes}
    with pytest.raises(ValueError, match=message):
        plan(SMALL, **asked)  # type: ignore[arg-type]


def test_refused_rates() -> None:
    with pytest.raises(ValueError, match="latency = 0"):
        Hardware(latency=0)


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved_1f1b", "zero_bubble"])
@pytest.mark.parametrize("micro_batches", [8, 24])
def test_the_rank_that_needs_most_is_found_among_the_first_of_each_kind(schedule: str, micro_batches: int) -> None:
    chunks = 2 if schedule == "interleaved_1f1b" else 1
    layout = ParallelConfig(dp_shard=2, pp=8)
    work = Work(
        preset("llama-3-8b"), layout, 2048, 2 * micro_batches, 1, "mixed", schedule=schedule, stages_per_rank=chunks
    )
    every = [predict_memory(work, pipeline_rank=rank).total for rank in range(8)]
    assert predict_memory(work).total == max(every)
