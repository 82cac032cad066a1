"""Initial weights: one function of seed, name and place, whatever the layout; and normally distributed."""

from __future__ import annotations

import hashlib
import tracemalloc
from statistics import NormalDist

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import llama_core.init
from llama_core import Llama, init_weights, preset
from llama_core.init import fill_normal


def draw(rows: slice, columns: slice, name: str = "w", seed: int = 0, shape: tuple[int, int] = (37, 53)) -> Tensor:
    """The block of a (37, 53) parameter, drawn as a block."""
    block = torch.empty(len(range(*rows.indices(shape[0]))), len(range(*columns.indices(shape[1]))))
    fill_normal(block, name, seed, 0.02, shape, [rows.start or 0, columns.start or 0])
    return block


ALL = slice(0, None)


@pytest.mark.parametrize("rows", [ALL, slice(0, 1), slice(36, 37), slice(5, 30), slice(4, 4)], ids=str)
@pytest.mark.parametrize("columns", [ALL, slice(0, 1), slice(52, 53), slice(17, 40)], ids=str)
def test_any_block_is_the_slice_of_the_whole(rows: slice, columns: slice) -> None:
    assert torch.equal(draw(rows, columns), draw(ALL, ALL)[rows, columns])


@pytest.mark.parametrize("chunk", [1, 7, 100, 1 << 22])
def test_the_chunk_size_is_invisible(monkeypatch: pytest.MonkeyPatch, chunk: int) -> None:
    whole = draw(ALL, ALL)
    monkeypatch.setattr(llama_core.init, "_CHUNK", chunk)
    assert torch.equal(draw(ALL, ALL), whole)


def test_strided_and_one_dimensional_blocks() -> None:
    whole = draw(ALL, ALL)
    transposed = torch.empty(53, 37).T
    fill_normal(transposed, "w", 0, 0.02, (37, 53), [0, 0])
    assert torch.equal(transposed, whole)
    flat, part = torch.empty(37 * 53), torch.empty(100)
    fill_normal(flat, "w", 0, 0.02, (37 * 53,), [0])
    fill_normal(part, "w", 0, 0.02, (37 * 53,), [60])
    assert torch.equal(flat.view(37, 53), whole)
    assert torch.equal(part, flat[60:160])


def test_places_beyond_32_bits() -> None:
    """The last rows of a 2¹⁸ × 2¹⁶ parameter have indices above 2³³; no two rows may fall together."""
    shape = (1 << 18, 1 << 16)
    last, wrapped = torch.empty(1, 64), torch.empty(1, 64)
    fill_normal(last, "w", 0, 1.0, shape, [(1 << 18) - 1, 0])
    fill_normal(wrapped, "w", 0, 1.0, shape, [(1 << 16) - 1, 0])  # the same index modulo 2³²
    assert not torch.isclose(last, wrapped).any()


def test_names_and_seeds_differ() -> None:
    draws = [draw(ALL, ALL, name, seed).flatten() for name in ("a", "b") for seed in (0, 1, -1, 2**63, 10**30)]
    for i, a in enumerate(draws):
        assert a.std() > 0
        for b in draws[:i]:
            # 1961 pairs: the correlation has deviation 1/44; six of them
            assert torch.corrcoef(torch.stack((a, b)))[0, 1].abs() < 6 / 44


def test_moments() -> None:
    """The first four moments of 2²⁰ draws within five standard errors of the normal's 0, 1, 0, 3.

    Standard errors for n normal draws: 1/√n, √(2/n), √(15/n), √(96/n). The draws' own variance, the mean over the cells
    (a, b) of (a² + ab + b²)/3, is 1.0004, closer to 1 than one standard error, 1.4e-3.
    """
    low, width = llama_core.init._cells()
    variance = sum((a * a + a * (a + w) + (a + w) ** 2) / 3 for a, w in zip(low, width, strict=True)) / len(low)
    assert variance == pytest.approx(1, abs=5e-4)
    n = 1 << 20
    x = torch.empty(1024, 1024)
    fill_normal(x, "moments", 0, 1.0, x.shape, [0, 0])
    z = x.double().flatten()
    assert z.mean().abs() < 5 / n**0.5
    assert (z.square().mean() - 1).abs() < 5 * (2 / n) ** 0.5
    assert z.pow(3).mean().abs() < 5 * (15 / n) ** 0.5
    assert (z.pow(4).mean() - 3).abs() < 5 * (96 / n) ** 0.5
    assert 3.9 < z.abs().max() <= 4.17


def test_distribution_function() -> None:
    """Kolmogorov's distance of 2²⁰ draws from the normal below its 1e-6 quantile, 2.7/√n."""
    x = torch.empty(1024, 1024)
    fill_normal(x, "cdf", 1, 1.0, x.shape, [0, 0])
    z = x.double().flatten().sort().values
    exact = 0.5 * (1 + torch.erf(z / 2**0.5))
    empirical = torch.arange(1, len(z) + 1, dtype=torch.float64) / len(z)
    assert (exact - empirical).abs().max() < 2.7 / len(z) ** 0.5
    assert NormalDist().cdf(1.0) == pytest.approx((z < 1).double().mean().item(), abs=0.003)


