"""[lora]: only adapters are trained, as PEFT trains them; small checkpoints; adapter and merged model are written."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from llama_core import Llama, LlamaConfig, init_weights, load_model, load_tokenizer, save_model
from llama_core.lora import load_adapter, merge_lora
from llama_parallel.testing import run_ranks
from llama_train import TrainConfig, TrainResult, train
from llama_train.batches import Batch
from llama_train.build import count_parameters
from llama_train.checkpoint import list_checkpoints, stored_names
from llama_train.config import LoraSettings, ModelConfig, ParallelSettings
from llama_train.lora import check_lora
from llama_train.meter import Meter
from llama_train.start import load_start, start_shape
from llama_train.tokenizer_training import save_tokenizer, train_tokenizer
from llama_train.trainer import OneProcess
from llama_train.world import ALONE

Change = Callable[..., TrainConfig]
Make = Callable[[], Any]

SHAPE = LlamaConfig(
    vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, max_position_embeddings=64, initializer_range=0.2, bos_token_id=298, eos_token_id=299,
    tie_word_embeddings=True,
)  # fmt: skip


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory, text_folder: Path) -> Path:
    folder = tmp_path_factory.mktemp("start")
    tokenizer = train_tokenizer([path.read_text(encoding="utf-8") for path in text_folder.iterdir()], 300)
    save_tokenizer(tokenizer, folder / "tokenizer", 10**30)
    model = Llama(SHAPE)
    init_weights(model, 7)
    save_model(model, folder / "model", tokenizer=load_tokenizer(folder / "tokenizer"))
    return folder / "model"


@pytest.fixture
def config(tiny: TrainConfig, start: Path) -> TrainConfig:
    return replace(
        tiny,
        dtype="float64",
        model=ModelConfig(start_from=str(start)),
        lora=LoraSettings(rank=3, alpha=6.0),
        optimizer=replace(tiny.optimizer, learning_rate=1e-2),
        schedule=replace(tiny.schedule, steps=6, warmup_steps=1),
    )


def make(config: TrainConfig) -> OneProcess:
    trainer = OneProcess(config, start_shape(config.model, config.data.sequence_length), ALONE)
    load_start(config, trainer.weights())
    trainer.loaded()
    return trainer


def batches(count: int = 2) -> list[Batch]:
    generator = torch.Generator().manual_seed(3)
    rows = torch.randint(0, 290, (count, 2, 17), generator=generator)
    return [Batch(row[:, :-1], row[:, 1:].clone()) for row in rows]


def test_steps_are_those_of_the_formula(config: TrainConfig, start: Path) -> None:
    """W + BA · alpha/r with autograd and torch's AdamW, three steps, adapters on two kinds of layers."""
    config = replace(config, lora=LoraSettings(rank=3, alpha=6.0, target_modules=("q_proj", "layers.1.mlp.down_proj")))
    trainer = make(config)
    names = [name.removesuffix(".lora_A") for name in trainer.weights() if name.endswith(".lora_A")]
    assert sorted(names) == [
        "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.down_proj", "model.layers.1.self_attn.q_proj",
    ]  # fmt: skip
    reference = load_model(start, dtype=torch.float64)
    base, pairs = {}, {}
    for name in names:
        base[name] = reference.get_submodule(name).weight.detach().clone()
        del reference.get_submodule(name).weight
        pairs[name] = tuple(trainer.weights()[f"{name}.lora_{half}"].clone().requires_grad_() for half in "AB")
        assert float(pairs[name][1].detach().abs().max()) == 0.0
    flat = [half for pair in pairs.values() for half in pair]
    settings = config.optimizer
    adamw = torch.optim.AdamW(flat, 1e-2, settings.betas, settings.eps, settings.weight_decay)
    for _ in range(3):
        result = trainer.step(batches(), 1e-2, 0.05)
        total = sum(batch.count for batch in batches())
        loss = torch.zeros((), dtype=torch.float64)
        for name in names:
            reference.get_submodule(name).weight = base[name] + 2.0 * pairs[name][1] @ pairs[name][0]
        for batch in batches():
            logits = reference.logits(reference(batch.tokens))
            loss = loss + torch.nn.functional.cross_entropy(
                logits.flatten(0, 1), batch.targets.flatten(), reduction="sum"
            )
        (loss / total).backward()
        norm = torch.nn.utils.clip_grad_norm_(flat, 0.05)
        adamw.step()
        adamw.zero_grad()
        assert float(result.loss) == pytest.approx(float(loss.detach() / total), rel=1e-10)
        assert float(result.grad_norm) == pytest.approx(float(norm), rel=1e-10)
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(trainer.weights()[f"{name}.lora_A"], a.detach(), rtol=0, atol=1e-10)
        torch.testing.assert_close(trainer.weights()[f"{name}.lora_B"], b.detach(), rtol=0, atol=1e-10)
        assert torch.equal(trainer.weights()[f"{name}.weight"], base[name])


