from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from llama_core import preset
from llama_train import TrainConfig
from llama_train.config import ParallelSettings
from llama_train.layout_choice import check_parallel, fill_in, keeps_float32, plan_of, sizes


def test_what_is_left_shards_the_data() -> None:
    assert fill_in(ParallelSettings(), 1).dp_shard == 1
    assert fill_in(ParallelSettings(), 8).dp_shard == 8
    filled = fill_in(ParallelSettings(dp_replicate=2, tp=2), 16)
    assert (filled.dp_shard, sizes(filled).num_processes) == (4, 16)


def test_sizes_that_do_not_make_up_the_processes() -> None:
    with pytest.raises(ValueError, match=r"parallel.tp 3 = 3 processes do not divide the 8 that were started"):
        fill_in(ParallelSettings(tp=3), 8)
    with pytest.raises(ValueError, match=r"dp_shard 2 × parallel.pp 2 = 4 processes, but 1 was started: torchrun .* 4"):
        fill_in(ParallelSettings(dp_shard=2, pp=2), 1)


def test_the_plan_says_what_the_settings_say(change: Callable[..., TrainConfig]) -> None:
    settings = ParallelSettings(
        dp_shard=2,
        pp=2,
        cp=2,
        context="ulysses",
        schedule="interleaved_1f1b",
        reshard_after_forward="no",
        overlap_tp=True,
    )
    config = TrainConfig(dtype="bfloat16", attention="flash", activation_checkpointing="full", parallel=settings)
    plan = plan_of(config)
    assert (plan.context, plan.schedule, plan.reshard_after_forward) == ("ulysses", "interleaved_1f1b", False)
    assert (plan.attention, plan.activation_checkpointing) == ("flash", "full")
    assert plan.overlap_tp
    assert plan.compute_dtype == torch.bfloat16
    assert keeps_float32(config)
    pure = change(config, **{"optimizer.master_weights": False})
    assert plan_of(pure).compute_dtype is None
    assert not keeps_float32(pure)


def test_what_cannot_work_is_refused_with_its_reason(change: Callable[..., TrainConfig]) -> None:
    base = TrainConfig(parallel=ParallelSettings(dp_shard=1, pp=2, schedule="zero_bubble"))
    with pytest.raises(ValueError, match="does not go with compile = true"):
        check_parallel(
            replace(base, compile=True, data=replace(base.data, gradient_accumulation_steps=2)), preset("tiny")
        )
    with pytest.raises(ValueError, match="overlap_tp goes neither with compile"):
        check_parallel(
            TrainConfig(compile=True, parallel=ParallelSettings(dp_shard=1, overlap_tp=True)), preset("tiny")
        )
    with pytest.raises(ValueError, match="zero_bubble over pp 2 cannot run 5 micro-batches"):
        check_parallel(
            change(base, **{"data.gradient_accumulation_steps": 5, "parallel.virtual_stages": 1}), preset("tiny")
        )
    shared = replace(base, attention="plain", parallel=ParallelSettings(dp_shard=1, cp=2))
    with pytest.raises(ValueError, match="attention is 'plain'"):
        check_parallel(shared, preset("tiny"))
