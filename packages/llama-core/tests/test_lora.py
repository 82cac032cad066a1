"""LoRA against PEFT, in both directions, and against its formula."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from llama_core import CheckpointError, Llama, load_model, pack_projections, save_model
from llama_core.lora import (
    Adapter,
    LoraConfig,
    LoraLinear,
    adapter_of,
    apply_lora,
    load_adapter,
    merge_lora,
    save_adapter,
)

Make = Callable[..., Llama]
# PEFT gives advice on its configuration, and calls what newer transformers deprecates; neither is about our files.
PEFT_WARNINGS = pytest.mark.filterwarnings(
    "ignore::UserWarning:peft", "ignore:.is_gradient_checkpointing.:FutureWarning"
)
TOKENS = torch.tensor([[1, 5, 9, 2, 77, 3]])
CASES: dict[str, dict[str, Any]] = {
    "two": {"target_modules": ["q_proj", "v_proj"]},
    "all": {"target_modules": "all-linear"},
    "regex": {"target_modules": r".*layers\.1\..*(up|down)_proj"},
    "patterns": {
        "target_modules": ["q_proj", "up_proj"],
        "rank_pattern": {"q_proj": 3},
        "alpha_pattern": {"layers.1.mlp.up_proj": 5, "layers.0.*q_proj": 2},
    },
    "rslora": {"target_modules": ["o_proj"], "use_rslora": True},
    "layers": {"target_modules": ["k_proj"], "layers_to_transform": [1]},
    "head": {"target_modules": ["gate_proj"], "modules_to_save": ["lm_head"]},
}


def logits(model: Llama) -> torch.Tensor:
    with torch.no_grad():
        return model.logits(model(TOKENS))


def randomise(module: torch.nn.Module) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in module.named_parameters():
        if "lora_" in name or "modules_to_save" in name:
            parameter.data.normal_(0, 0.3, generator=generator)


@PEFT_WARNINGS
@pytest.mark.parametrize("case", CASES)
def test_adapters_that_peft_wrote(tmp_path: Path, make_t0: Make, case: str) -> None:
    model = make_t0()
    save_model(model, tmp_path / "base")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    config = peft.LoraConfig(r=4, lora_alpha=12, lora_dropout=0.1, task_type="CAUSAL_LM", **CASES[case])
    theirs = peft.get_peft_model(theirs, config).eval()
    randomise(theirs)
    theirs.save_pretrained(tmp_path / "adapter")
    with torch.no_grad():
        expected = theirs(TOKENS).logits
    assert (expected - logits(model)).abs().max() > 0.01

    adapter = load_adapter(tmp_path / "adapter")
    applied = load_model(tmp_path / "base")
    apply_lora(applied, adapter)
    torch.testing.assert_close(logits(applied), expected, atol=1e-5, rtol=1e-5)
    merge_lora(applied)
    torch.testing.assert_close(logits(applied), expected, atol=1e-5, rtol=1e-5)
    assert not any(isinstance(module, LoraLinear) for module in applied.modules())

    merged = load_model(tmp_path / "base")
    pack_projections(merged)  # in a packed model the weights are views; merging reaches the joined matrix through them
    merge_lora(merged, adapter)
    torch.testing.assert_close(logits(merged), expected, atol=1e-5, rtol=1e-5)
    save_model(merged, tmp_path / "merged")
    state = theirs.merge_and_unload().state_dict()
    for name, tensor in load_file(tmp_path / "merged" / "model.safetensors").items():
        torch.testing.assert_close(tensor, state[name], atol=1e-6, rtol=1e-6)

    # and what we read, we write so that PEFT reads it again
    save_adapter(adapter, tmp_path / "again")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    again = peft.PeftModel.from_pretrained(base, tmp_path / "again").eval()
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, expected, atol=1e-6, rtol=1e-6)


@PEFT_WARNINGS
@pytest.mark.parametrize(
    "config",
    [
        LoraConfig(r=4),
        LoraConfig(r=2, target_modules=("q_proj", "layers.1.mlp.up_proj"), rank_pattern={"up_proj": 5}),
        LoraConfig(r=2, use_rslora=True, alpha_pattern={"v_proj": 3.0}, base_model_name_or_path="somewhere"),
        LoraConfig(r=2, target_modules=("lm_head",)),
    ],
)
def test_peft_reads_what_we_trained(tmp_path: Path, make_t0: Make, config: LoraConfig) -> None:
    model = make_t0()
    save_model(model, tmp_path / "base")
    names = apply_lora(model, config)
    randomise(model)
    save_adapter(adapter_of(model, config), tmp_path / "adapter")
    base = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "base", dtype=torch.float32)
    theirs = peft.PeftModel.from_pretrained(base, tmp_path / "adapter").eval()
    with torch.no_grad():
        torch.testing.assert_close(logits(model), theirs(TOKENS).logits, atol=1e-5, rtol=1e-5)
    back = load_adapter(tmp_path / "adapter")
    assert (back.config.r, back.config.use_rslora, set(back.weights)) == (config.r, config.use_rslora, set(names))
    assert back.config.base_model_name_or_path == config.base_model_name_or_path


def test_forward_and_gradients_are_the_formulas(make_t0: Make) -> None:
    model = make_t0(attention_bias=True).double()
    reference = make_t0(attention_bias=True).double()
    names = apply_lora(model, LoraConfig(r=3, lora_alpha=6.0))
    assert len(names) == 14
    randomise(model)
    inside = {name: m for name, m in model.named_modules() if isinstance(m, LoraLinear)}
    pairs = {}
    for name, module in inside.items():
        a, b = (p.detach().clone().requires_grad_() for p in (module.lora_A, module.lora_B))
        layer = reference.get_submodule(name)
        weight = layer.weight.detach()
        del layer.weight
        layer.weight = weight + 2.0 * b @ a
        pairs[name] = (a, b)
    loss, expected = model.logits(model(TOKENS)).pow(2).mean(), reference.logits(reference(TOKENS)).pow(2).mean()
    torch.testing.assert_close(loss, expected, atol=1e-10, rtol=1e-10)
    loss.backward()
    expected.backward()
    for name, (a, b) in pairs.items():
        torch.testing.assert_close(inside[name].lora_A.grad, a.grad, atol=1e-10, rtol=1e-10)
        torch.testing.assert_close(inside[name].lora_B.grad, b.grad, atol=1e-10, rtol=1e-10)
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    assert trained == {f"{name}.lora_{half}" for name in names for half in "AB"}
    assert all(p.grad is None for name, p in model.named_parameters() if name not in trained)


def test_fresh_adapters_change_nothing_and_do_not_depend_on_the_order(make_t0: Make) -> None:
    model = make_t0()
    before = logits(model)
    apply_lora(model, LoraConfig(r=4, target_modules=("v_proj", "q_proj")), seed=3)
    assert torch.equal(logits(model), before)
    other = make_t0()
    apply_lora(other, LoraConfig(r=4), seed=3)
    a = model.model.layers[1].self_attn.q_proj.lora_A
    assert torch.equal(a, other.model.layers[1].self_attn.q_proj.lora_A)
    third = make_t0()
    apply_lora(third, LoraConfig(r=4), seed=4)
    assert not torch.equal(a, third.model.layers[1].self_attn.q_proj.lora_A)
    assert a.std().item() == pytest.approx((3 * 32) ** -0.5, rel=0.2)


def test_dropout_only_in_training(make_t0: Make) -> None:
    model = make_t0()
    apply_lora(model, LoraConfig(r=4, lora_dropout=0.5))
    randomise(model)
    assert torch.equal(logits(model), logits(model))
    model.train()
    assert not torch.equal(logits(model), logits(model))


def test_float32_adapter_beside_a_bfloat16_model(make_t0: Make) -> None:
    model = make_t0().bfloat16()
    apply_lora(model, LoraConfig(r=4), dtype=torch.float32)
    randomise(model)
    layer = model.model.layers[0].mlp.up_proj
    assert (layer.lora_A.dtype, layer.weight.dtype, logits(model).dtype) == (
        torch.float32,
        torch.bfloat16,
        torch.bfloat16,
    )
    expected = (layer.weight.float() + 4.0 * layer.lora_B @ layer.lora_A).bfloat16()  # rounded once
    merge_lora(model)
    assert torch.equal(model.model.layers[0].mlp.up_proj.weight, expected)


def test_a_model_with_adapters_is_neither_saved_nor_packed(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    apply_lora(model, LoraConfig(r=4, target_modules=("q_proj",)))
    with pytest.raises(CheckpointError, match=r"merge or undo it first: .*q_proj\.lora_A"):
        save_model(model, tmp_path / "a")
    with pytest.raises(ValueError, match="LoraLinear"):
        pack_projections(model)
    with pytest.raises(ValueError, match="q_proj has an adapter already"):
        apply_lora(model, LoraConfig(target_modules=("k_proj",)))
    merge_lora(model)
    save_model(model, tmp_path / "a")


def test_refusals(make_t0: Make) -> None:
    for settings, message in (
        ({"r": 0}, "r is 0"),
        ({"r": True}, "r is True"),
        ({"lora_alpha": -1}, "lora_alpha is -1"),
        ({"lora_dropout": 1.0}, "lora_dropout is 1.0"),
        ({"rank_pattern": {"q_proj": 1.5}}, "r is 1.5"),
    ):
        with pytest.raises(ValueError, match=message):
            LoraConfig(**settings)
    with pytest.raises(ValueError, match=r"it fits none of model\.layers\.0\.self_attn\.q_proj"):
        apply_lora(make_t0(), LoraConfig(target_modules=("query",)))
    with pytest.raises(ValueError, match="no regular expression"):
        apply_lora(make_t0(), LoraConfig(target_modules="("))
    with pytest.raises(ValueError, match="lm_head is tied"):
        apply_lora(make_t0(tie_word_embeddings=True), LoraConfig(target_modules=("lm_head",)))
    for call in (merge_lora, lambda model: adapter_of(model, LoraConfig())):
        with pytest.raises(ValueError, match="no adapters"):
            call(make_t0())


def trained(make_t0: Make) -> Adapter:
    model, config = make_t0(), LoraConfig(r=4, target_modules=("q_proj",))
    apply_lora(model, config)
    return adapter_of(model, config)


def test_adapter_of_another_model(make_t0: Make) -> None:
    adapter = trained(make_t0)
    with pytest.raises(CheckpointError, match=r"(?s)1 for modules that the model does not have: model\.layers\.1"):
        merge_lora(make_t0(num_hidden_layers=1), adapter)
    with pytest.raises(CheckpointError, match=r"A \[4, 32\] and B \[32, 4\] do not fit rank 4 and weight \[48, 32\]"):
        merge_lora(make_t0(num_attention_heads=6), adapter)
    odd = Adapter(adapter.config, {}, {"model.norm.weight": torch.ones(3), "x.weight": torch.ones(1)})
    with pytest.raises(CheckpointError, match=r"(?s)norm\.weight is \[3\], must be \[32\].*x\.weight is no parameter"):
        merge_lora(make_t0(), odd)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "LOHA"}, "'LOHA'"),
        ({"use_dora": True}, "use_dora is True"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"trainable_token_indices": [1]}, "trainable_token_indices"),
        ({"r": "x"}, "r is 'x'"),
        ({"target_modules": 3}, "target_modules is 3"),
        ({"rank_pattern": [1]}, "rank_pattern"),
        ({"use_rslora": 1}, "use_rslora"),
        ({"lora_alpha": None, "alpha_pattern": {"q_proj": "x"}}, "lora_alpha is 'x'"),
    ],
)
def test_settings_that_are_not_supported(tmp_path: Path, make_t0: Make, changes: dict[str, Any], message: str) -> None:
    save_adapter(trained(make_t0), tmp_path / "a")
    path = tmp_path / "a" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
    with pytest.raises(CheckpointError, match=message) as caught:
        load_adapter(tmp_path / "a")
    assert str(path) in str(caught.value)


def test_damaged_adapters(tmp_path: Path, make_t0: Make) -> None:
    with pytest.raises(CheckpointError, match=r"no adapter_config\.json"):
        load_adapter(tmp_path)
    save_adapter(trained(make_t0), tmp_path / "a")
    path = tmp_path / "a" / "adapter_model.safetensors"
    tensors = load_file(path)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"

    def write(changed: dict[str, torch.Tensor]) -> None:
        save_file({**tensors, **changed}, path)

    write({"base_model.model.model.embed_tokens.lora_embedding_A": torch.ones(2, 2)})
    with pytest.raises(CheckpointError, match=r"1 tensors are no LoRA of linear layers: .*lora_embedding_A"):
        load_adapter(tmp_path / "a")
    write({name: torch.ones(4, 32, dtype=torch.int32)})
    with pytest.raises(CheckpointError, match=r"lora_A\.weight \(torch\.int32\)"):
        load_adapter(tmp_path / "a")
    write({name: torch.ones(4)})
    with pytest.raises(CheckpointError, match="must be matrices"):
        load_adapter(tmp_path / "a")
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, path)
    with pytest.raises(CheckpointError, match=r"1 missing: model\.layers\.0\.self_attn\.q_proj\.lora_A"):
        load_adapter(tmp_path / "a")
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(CheckpointError, match="truncated"):
        load_adapter(tmp_path / "a")
    path.unlink()
    with pytest.raises(CheckpointError, match=r"neither adapter_model\.safetensors nor adapter_model\.bin"):
        load_adapter(tmp_path / "a")
    torch.save(tensors, tmp_path / "a" / "adapter_model.bin")
    loaded = load_adapter(tmp_path / "a")
    assert torch.equal(loaded.weights["model.layers.0.self_attn.q_proj"][0], tensors[name])


def test_target_is_not_overwritten(tmp_path: Path, make_t0: Make) -> None:
    adapter = trained(make_t0)
    save_adapter(adapter, tmp_path / "a")
    with pytest.raises(CheckpointError, match="not empty"):
        save_adapter(adapter, tmp_path / "a")
    save_adapter(adapter, tmp_path / "a", overwrite=True)