@pytest.mark.filterwarnings("ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing.:FutureWarning")
def test_steps_are_those_of_peft(config: TrainConfig, start: Path, tmp_path: Path) -> None:
    """The same adapters in PEFT and transformers: loss and every gradient of a step, and its reading of our export."""
    peft = pytest.importorskip("peft")
    transformers = pytest.importorskip("transformers")
    config = replace(config, dtype="float32")
    trainer = make(config)
    with torch.no_grad():
        for name, weight in trainer.weights().items():
            if name.endswith("lora_B"):
                weight.copy_(torch.linspace(-0.1, 0.1, weight.numel()).reshape(weight.shape))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    kinds = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
    theirs = peft.get_peft_model(
        theirs, peft.LoraConfig(r=3, lora_alpha=6.0, target_modules=kinds, task_type="CAUSAL_LM")
    )
    named = dict(theirs.named_parameters())
    assert {name for name, p in named.items() if p.requires_grad} == {
        f"base_model.model.{name}.default.weight" for name in trainer.weights() if "lora_" in name
    }
    with torch.no_grad():
        for name, weight in trainer.weights().items():
            if "lora_" in name:
                named[f"base_model.model.{name}.default.weight"].copy_(weight)
    (batch,) = batches(1)
    logits = theirs(batch.tokens).logits
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch.targets.flatten())
    loss.backward()
    model = trainer.model
    hidden = model(batch.tokens)
    assert model.lm_head is not None
    ours = model.ops.linear_cross_entropy(hidden, model.lm_head.weight, batch.targets)
    ours.backward()
    assert float(ours.detach()) == pytest.approx(float(loss.detach()), abs=1e-5)
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            wanted = named[f"base_model.model.{name}.default.weight"].grad
            torch.testing.assert_close(parameter.grad, wanted, rtol=1e-4, atol=1e-6)
        else:
            assert parameter.grad is None


