"""Saving: others read it, and it is there whole or not at all."""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file

from llama_core import CheckpointError, Llama, load_model, pack_projections
from llama_core.save import save_model

Make = Callable[..., Llama]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("limit", [5e9, 20_000])
@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_we_write(
    tmp_path: Path, make_t0: Make, dtype: torch.dtype, limit: float, tied: bool
) -> None:
    model = make_t0(tie_word_embeddings=tied, attention_bias=True, mlp_bias=True).to(dtype)
    save_model(model, tmp_path, max_shard_bytes=limit)
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto", output_loading_info=True)
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert theirs.dtype == dtype
    ours = model.state_dict()
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours[name]), name


def test_shards_index_and_metadata(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    save_model(model, tmp_path, max_shard_bytes=20_000)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == model.num_parameters() * 4
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-{i + 1:05d}-of-{len(shards):05d}.safetensors" for i in range(len(shards))]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*shards, "model.safetensors.index.json", "config.json", "generation_config.json"]
    )
    for shard in shards:
        with safe_open(tmp_path / shard, "pt") as file:
            assert file.metadata() == {"format": "pt"}
            names = list(file.keys())
            assert sum(file.get_tensor(name).nbytes for name in names) <= 20_000
            assert all(index["weight_map"][name] == shard for name in names)


def test_config_and_generation_config(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0(eos_token_id=[2, 3], rope_scaling={"type": "linear", "factor": 8.0}, torch_dtype="float16", odd=[1])
    save_model(model, tmp_path / "a")
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["dtype"], config["torch_dtype"], config["odd"]) == ("float32", "float32", [1])
    loaded = load_model(tmp_path / "a")
    assert (loaded.config.rope.rope_type, loaded.config.rope.factor) == ("linear", 8.0)  # B09
    generation = transformers.GenerationConfig.from_pretrained(tmp_path / "a")
    assert (generation.bos_token_id, generation.eos_token_id) == (1, [2, 3])
    save_model(model, tmp_path / "b", generation={"temperature": 0.6, "do_sample": True})
    assert transformers.GenerationConfig.from_pretrained(tmp_path / "b").temperature == 0.6


def test_packed_and_strided_weights(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0(attention_bias=True)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    pack_projections(model)
    down = model.model.layers[0].mlp.down_proj
    down.weight = torch.nn.Parameter(down.weight.detach().t().contiguous().t())
    assert not down.weight.is_contiguous()
    save_model(model, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert set(stored) == set(before)
    assert all(torch.equal(stored[name], before[name]) for name in before)


def test_pieces_of_a_large_tensor(tmp_path: Path, make_t0: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_t0()
    monkeypatch.setattr("llama_core.safetensors_write._PIECE_BYTES", 300)  # two rows and a half of a hidden vector
    save_model(model, tmp_path, dtype=torch.float16)
    stored = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(stored[name], tensor.half()) for name, tensor in model.state_dict().items())
    monkeypatch.setattr("llama_core.checkpoint.STRAIGHT_PIECE_BYTES", 300)
    loaded = load_model(tmp_path, dtype=torch.float32).state_dict()
    assert all(torch.equal(loaded[name], stored[name].float()) for name in stored)


def test_tensors_begin_at_multiples_of_their_element_size(tmp_path: Path) -> None:
    from llama_core.safetensors_write import write_safetensors

    tensors = {"a": torch.ones(3, dtype=torch.bfloat16), "b": torch.arange(5.0), "c": torch.tensor(2.0)}
    write_safetensors(tmp_path / "x", tensors)
    text = (tmp_path / "x").read_bytes()
    begin = 8 + int.from_bytes(text[:8], "little")
    header = json.loads(text[8:begin])
    assert begin % 8 == 0
    assert all(header[n]["data_offsets"][0] % t.element_size() == 0 for n, t in tensors.items())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in load_file(tmp_path / "x").items())


@pytest.mark.parametrize("format", ["hf", "meta", "gguf"])
@pytest.mark.parametrize("tied", [False, True])
def test_progress_ends_at_the_whole(tmp_path: Path, make_t0: Make, format: str, tied: bool) -> None:
    model = make_t0(tie_word_embeddings=tied)
    for call in (
        lambda told: save_model(model, tmp_path / "m", format, dtype=torch.bfloat16, progress=told, overwrite=True),
        lambda told: load_model(tmp_path / "m", dtype=torch.float32, progress=told),
    ):
        steps: list[tuple[int, int]] = []
        call(lambda done, total, steps=steps: steps.append((done, total)))
        assert len(steps) > 10
        assert steps == sorted(steps)
        assert {total for _, total in steps} == {model.num_parameters() * 4}
        assert steps[-1][0] == model.num_parameters() * 4


def test_refuses_a_taken_target(tmp_path: Path, make_t0: Make) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "notes.txt").write_text("mine")
    with pytest.raises(CheckpointError, match="is not empty"):
        save_model(make_t0(), tmp_path / "a")
    with pytest.raises(CheckpointError, match="is a file"):
        save_model(make_t0(), tmp_path / "a" / "notes.txt", overwrite=True)
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["a", "notes.txt"]


