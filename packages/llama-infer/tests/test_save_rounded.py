"""Rounded weights in a folder: the same as rounding when loading, to the bit, and what other libraries read."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from llama_core import Llama, load_model, load_tokenizer
from llama_infer import LLM, SamplingParams, cli
from llama_infer.rounding import QUANTIZATIONS, round_weight

SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
PARAMS = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)


def convert(source: Path, target: Path, kind: str, *more: str) -> int:
    return cli.main(["convert", str(source), str(target), "--quantization", kind, *more])


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_loading_the_folder_is_rounding_when_loading(
    save: Callable[..., Path], tmp_path: Path, kind: str, dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    source, target = save(attention_bias=True, mlp_bias=True, **SHAPE), tmp_path / "rounded"
    assert convert(source, target, kind, "--dtype", dtype) == 0
    assert f"{target}: hf, {kind}, " in capsys.readouterr().out
    saved, rounded = LLM(target, dtype=dtype, device="cpu"), LLM(source, dtype=dtype, device="cpu", quantization=kind)
    expected = rounded.model.state_dict()
    state = saved.model.state_dict()
    assert state.keys() == expected.keys()
    assert any("joined.scale" in name for name in state)
    for name, tensor in expected.items():
        assert state[name].dtype == tensor.dtype, name
        assert torch.equal(state[name].view(torch.uint8), tensor.view(torch.uint8)), name
    assert saved.generate("hello", PARAMS)[0].token_ids == rounded.generate("hello", PARAMS)[0].token_ids
    assert LLM(target, dtype=dtype, device="cpu", quantization=kind).model.num_parameters() > 0  # said twice, the same
    others = {"int8": "fp8", "int4": "int8", "fp8": "int4"}
    with pytest.raises(ValueError, match=f"holds weights of {kind}; quantization must be that, got '{others[kind]}'"):
        LLM(target, device="cpu", quantization=others[kind])
    assert load_tokenizer(target).encode("abc") == load_tokenizer(source).encode("abc")


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_decoded_it_is_what_rounding_left(save: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """By llama_core, which knows nothing of kernels."""
    source, target = save(**SHAPE), tmp_path / "rounded"
    assert convert(source, target, kind) == 0
    dense, decoded = load_model(source), load_model(target)
    for name, parameter in dense.named_parameters():
        if not name.endswith("_proj.weight"):
            assert torch.equal(decoded.get_parameter(name), parameter)
            continue
        rounded = round_weight(parameter, kind)
        codes = rounded.codes.float().unflatten(1, (rounded.scale.shape[1], -1))
        zero = 0 if rounded.zero is None else rounded.zero.unsqueeze(2)
        expected = ((codes - zero) * rounded.scale.unsqueeze(2)).flatten(1)
        torch.testing.assert_close(decoded.get_parameter(name), expected, rtol=0, atol=0)


@pytest.mark.parametrize("kind", QUANTIZATIONS)
def test_compressed_tensors_decodes_the_same(save: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    """The package that defines the format, and its own reading of our `quantization_config`."""
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationConfig

    source, target = save(**SHAPE), tmp_path / "rounded"
    assert convert(source, target, kind) == 0
    settings = json.loads((target / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(settings).config_groups["group_0"]
    compressor = BaseCompressor.get_value_from_registry(settings["format"])
    stored, decoded = load_file(target / "model.safetensors"), load_model(target)
    prefixes = {name.rpartition(".")[0] for name in stored if name.endswith("weight_scale")}
    assert len(prefixes) == 14
    for prefix in prefixes:
        parts: dict[str, Tensor] = {
            name.rpartition(".")[2]: tensor for name, tensor in stored.items() if name.startswith(f"{prefix}.")
        }
        theirs = compressor.decompress(parts, scheme)["weight"]
        torch.testing.assert_close(theirs.float(), decoded.get_parameter(f"{prefix}.weight"), rtol=0, atol=0)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["int8", "fp8"])  # transformers 5 makes room for zero points that are not packed
def test_transformers_computes_the_same_logits(
    save: Callable[..., Path], tmp_path: Path, make_model: Callable[..., Llama], kind: str
) -> None:
    import transformers

    source, target = save(**SHAPE), tmp_path / "rounded"
    assert convert(source, target, kind) == 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    ours, tokens = load_model(target), torch.arange(24).view(2, 12)
    with torch.no_grad():
        torch.testing.assert_close(ours.logits(ours(tokens)), theirs(tokens).logits, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (("--quantization", "int4", "--format", "gguf"), "--quantization writes Hugging Face's format"),
        (("--quantization", "int4"), "int4 rounds or packs 128 inputs together"),
        (("--quantization", "int3"), "int3"),
    ],
)
def test_mistakes_write_nothing(
    save: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], argv: tuple[str, ...], words: str
) -> None:
    source = save()
    assert cli.main(["convert", str(source), str(tmp_path / "target"), *argv]) == 2
    out, err = capfd.readouterr()
    assert words in out + err
    assert "Traceback" not in out + err
    assert not (tmp_path / "target").exists()
