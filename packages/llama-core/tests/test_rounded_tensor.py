"""Rounded weights in compressed-tensors' format: read as the package itself decodes them, whole and in parts."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from llama_core import CheckpointError, Llama, load_model, save_model
from llama_core.compressed_tensors import quantization_settings
from llama_core.file_bytes import Scratch
from llama_core.rounded_tensor import RoundedTensor, pack_words, read_all, unpack_words
from llama_core.stored_tensor import PartOf, TensorRows

Make = Callable[..., Llama]


def some(rows: int, columns: int, bits: int, group: int | None, zero: bool, seed: int = 0) -> tuple[Any, Tensor]:
    """A stored tensor of random codes, and its numbers by the formula."""
    generator = torch.Generator().manual_seed(seed)
    codes = torch.randint(0, 2**bits, (rows, columns), generator=generator)
    groups = 1 if group is None else columns // group
    scale = torch.rand(rows, groups, generator=generator) + 0.1
    zeros = torch.randint(0, 2**bits, (rows, groups), generator=generator) if zero else None
    wide = codes.view(rows, groups, -1) - (2 ** (bits - 1) if zeros is None else zeros.unsqueeze(2))
    padded = None
    if zeros is not None:
        each = 32 // bits
        padded = TensorRows(pack_words(torch.nn.functional.pad(zeros, (0, 0, 0, -rows % each)).T, bits).T.contiguous())
    stored = RoundedTensor(TensorRows(pack_words(codes, bits)), TensorRows(scale), padded, bits)
    return stored, (wide * scale.unsqueeze(2)).flatten(1)


KINDS = [(4, 32, True), (4, 32, False), (4, None, False), (8, None, False), (8, 16, True)]


@pytest.mark.parametrize(("bits", "group", "zero"), KINDS)
def test_decoded_by_the_formula(bits: int, group: int | None, zero: bool) -> None:
    stored, expected = some(21, 64, bits, group, zero)
    assert stored.shape == (21, 64)
    torch.testing.assert_close(read_all(PartOf(stored, 0, 0, 21)), expected, rtol=0, atol=0)
    for start, stop in ((0, 8), (5, 6), (7, 21)):
        out = torch.empty(stop - start, 64, dtype=torch.float64)
        stored.read_rows(start, stop, out, Scratch())
        torch.testing.assert_close(out.float(), expected[start:stop], rtol=0, atol=0)


@pytest.mark.parametrize(("bits", "group", "zero"), KINDS)
@pytest.mark.parametrize(("dim", "start", "stop"), [(0, 8, 16), (0, 3, 20), (1, 32, 64), (1, 8, 40), (1, 1, 63)])
def test_a_part_is_that_part(bits: int, group: int | None, zero: bool, dim: int, start: int, stop: int) -> None:
    stored, expected = some(24, 64, bits, group, zero)
    part = stored.part(dim, start, stop)
    assert isinstance(part, RoundedTensor) or (dim, start, stop) not in ((0, 8, 16), (1, 32, 64))
    wanted = expected[start:stop] if dim == 0 else expected[:, start:stop]
    assert part.shape == wanted.shape
    out = torch.empty(part.shape)
    part.read_rows(0, part.shape[0], out, Scratch())
    torch.testing.assert_close(out, wanted, rtol=0, atol=0)


def test_words_hold_the_first_code_in_their_lowest_bits() -> None:
    codes = torch.tensor([[1, 2, 3, 4, 5, 6, 7, 15]])
    assert pack_words(codes, 4).tolist() == [[0xF7654321 - 2**32]]
    assert torch.equal(unpack_words(pack_words(codes, 4), 4), codes.int())


def write(folder: Path, model: Llama, change: Callable[[dict[str, Tensor], str], None], settings: Any) -> None:
    """A saved model with the weights of its layers rounded by `change(tensors, module)`."""
    save_model(model, folder)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj.weight")]:
        change(tensors, name.removesuffix(".weight"))
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def fp8(tensors: dict[str, Tensor], module: str) -> None:
    weight = tensors[f"{module}.weight"]
    scale = weight.abs().amax(1, keepdim=True) / 448
    tensors[f"{module}.weight"] = (weight / scale).to(torch.float8_e4m3fn)
    tensors[f"{module}.weight_scale"] = scale


def int8_by_tensor(tensors: dict[str, Tensor], module: str) -> None:
    weight = tensors[f"{module}.weight"]
    scale = weight.abs().max() / 127
    tensors[f"{module}.weight"] = (weight / scale).round().to(torch.int8)
    tensors[f"{module}.weight_scale"] = scale.reshape(1)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (fp8, quantization_settings("float", 8, None)),
        (int8_by_tensor, {**quantization_settings("int", 8, None), "format": "int-quantized"}),
    ],
)
def test_a_folder_of_rounded_weights_loads_as_numbers(
    tmp_path: Path, make_t0: Make, change: Callable[[dict[str, Tensor], str], None], settings: Any
) -> None:
    model = make_t0()
    for group in settings["config_groups"].values():
        group["format"] = settings["format"]
    write(tmp_path / "model", model, change, settings)
    loaded = load_model(tmp_path / "model")
    for name, parameter in model.named_parameters():
        error = (loaded.get_parameter(name) - parameter).abs().max() / parameter.abs().max()
        assert (0 < error < 0.04) if name.endswith("_proj.weight") else error == 0, name
    assert "quantization_config" not in loaded.config.to_hf()
    save_model(loaded, tmp_path / "dense")  # and is a model like any other
    assert torch.equal(load_model(tmp_path / "dense").lm_head.weight, loaded.lm_head.weight)  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"quant_method": "gptq", "bits": 4}, "quant_method 'gptq'; only 'compressed-tensors' is read"),
        ("gptq", "only 'compressed-tensors' is read"),
        ({"quant_method": "compressed-tensors"}, "must have config_groups"),
        ({**quantization_settings("float", 4, 16)}, "4 bits of type 'float'"),
        ({"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": []}}}, "weights and targets"),
    ],
)
def test_what_is_not_read_is_refused_by_name(tmp_path: Path, make_t0: Make, settings: Any, message: str) -> None:
    write(tmp_path / "model", make_t0(), fp8, settings)
    with pytest.raises(CheckpointError, match=message):
        load_model(tmp_path / "model")


def test_parts_that_are_missing_are_named(tmp_path: Path, make_t0: Make) -> None:
    def lose(tensors: dict[str, Tensor], module: str) -> None:
        fp8(tensors, module)
        tensors[f"{module}.weight_packed"] = tensors.pop(f"{module}.weight").view(torch.int32)
        del tensors[f"{module}.weight_scale"]

    write(tmp_path / "model", make_t0(), lose, quantization_settings("int", 8, None))
    with pytest.raises(CheckpointError, match=r"down_proj\.weight_packed has no weight_scale"):
        load_model(tmp_path / "model")