def test_overwrite_replaces_the_checkpoint_and_keeps_the_rest(tmp_path: Path, make_t0: Make) -> None:
    target = tmp_path / "model"
    save_model(make_t0(std=0.1), target, max_shard_bytes=20_000)
    (target / "notes.txt").write_text("mine")
    (target / "sub").mkdir()
    (target / "sub" / "config.json").write_text("also mine")
    model = make_t0()
    save_model(model, target, overwrite=True)
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*") if p.is_file()) == [
        f"model/{name}"
        for name in ("config.json", "generation_config.json", "model.safetensors", "notes.txt", "sub/config.json")
    ]
    assert (target / "sub" / "config.json").read_text() == "also mine"
    assert torch.equal(load_model(target).lm_head.weight, model.lm_head.weight)


FULL_DISK = """
import resource, sys
from llama_core import load_model
from llama_core.save import save_model
model = load_model(sys.argv[1])
resource.setrlimit(resource.RLIMIT_FSIZE, (30_000, 30_000))  # writes beyond fail, as on a full disk
try:
    save_model(model, sys.argv[2], overwrite=True)
except OSError as error:
    print("refused", error)
"""


@pytest.mark.skipif(not hasattr(resource, "RLIMIT_FSIZE"), reason="needs a limit on file sizes")
def test_full_disk_leaves_nothing_behind(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(), tmp_path / "old")
    before = {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()}
    for target in ("new", "old"):
        arguments = [sys.executable, "-c", FULL_DISK, str(tmp_path / "old"), str(tmp_path / target)]
        run = subprocess.run(arguments, capture_output=True, text=True, check=True)
        assert run.stdout.startswith("refused")
    assert [p.name for p in tmp_path.iterdir()] == ["old"]
    assert {p.name: p.read_bytes() for p in (tmp_path / "old").iterdir()} == before


def test_arguments_out_of_range(tmp_path: Path, make_t0: Make) -> None:
    for arguments in ({"format": "pickle"}, {"dtype": torch.int8}, {"max_shard_bytes": 0}):
        with pytest.raises(ValueError, match=next(iter(arguments))):
            save_model(make_t0(), tmp_path / "a", **arguments)
    assert not list(tmp_path.iterdir())


def test_only_whole_models_are_saved(tmp_path: Path, make_t0: Make) -> None:
    stage = make_t0()
    stage.lm_head = None
    with pytest.raises(CheckpointError, match=r"lacks lm_head\.weight"):
        save_model(stage, tmp_path / "a")
    with pytest.raises(CheckpointError, match="without values"):
        save_model(make_t0().to("meta"), tmp_path / "a")