def test_neighbours_are_independent() -> None:
    x = torch.empty(1024, 1024)
    fill_normal(x, "corr", 0, 1.0, x.shape, [0, 0])
    z = x.double()
    limit = 5 / z.numel() ** 0.5  # a product of independent unit normals has deviation 1
    for rows, columns in ((0, 1), (1, 0), (1, 1), (0, 2), (0, 64), (64, 0), (512, 0)):
        pairs = z[rows:, columns:] * z[: 1024 - rows, : 1024 - columns]
        assert pairs.mean().abs() < limit * (z.numel() / pairs.numel()) ** 0.5, (rows, columns)
        squares = (z[rows:, columns:] ** 2 - 1) * (z[: 1024 - rows, : 1024 - columns] ** 2 - 1) / 2
        assert squares.mean().abs() < limit * (z.numel() / pairs.numel()) ** 0.5, (rows, columns)


def test_rows_and_columns_have_no_pattern() -> None:
    x = torch.empty(512, 512)
    fill_normal(x, "rank", 0, 1.0, x.shape, [0, 0])
    assert x.mean(0).abs().max() < 6 / 512**0.5
    assert x.mean(1).abs().max() < 6 / 512**0.5
    largest = torch.linalg.svdvals(x.double())[0] / 512**0.5
    assert largest < 2.1  # Marchenko-Pastur: 2 for independent entries, with fluctuations of 512**(-2/3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_are_the_float32_draw(dtype: torch.dtype) -> None:
    block = torch.empty(37, 53, dtype=dtype)
    fill_normal(block, "w", 0, 0.02, block.shape, [0, 0])
    assert torch.equal(block, draw(ALL, ALL).to(dtype))


def by_hand(index: int, name: str, seed: int) -> float:
    """The definition once more, in whole numbers of Python and single operations of numpy's float32."""
    word = (1 << 64) - 1
    key = int.from_bytes(hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest(), "little")
    z = (index * 0x9E3779B97F4A7C15 + key) & word
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & word
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & word
    z ^= z >> 31
    cell, place = z >> 52, np.float32(((z >> 8) & 0xFFFFFF) / 2**24)
    normal = NormalDist()
    low = normal.inv_cdf(cell / 4096) if cell > 0 else normal.inv_cdf(1 / 65536)
    high = normal.inv_cdf((cell + 1) / 4096) if cell < 4095 else normal.inv_cdf(1 - 1 / 65536)
    return float((np.float32(low) + np.float32(high - low) * place) * np.float32(0.02))


def test_bits_are_fixed() -> None:
    """Ranks, devices and releases that share a run depend on these very numbers."""
    name = "model.layers.0.mlp.up_proj.weight"
    block = draw(ALL, ALL, name, seed=7).flatten().tolist()
    assert block == [by_hand(index, name, 7) for index in range(37 * 53)]
    expected = ["0x1.086af80000000p-5", "0x1.aef6760000000p-10", "0x1.ed96f20000000p-8", "0x1.4e28520000000p-6"]
    assert [x.hex() for x in block[:4]] == expected


class LargestTemporary(TorchDispatchMode):
    def __init__(self, out: Tensor) -> None:
        super().__init__()
        self.out = out.untyped_storage().data_ptr()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        result = func(*args, **(kwargs or {}))
        if isinstance(result, Tensor) and result.untyped_storage().data_ptr() != self.out:
            self.bytes = max(self.bytes, result.untyped_storage().size())
        return result


def test_big_parameters_need_no_big_temporaries() -> None:
    out = torch.empty(4096, 1024)
    with LargestTemporary(out) as largest:
        fill_normal(out, "big", 0, 1.0, out.shape, [0, 0])
    assert 0 < largest.bytes <= 8 * llama_core.init._CHUNK < out.nbytes
    tracemalloc.start()
    fill_normal(out, "big", 0, 1.0, out.shape, [0, 0])
    assert tracemalloc.get_traced_memory()[1] < 2e6  # nor lists of Python numbers
    tracemalloc.stop()


def test_init_weights_of_a_model() -> None:
    config = preset("tiny").replace(attention_bias=True, mlp_bias=True, initializer_range=0.05)
    model = Llama(config)
    for name, parameter in model.named_parameters():
        if name.endswith("norm.weight"):
            assert torch.equal(parameter, torch.ones_like(parameter)), name
        elif name.endswith("bias"):
            assert not parameter.any(), name
        else:
            # n draws: the estimate of the deviation is off by 1/√(2n) of it; five of those
            assert parameter.std().item() == pytest.approx(0.05, rel=5 / (2 * parameter.numel()) ** 0.5), name
            expected = torch.empty_like(parameter)
            fill_normal(expected, name, 0, 0.05, expected.shape, [0, 0])
            assert torch.equal(parameter, expected)
    other = Llama(config)
    init_weights(other, seed=1)
    assert not torch.equal(other.model.layers[0].mlp.up_proj.weight, model.model.layers[0].mlp.up_proj.weight)
    init_weights(other, seed=0)
    for (name, a), b in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_a_tied_head_alone_draws_the_embedding() -> None:
    """The last stage of a pipeline holds the tied matrix as `lm_head` and must start as the first one does."""
    whole, last = Llama(preset("tiny-tied")), Llama(preset("tiny-tied"))
    last.model.embed_tokens = None
    init_weights(whole, seed=5)
    init_weights(last, seed=5)
    assert whole.model.embed_tokens is not None
    assert last.lm_head is not None
    assert torch.equal(last.lm_head.weight, whole.model.embed_tokens.weight)


def test_zero_range() -> None:
    model = Llama(preset("tiny").replace(initializer_range=0.0))
    assert model.lm_head is not None
    assert not model.lm_head.weight.any()