def test_a_run_trains_adapters_alone_and_resumes_bit_for_bit(
    config: TrainConfig, start: Path, recorder: Make,
    stop_after: Callable[[int, pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    config = replace(config, dtype="float32", checkpoint=replace(config.checkpoint, every=2))
    lines = recorder()
    whole = train(replace(config, folder=f"{config.folder}-whole"), lines)
    count = (
        sum(3 * (sum(shape)) for shape in ((32, 32), (16, 32), (16, 32), (32, 32), (48, 32), (48, 32), (32, 48))) * 2
    )
    assert f"adapters   rank 3 on 14 layers, {count / 1000:.2f}K parameters are trained" in lines.text
    checkpoint = list_checkpoints(whole.folder / "checkpoints")[-1]
    names = {name for name in stored_names(checkpoint) if name.startswith(("model.", "optimizer."))}
    assert all(".lora_" in name for name in names)
    assert len(names) == 4 * 2 * 14  # weight, two moments and a count of A and B
    # the adapter and the merged model are one function, and the start plus the adapter is that model
    adapter = load_adapter(whole.folder / "adapter")
    assert (adapter.config.r, adapter.config.lora_alpha, adapter.config.base_model_name_or_path) == (3, 6.0, str(start))
    merged = load_model(start, dtype=torch.float32)
    merge_lora(merged, adapter)
    exported = load_model(str(whole.export))
    for (name, a), b in zip(exported.named_parameters(), merged.parameters(), strict=True):
        assert torch.equal(a, b), name
    assert any(
        not torch.equal(a, b) for a, b in zip(exported.parameters(), load_model(start).parameters(), strict=True)
    )
    with monkeypatch.context() as patch:
        stop_after(3, patch)
        assert not train(config, recorder()).finished
    again = recorder()
    second = train(config, again)
    assert "resumed    step 3" in again.text
    assert f"start      {start}" in again.text  # the frozen weights
    for a, b in zip(load_model(str(second.export)).parameters(), exported.parameters(), strict=True):
        assert torch.equal(a, b)
    with pytest.raises(ValueError, match=r"holds another run \(lora.rank was 3, is 4\)"):
        train(replace(config, lora=replace(config.lora, rank=4)), recorder())


def test_bfloat16_adapters_have_float32_masters(config: TrainConfig) -> None:
    config = replace(config, dtype="bfloat16", optimizer=replace(config.optimizer, learning_rate=1e-4))
    trainer = make(config)
    before = {name: weight.clone() for name, weight in trainer.weights().items()}
    trainer.step(batches(), 1e-6, 1.0)
    for name, weight in trainer.weights().items():
        assert weight.dtype == (torch.float32 if "lora_" in name else torch.bfloat16)
        if name.endswith("lora_B"):
            assert not torch.equal(weight, before[name])
        if name.endswith(".weight"):
            assert torch.equal(weight, before[name])


LAYOUTS: list[dict[str, int]] = [
    {"dp_shard": 2}, {"dp_replicate": 2}, {"cp": 2}, {"pp": 2, "dp_shard": 2},
]  # fmt: skip


def on(layout: dict[str, int], config: TrainConfig, folder: Path) -> TrainConfig:
    parallel = ParallelSettings(**{"dp_shard": 1, **layout})
    rows = config.data.micro_batch_size // (parallel.dp_shard * parallel.dp_replicate)
    return replace(config, parallel=parallel, data=replace(config.data, micro_batch_size=rows), folder=str(folder))


def losses(folder: Path) -> list[float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    return [line["loss"] for line in lines if line["kind"] == "train"]


@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_a_layout_trains_as_one_process(
    layout: dict[str, int], config: TrainConfig, tmp_path: Path, recorder: Make
) -> None:
    config = replace(config, data=replace(config.data, gradient_accumulation_steps=2))
    alone = train(replace(config, folder=str(tmp_path / "alone")), recorder())
    shared = on(layout, config, tmp_path / "ranks")
    count = 1
    for size in layout.values():
        count *= size

    def work(rank: int) -> TrainResult:
        return train(shared, recorder())

    result = run_ranks(work, count, timeout=120)[0]
    assert losses(tmp_path / "ranks") == pytest.approx(losses(tmp_path / "alone"), rel=1e-10)
    for name in ("hf", "adapter"):
        assert (tmp_path / "ranks" / name).is_dir()
    one, many = load_adapter(alone.folder / "adapter").weights, load_adapter(result.folder / "adapter").weights
    for key, pair in one.items():
        for a, b in zip(pair, many[key], strict=True):
            torch.testing.assert_close(b, a, rtol=0, atol=1e-9)
    for a, b in zip(load_model(str(result.export)).parameters(), load_model(str(alone.export)).parameters()):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-9)


def test_another_layout_goes_on_from_a_checkpoint(config: TrainConfig, tmp_path: Path, recorder: Make) -> None:
    """FSDP in bfloat16 with float32 masters; its two halves of a run are those of one process and two."""
    train(replace(config, folder=str(tmp_path / "alone")), recorder())
    first = on({"dp_shard": 2}, config, tmp_path / "moving")

    def work(rank: int) -> bool:
        from llama_train import loop

        original = loop.learning_rate

        def rate(number: int, *rest: Any) -> float:
            if rank == 0 and number == 2:
                os.kill(os.getpid(), signal.SIGTERM)
            return original(number, *rest)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(loop, "learning_rate", rate)
            return train(first, recorder()).finished

    assert run_ranks(work, 2, timeout=120) == [False, False]
    lines = recorder()
    train(on({}, config, tmp_path / "moving"), lines)
    assert "resumed    step" in lines.text
    assert losses(tmp_path / "moving") == pytest.approx(losses(tmp_path / "alone"), rel=1e-9)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_shard_of_frozen_weights_is_no_wider_than_it_is_used(dtype: Any, config: TrainConfig, tmp_path: Path) -> None:
    """With master weights the adapters rest in float32, the frozen weights in bfloat16, and FSDP sends both."""
    config = on({"dp_shard": 2}, replace(config, dtype=dtype), tmp_path / "ranks")

    def work(rank: int) -> tuple[set[torch.dtype], set[torch.dtype], float]:
        from llama_train.layout_choice import which_process
        from llama_train.on_ranks import OnRanks
        from llama_train.world import enter_world

        with enter_world(which_process(), torch.device("cpu"), 60) as world:
            trainer = OnRanks(config, start_shape(config.model, 16), world)
            load_start(config, trainer.weights(), world)
            loss = float(trainer.step(batches(1), 1e-3, 1.0).loss)
            kinds = {True: set[torch.dtype](), False: set[torch.dtype]()}
            for name, weight in trainer.weights().items():
                kinds["lora_" in name].add(weight.dtype)
            return kinds[True], kinds[False], loss

    for adapters, frozen, loss in run_ranks(work, 2, timeout=60):
        assert (adapters, frozen) == ({torch.float32}, {getattr(torch, dtype)})
        assert 5.0 < loss < 60.0


def test_dropout_is_for_training_alone_and_the_same_when_recomputed(config: TrainConfig) -> None:
    """Gradients with recomputed layers equal those without, under one seed: the same inputs are dropped twice."""
    config = replace(config, lora=replace(config.lora, dropout=0.5))
    found = []
    for mode in ("none", "full", "selective"):
        trainer = make(replace(config, activation_checkpointing=mode))  # type: ignore[arg-type]
        with torch.no_grad():
            for name, weight in trainer.weights().items():
                if name.endswith("lora_B"):
                    weight.fill_(0.02)
        torch.manual_seed(5)
        trainer.step(batches(), 1e-3, 0.0)
        found.append({name: weight.clone() for name, weight in trainer.weights().items()})
        assert trainer.evaluate(batches()) == trainer.evaluate(batches())
        assert trainer.model.training
    for other in found[1:]:
        for name, weight in other.items():
            assert torch.equal(weight, found[0][name]), name


def test_refusals(config: TrainConfig, recorder: Make) -> None:
    with pytest.raises(ValueError, match=r"lora.target_modules is 'lm_head'; it must be a name that ends in one of q"):
        LoraSettings(target_modules=("lm_head",))
    with pytest.raises(ValueError, match=r"lora.dropout is 1.0; it must be 0 to below 1"):
        LoraSettings(dropout=1.0)
    with pytest.raises(ValueError, match=r"lora.target_modules has 'layers.7.q_proj'; the model of 2 layers has none"):
        train(replace(config, lora=LoraSettings(rank=2, target_modules=("k_proj", "layers.7.q_proj"))), recorder())
    for settings, message in (
        (ParallelSettings(dp_shard=1, tp=2), "lora.rank is 3 and parallel.tp 2: tensor-parallel layers overlap"),
        (ParallelSettings(dp_shard=1, pp=2, schedule="zero_bubble"), "parallel.schedule 'zero_bubble'"),
    ):
        with pytest.raises(ValueError, match=message):
            check_lora(replace(config, parallel=settings))


def test_utilisation_leaves_out_the_gradients_of_frozen_weights(config: TrainConfig) -> None:
    shape = start_shape(config.model, 16)
    ours, full = (Meter(c, shape, ALONE) for c in (config, replace(config, lora=LoraSettings())))
    assert full._flops - ours._flops == 2 * count_parameters(shape)
    assert full._flops_torchtitan - ours._flops_torchtitan == 2 * count_parameters(shape)  # a tied head counts
