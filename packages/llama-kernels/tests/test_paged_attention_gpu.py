"""Paged attention on a GPU: real sizes, graph replay, a pool beyond 2^31 elements."""

import pytest
import torch
from torch import Tensor

from llama_kernels.paged_attention import gathered_attention, paged_attention
from llama_kernels.triton_paged import triton_paged_attention
from llama_kernels.write_kv import write_kv

pytestmark = pytest.mark.gpu


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device="cuda")


def pool(
    keys: list[int], tokens: int, width: int = 128, page: int = 16, spare: int = 0, dtype: torch.dtype = torch.bfloat16
) -> tuple[Tensor, ...]:
    """q, k_cache, v_cache, block_tables, seq_lens: 32 query heads on 8 key heads, pages in random order."""
    torch.manual_seed(0)
    room = -(-max(keys) // page)
    pages = len(keys) * room + spare
    cache = [torch.empty(pages, page, 8, width, device="cuda", dtype=dtype).normal_() for _ in range(2)]
    tables = (torch.randperm(len(keys) * room, device="cuda") + spare).to(torch.int32).view(len(keys), room)
    return torch.randn(tokens, 32, width, device="cuda", dtype=dtype), *cache, tables, ints(keys)


def near(out: Tensor, expected: Tensor, tolerance: float) -> None:
    assert out.isfinite().all()
    assert (out.double() - expected).abs().max() <= tolerance * max(1.0, expected.abs().max().item())


@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.bfloat16, 1.2e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)]
)
@pytest.mark.parametrize("width", [64, 96, 128, 256])
@pytest.mark.parametrize("queries", [[1, 1, 1, 1], [1, 300, 1, 17]])
def test_decode_and_mixed(dtype: torch.dtype, tolerance: float, width: int, queries: list[int]) -> None:
    arguments = pool([1000, 300, 4097, 50], sum(queries), width, dtype=dtype)
    cuts = ints([0, *torch.tensor(queries).cumsum(0).tolist()])
    expected = gathered_attention(*(x.double() if x.is_floating_point() else x for x in arguments), cuts)
    near(paged_attention(*arguments, cuts), expected, tolerance)
    if max(queries) == 1:
        near(paged_attention(*arguments), expected, tolerance)
    for splits in (1, 7):
        near(triton_paged_attention(*arguments, cuts, max(queries), 4097, splits=splits), expected, tolerance)


def test_graph_replay_with_other_lengths() -> None:
    """One captured decode step serves every later step: new lengths, tables and slots in the same tensors."""
    q, k_cache, v_cache, tables, lens = pool([2000, 700], 2)
    k, v = torch.randn(2, 8, 128, device="cuda").bfloat16(), torch.randn(2, 8, 128, device="cuda").bfloat16()
    slots = torch.zeros(2, dtype=torch.int64, device="cuda")

    def step() -> Tensor:
        write_kv(k, v, k_cache, v_cache, slots)
        return paged_attention(q, k_cache, v_cache, tables, lens)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step()
    for lengths in ([1999, 300], [16, 1]):
        lens.copy_(ints(lengths))
        last = [n - 1 for n in lengths]
        slots.copy_(torch.stack([tables[i, n // 16].long() * 16 + n % 16 for i, n in enumerate(last)]))
        k.normal_()
        graph.replay()
        assert torch.equal(k_cache.flatten(0, 1)[slots], k)
        doubled = (x.double() if x.is_floating_point() else x for x in (q, k_cache, v_cache, tables, lens))
        near(out, gathered_attention(*doubled, None), 1.2e-2)


def test_compile_fullgraph() -> None:
    q, k_cache, v_cache, tables, lens = pool([500, 33], 2)
    slots = torch.tensor([3, 40], device="cuda")

    def step(q: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        write_kv(q[:, :8], q[:, 8:16], k_cache, v_cache, slots)
        return paged_attention(q * 2, k_cache, v_cache, tables, lens) * 2

    eager = step(q, k_cache.clone(), v_cache.clone())
    torch.testing.assert_close(torch.compile(step, fullgraph=True)(q, k_cache, v_cache), eager, atol=2e-2, rtol=2e-2)
    assert torch.equal(k_cache.flatten(0, 1)[slots], q[:, :8])


def test_a_pool_beyond_two_to_the_31_elements() -> None:
    spare = 2**31 // (16 * 8 * 128)
    arguments = pool([900, 40], 2, spare=spare)
    assert arguments[1].numel() > 2**31
    assert int(arguments[3].min()) >= spare  # every page used lies behind element 2^31
    few = [x[spare:] for x in arguments[1:3]]
    expected = paged_attention(arguments[0], *few, arguments[3] - spare, arguments[4])
    assert torch.equal(paged_attention(*arguments), expected)
    k = torch.randn(2, 8, 128, device="cuda").bfloat16()
    slots = torch.tensor([spare * 16 + 5, arguments[1].shape[0] * 16 - 1], device="cuda")
    write_kv(k, k, arguments[1], arguments[2], slots)
    assert torch.equal(arguments[1].flatten(0, 1)[slots], k)
