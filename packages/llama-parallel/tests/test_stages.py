"""Parts of a model: together they are the whole one, under its names, and they load and save as such."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llama_core import Llama, LlamaConfig, init_weights, load_model, save_model
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, init_shards, load_shards, parallelize
from llama_parallel.parity import _copies
from llama_parallel.shards import EMBEDDING, HEAD
from llama_parallel.stage_layers import stage_layers
from llama_parallel.stages import StagedLlama, cut, separate
from llama_parallel.testing import run_ranks

FIVE = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=5, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_bias=True,
)  # fmt: skip
TIED = FIVE.replace(tie_word_embeddings=True)
INTERLEAVED = ParallelPlan(schedule="interleaved_1f1b")


def make(layout: ParallelConfig, plan: ParallelPlan | None, shape: LlamaConfig) -> Llama:
    with torch.device("meta"):
        model = Llama(shape)
    return parallelize(model, build_mesh(layout), plan).model


@pytest.mark.parametrize("virtual", [1, 2])
def test_ranks_share_the_model_out(virtual: int) -> None:
    names: list[str] = []
    stages = stage_layers(FIVE, 2 * virtual)
    whole = Llama(FIVE)
    tokens = torch.arange(8).view(1, 8)
    outputs: dict[int, Llama] = {}
    for rank in range(2):
        model = Llama(FIVE)  # with the weights of seed 0, like `whole`
        own = range(rank, len(stages), 2)
        cut(model, stages, own)
        outputs |= dict(zip(own, separate(model, stages, own), strict=True))
        assert isinstance(model, StagedLlama) == (virtual > 1)
        names += [name for name, _ in model.named_parameters()]
        assert model.state_dict().keys() == dict(model.named_parameters()).keys()
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters())
    x = tokens
    for index in sorted(outputs):
        x = outputs[index](x)
    assert torch.equal(x, whole(tokens))


def test_a_sum_of_stages_moves_and_switches_with_them_but_does_not_run() -> None:
    model, stages = Llama(FIVE), stage_layers(FIVE, 4)
    cut(model, stages, (0, 2))
    parts = separate(model, stages, (0, 2))
    model.to(torch.float64).eval()
    assert {p.dtype for part in parts for p in part.parameters()} == {torch.float64}
    assert not any(part.training for part in parts)
    assert model.num_parameters() == sum(part.num_parameters() for part in parts)
    with pytest.raises(ValueError, match="stage by stage"):
        model(torch.zeros(1, 4, dtype=torch.int64))


@pytest.mark.parametrize("shape", [FIVE, TIED], ids=["untied", "tied"])
@pytest.mark.parametrize(
    ("layout", "plan"),
    [(ParallelConfig(pp=2, tp=2), None), (ParallelConfig(pp=2, dp_shard=2), INTERLEAVED)],
    ids=["tp", "interleaved"],
)
def test_a_checkpoint_is_read_into_stages_and_moves_on(
    layout: ParallelConfig, plan: ParallelPlan | None, shape: LlamaConfig, tmp_path: Path
) -> None:
    """From one file into the stages, from them into a distributed checkpoint, and into other layouts."""
    model = Llama(shape)
    init_weights(model, 5)
    save_model(model, tmp_path / "model")
    wanted = dict(load_model(tmp_path / "model").named_parameters())

    def write(rank: int) -> dict[str, torch.Tensor]:
        part = make(layout, plan, shape)
        load_shards(part, tmp_path / "model", "cpu")
        dcp.save(part.state_dict(), checkpoint_id=tmp_path / "dcp")
        return _copies(part)

    def read(rank: int, target: ParallelConfig) -> dict[str, Any]:
        part = make(target, None, shape)
        init_shards(part, 0, "cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state = part.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "dcp")
        part.load_state_dict(state)
        return _copies(part)

    written = run_ranks(write, 4)
    targets = (ParallelConfig(), ParallelConfig(pp=2), ParallelConfig(tp=2))
    for found in (written, *(run_ranks(read, target.num_processes, target) for target in targets)):
        seen = set()
        for weights in found:
            for name, weight in weights.items():
                name = EMBEDDING if name == HEAD and shape.tie_word_embeddings else name
                assert torch.equal(weight, wanted[name]), name
                seen.add(name)
        assert seen == set(wanted)
