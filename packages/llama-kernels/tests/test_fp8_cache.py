"""A paged cache in fp8: rounded as torch rounds, and attention over the rounded keys and values."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from llama_kernels.paged_attention import gathered_attention, paged_attention
from llama_kernels.reference_attention import attention_reference
from llama_kernels.triton_paged import triton_paged_attention
from llama_kernels.write_kv import from_fp8, to_fp8, write_kv

# The rounded numbers are exact in every type; what remains is the rounding of the type itself, as in
# test_paged_attention. The interpreter cuts bfloat16 off instead of rounding.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
PAGE, KV, WIDTH = 4, 2, 16


def filled(dtype: torch.dtype, device: str) -> tuple[Tensor, ...]:
    """Cache, tables, lengths and queries of three sequences, with their rounded keys and values in float64."""
    generator = torch.Generator().manual_seed(0)
    lens = [37, 5, 20]
    tables = torch.randperm(40, generator=generator)[:30].view(3, 10).to(torch.int32)
    cache = torch.full((2, 40, PAGE, KV, WIDTH), float("nan")).to(device, torch.float8_e4m3fn)
    scales = torch.tensor([[0.5, 2.0], [0.01, 0.3]], device=device)
    wide = []
    for table, n in zip(tables, lens, strict=True):
        kv = torch.randn(2, n, KV, WIDTH, generator=generator).to(device, dtype)
        at = torch.arange(n)
        slots = (table[at // PAGE].long() * PAGE + at % PAGE).to(device)
        write_kv(kv[0], kv[1], cache[0], cache[1], slots, k_scale=scales[0], v_scale=scales[1])
        wide.append([from_fp8(to_fp8(x, s), s, torch.float64) for x, s in zip(kv, scales, strict=True)])
    q = torch.randn(3, 2 * KV, WIDTH, generator=generator).to(device, dtype)
    expected = torch.stack([
        attention_reference(q[None, i : i + 1].double(), k[None], v[None], causal=True)[0][0, 0]
        for i, (k, v) in enumerate(wide)
    ])  # fmt: skip
    return cache, scales, tables.to(device), torch.tensor(lens, dtype=torch.int32, device=device), q, expected


@pytest.mark.parametrize("dtype", TOLERANCE)
def test_attention_over_rounded_keys(dtype: torch.dtype, device: str) -> None:
    cache, scales, tables, lens, q, expected = filled(dtype, device)
    given = (q, cache[0], cache[1], tables, lens)
    bounds = torch.arange(4, dtype=torch.int32, device=device)
    both = {"k_scale": scales[0], "v_scale": scales[1]}
    outs = [
        paged_attention(*given, **both),
        paged_attention(*given, bounds, **both),
        gathered_attention(*given, None, **both),
        triton_paged_attention(*given, bounds, 1, 37, splits=3, **both),
    ]
    for out in outs:
        assert out.dtype == dtype
        torch.testing.assert_close(out.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


def test_what_is_written_is_rounded_cut_off_and_nan_stays(device: str) -> None:
    k = torch.tensor([1.0, 1.06, -1e6, 1e6, float("nan"), 0.004, 0.0, 448.0], device=device).view(1, 1, 8)
    cache = torch.zeros(2, 1, 4, 1, 8, device=device).to(torch.float8_e4m3fn)
    one = torch.ones(1, device=device)
    slots = torch.tensor([2], device=device)
    write_kv(k, k, cache[0], cache[1], slots, k_scale=one, v_scale=2 * one)
    expected = torch.tensor([1.0, 1.0, -448.0, 448.0, float("nan"), 2**-8, 0.0, 448.0])
    torch.testing.assert_close(cache[0, 0, 2, 0].float().cpu(), expected, equal_nan=True, rtol=0, atol=0)
    assert cache[1, 0, 2, 0].float().tolist()[2:4] == [-448.0, 448.0]
    assert cache[1, 0, 2, 0].float().tolist()[0] == 0.5
    assert not cache.view(torch.uint8)[:, 0, [0, 1, 3]].any()


def test_scales_belong_to_fp8_and_fp8_to_scales(device: str) -> None:
    cache, scales, tables, lens, q, _ = filled(torch.float32, device)
    both = {"k_scale": scales[0], "v_scale": scales[1]}
    with pytest.raises(ValueError, match="without k_scale; float8_e4m3fn has scales"):
        paged_attention(q, cache[0], cache[1], tables, lens)
    with pytest.raises(ValueError, match="float32 with k_scale; float8_e4m3fn has scales"):
        paged_attention(q, cache[0].float(), cache[1].float(), tables, lens, **both)
    with pytest.raises(ValueError, match=r"v_scale is torch\.float32 \(1,\) on .*; expected dense float32 \(2,\)"):
        paged_attention(q, cache[0], cache[1], tables, lens, k_scale=scales[0], v_scale=scales[1, :1])
    k = torch.zeros(1, KV, WIDTH, device=device)
    with pytest.raises(ValueError, match="without k_scale"):
        write_kv(k, k, cache[0], cache[1], torch.zeros(1, dtype=torch.int64, device=device))
