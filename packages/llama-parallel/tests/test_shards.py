"""Weights in shards: drawn or read in place, the same as whole; and torch's checkpoints move between layouts."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from llama_core import CheckpointError, Llama, LlamaConfig, init_weights, load_model, save_model
from llama_parallel import ParallelConfig, build_mesh, init_shards, load_shards, parallelize
from llama_parallel.parity import _copies
from llama_parallel.testing import RankError, run_ranks

T0 = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, attention_bias=True,
)  # fmt: skip
UNBIASED = T0.replace(attention_bias=False)
DP_TP, TP4, DP3 = ParallelConfig(dp_shard=2, tp=2), ParallelConfig(tp=4), ParallelConfig(dp_shard=3)


def make(layout: ParallelConfig, shape: LlamaConfig = T0) -> Llama:
    with torch.device("meta"):
        model = Llama(shape)
    return parallelize(model, build_mesh(layout)).model


def plain(shape: LlamaConfig = T0, seed: int = 5) -> Llama:
    model = Llama(shape)
    init_weights(model, seed)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("bias", "norm.weight")):  # constants would hide rows read from elsewhere
                p.copy_(torch.arange(p.numel(), dtype=p.dtype) / 7)
    return model


@pytest.mark.parametrize("layout", [DP_TP, TP4, DP3], ids=["dp 2 tp 2", "tp 4", "dp 3"])
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
def test_a_checkpoint_is_read_into_shards(layout: ParallelConfig, tied: bool, tmp_path: Path) -> None:
    shape = T0.replace(tie_word_embeddings=tied)
    wanted = plain(shape)
    save_model(wanted, tmp_path / "model")

    def work(rank: int) -> dict[str, torch.Tensor]:
        model = make(layout, shape)
        load_shards(model, tmp_path / "model", "cpu")
        return _copies(model)

    for found in run_ranks(work, layout.num_processes):
        assert found.keys() == dict(wanted.named_parameters()).keys()
        for name, p in wanted.named_parameters():
            assert torch.equal(found[name], p), name


@pytest.mark.parametrize("form", ["meta", "gguf"])
def test_other_formats_are_read_by_parts_too(form: str, tmp_path: Path) -> None:
    """Their query and key rows stand in another order, head by head; dp 3 cuts 32 rows within a head."""
    path = tmp_path / ("model.gguf" if form == "gguf" else "model")
    save_model(plain(UNBIASED), path, format=form)
    wanted = dict(load_model(path).named_parameters())

    def work(rank: int) -> dict[str, torch.Tensor]:
        with torch.device("meta"):
            model = Llama(UNBIASED)
        parallelize(model, build_mesh(DP3))
        load_shards(model, path, "cpu")
        return _copies(model)

    for found in run_ranks(work, 3):
        assert found.keys() == wanted.keys()
        for name, p in wanted.items():
            assert torch.equal(found[name], p), name


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_fresh_weights_are_those_of_one_process(dtype: torch.dtype) -> None:
    def work(rank: int) -> dict[str, torch.Tensor]:
        torch.manual_seed(rank)  # ranks need no common state
        with torch.device("meta"):
            model = Llama(T0).to(dtype)
        parallelize(model, build_mesh(DP_TP))
        init_shards(model, 5, "cpu")
        return _copies(model)

    wanted = Llama(T0).to(dtype)
    init_weights(wanted, 5)
    for found in run_ranks(work, 4):
        for name, p in wanted.named_parameters():
            assert found[name].dtype == dtype
            assert torch.equal(found[name], p), name


def test_another_model_or_no_model_is_refused(tmp_path: Path) -> None:
    save_model(plain(T0.replace(num_hidden_layers=1)), tmp_path / "model")

    def work(rank: int, path: Path) -> None:
        load_shards(make(ParallelConfig(tp=2)), path, "cpu")

    with pytest.raises(RankError, match=r"ValueError: .*holds another model: num_hidden_layers 1 instead of 2"):
        run_ranks(work, 2, tmp_path / "model")
    with pytest.raises(RankError, match=CheckpointError.__name__):
        run_ranks(work, 2, tmp_path / "nothing")


@pytest.mark.parametrize("target", [TP4, DP3, ParallelConfig()], ids=["tp 4", "dp 3", "alone"])
def test_distributed_checkpoint_moves_between_layouts(target: ParallelConfig, tmp_path: Path) -> None:
    """Written by dp 2 · tp 2 with a vocabulary of 131, which divides neither way."""
    save_model(plain(), tmp_path / "model")

    def write(rank: int) -> None:
        model = make(DP_TP)
        load_shards(model, tmp_path / "model", "cpu")
        dcp.save(model.state_dict(), checkpoint_id=tmp_path / "dcp")

    def read(rank: int) -> dict[str, Any]:
        model = make(target)
        init_shards(model, 0, "cpu")
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")
            state = model.state_dict()
            dcp.load(state, checkpoint_id=tmp_path / "dcp")
        model.load_state_dict(state)
        return _copies(model)

    run_ranks(write, 4)
    wanted = dict(load_model(tmp_path / "model").named_parameters())
    for found in run_ranks(read, target.num_processes):
        for name, p in wanted.items():
            assert torch.equal(found[name], p), name
