"""paged_attention and write_kv against float64 attention over keys laid side by side."""

import pytest
import torch
from torch import Tensor

from llama_kernels.paged_attention import gathered_attention, paged_attention
from llama_kernels.reference_attention import attention_reference
from llama_kernels.triton_paged import splits_for, triton_paged_attention
from llama_kernels.write_kv import write_kv

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def ints(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32, device=DEVICE)


class Pool:
    """Sequences of given key and query lengths, their keys scattered over a pool of pages full of NaN elsewhere."""

    def __init__(
        self, keys: list[int], queries: list[int], heads: int, kv_heads: int, width: int, page: int, dtype: torch.dtype
    ) -> None:
        generator = torch.Generator().manual_seed(sum(keys) + width)
        room = max(1, max(-(-n // page) for n in keys))
        pages = len(keys) * room + 3
        self.k_cache, self.v_cache = (
            torch.full((pages, page, kv_heads, width), float("nan"), dtype=dtype, device=DEVICE) for _ in range(2)
        )
        order = torch.randperm(pages, generator=generator)[: len(keys) * room].view(len(keys), room)
        self.tables = order.to(DEVICE, torch.int32)
        self.lens = ints(keys)
        self.cuts = ints([sum(queries[:i]) for i in range(len(queries) + 1)])
        self.q = torch.randn(sum(queries), heads, width, generator=generator).to(DEVICE, dtype)
        self.expected = torch.zeros(self.q.shape, dtype=torch.float64, device=DEVICE)
        for i, n in enumerate(keys):
            k, v = (torch.randn(n, kv_heads, width, generator=generator).to(DEVICE, dtype) for _ in range(2))
            at = torch.arange(n, device=DEVICE)
            write_kv(k, v, self.k_cache, self.v_cache, order.to(DEVICE)[i][at // page] * page + at % page)
            rows = slice(int(self.cuts[i]), int(self.cuts[i + 1]))
            if n and rows.stop > rows.start:
                exact = (self.q[None, rows].double(), k[None].double(), v[None].double())
                self.expected[rows] = attention_reference(*exact, causal=True)[0][0]

    def check(self, out: Tensor) -> None:
        assert out.shape == self.q.shape
        assert out.dtype == self.q.dtype
        tolerance = TOLERANCE[self.q.dtype]
        torch.testing.assert_close(out.double(), self.expected, atol=tolerance, rtol=tolerance)


MIXES = [
    ([1], [1]),
    ([37, 5, 64], [1, 1, 1]),  # decode steps
    ([37, 5, 64, 20], [1, 5, 1, 7]),  # decode, a whole prompt, decode, the rest of a prompt
    ([9, 0, 3, 12], [9, 0, 1, 2]),  # a sequence of padding
]


SHAPES = [(4, 1, 32, 16, torch.float32), (6, 2, 40, 4, torch.float16), (3, 3, 16, 5, torch.bfloat16)]


@pytest.mark.parametrize(("keys", "queries"), MIXES)
@pytest.mark.parametrize("shape", SHAPES)  # heads, key heads, width, page size, type
def test_mixed_lengths(keys: list[int], queries: list[int], shape: tuple[int, int, int, int, torch.dtype]) -> None:
    pool = Pool(keys, queries, *shape)
    arguments = (pool.q, pool.k_cache, pool.v_cache, pool.tables, pool.lens)
    pool.check(paged_attention(*arguments, pool.cuts))
    pool.check(gathered_attention(*arguments, pool.cuts))
    for splits in (2, 3):
        pool.check(triton_paged_attention(*arguments, pool.cuts, max(queries), max(keys), splits=splits))
    if set(queries) == {1}:
        pool.check(paged_attention(*arguments))


def test_split_keys_of_one_decode_step() -> None:
    """More stretches than there are tiles of keys: the surplus ones stay empty and unwritten."""
    pool = Pool([70, 3], [1, 1], 4, 2, 16, 8, torch.float32)
    for splits in (1, 2, 5, 7):
        pool.check(
            triton_paged_attention(
                pool.q, pool.k_cache, pool.v_cache, pool.tables, pool.lens, None, 1, 70, splits=splits
            )
        )


def test_splits_fill_whole_rounds() -> None:
    assert splits_for(8, 528, 128) == 60  # one long sequence: 480 of 528 places
    assert splits_for(512, 528, 32) == 1  # one round, nearly full
    assert splits_for(768, 528, 32) == 2  # 1.45 rounds would leave half of the second idle; 2.9 waste little
    assert splits_for(8, 528, 3) == 3  # short sequences: as many as there are
    assert splits_for(5000, 528, 1) == 1


def test_rows_behind_the_last_sequence_and_empty_sequences_are_zero() -> None:
    pool = Pool([7, 0, 9], [2, 1, 1], 2, 1, 16, 4, torch.float32)
    q = torch.cat([pool.q, torch.ones(3, 2, 16, device=DEVICE)])
    for splits in (1, 2):
        out = triton_paged_attention(q, pool.k_cache, pool.v_cache, pool.tables, pool.lens, pool.cuts, 2, 9, splits)
        pool.check(out[:4])
        assert (out[4:] == 0).all()
        assert (out[2] == 0).all()
    nobody = paged_attention(q[:0], pool.k_cache, pool.v_cache, pool.tables[:0], pool.lens[:0])
    assert nobody.shape == (0, 2, 16)


def test_caches_with_heads_before_rows() -> None:
    """A pool stored (pages, K, page size, D) serves through its strides."""
    pool = Pool([11, 6], [1, 1], 4, 2, 16, 4, torch.float32)
    k_cache, v_cache = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (pool.k_cache, pool.v_cache))
    pool.check(paged_attention(pool.q, k_cache, v_cache, pool.tables, pool.lens))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_write_kv(kind: torch.dtype) -> None:
    """Strided sources, strided caches, skipped slots; nothing else is touched."""
    kv = torch.randn(5, 2, 3, 10, device=DEVICE)
    k, v = kv[:, 0, :, ::2], kv[:, 1, :, :5]
    k_cache = torch.zeros(4, 3, 6, 5, device=DEVICE).transpose(1, 2)  # stored with heads before rows
    v_cache = torch.zeros(4, 6, 3, 5, device=DEVICE)
    slots = torch.tensor([7, -1, 23, 24, 0], device=DEVICE, dtype=kind)  # the cache has slots 0 .. 23
    write_kv(k, v, k_cache, v_cache, slots)
    expected_k, expected_v = torch.zeros(24, 3, 5, device=DEVICE), torch.zeros(24, 3, 5, device=DEVICE)
    for token in (0, 2, 4):
        expected_k[slots[token]], expected_v[slots[token]] = k[token], v[token]
    assert torch.equal(k_cache.reshape(24, 3, 5), expected_k)
    assert torch.equal(v_cache.reshape(24, 3, 5), expected_v)
    write_kv(k[:0], v[:0], k_cache, v_cache, slots[:0])


def test_operators_compile() -> None:
    pool = Pool([7, 9], [1, 1], 4, 2, 16, 4, torch.float32)
    k, v, slots = pool.q[:, :2] * 2, pool.q[:, 2:] * 3, torch.tensor([2, 30], device=DEVICE)
    torch.library.opcheck(
        torch.ops.llama_kernels.paged_attention,
        (pool.q, pool.k_cache, pool.v_cache, pool.tables, pool.lens, None, 1, 9),
    )
    caches = [torch.zeros_like(pool.k_cache), torch.zeros_like(pool.v_cache)]
    torch.library.opcheck(torch.ops.llama_kernels.write_kv, (k, v, *caches, slots))

    def step(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor) -> Tensor:
        write_kv(k, v, k_cache, v_cache, slots)
        return paged_attention(pool.q, k_cache, v_cache, pool.tables, pool.lens) + 1

    state = [x.nan_to_num(0.0) for x in (pool.k_cache, pool.v_cache)]
    eager_state, compiled_state = [x.clone() for x in state], [x.clone() for x in state]
    eager = step(k, v, *eager_state)
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")(k, v, *compiled_state)
    torch.testing.assert_close(compiled, eager)
    assert all(torch.equal(x, y) for x, y in zip(eager_state, compiled_state))
    assert not torch.equal(eager_state[0], state[0])


def test_what_does_not_fit() -> None:
    pool = Pool([7, 9], [1, 1], 4, 2, 16, 4, torch.float32)
    q, k_cache, v_cache, tables, lens = pool.q, pool.k_cache, pool.v_cache, pool.tables, pool.lens
    with pytest.raises(ValueError, match="4 query heads of width 16 on 3 key heads"):
        paged_attention(q, k_cache.repeat(1, 1, 2, 1)[:, :, :3], v_cache.repeat(1, 1, 2, 1)[:, :, :3], tables, lens)
    with pytest.raises(ValueError, match="the three must agree"):
        paged_attention(q, k_cache, v_cache, tables[:1], lens)
    with pytest.raises(ValueError, match=r"seq_lens is torch\.int64"):
        paged_attention(q, k_cache, v_cache, tables, lens.long())
    with pytest.raises(ValueError, match=r"k_cache is torch\.float16"):
        paged_attention(q, k_cache.half(), v_cache.half(), tables, lens)
    with pytest.raises(ValueError, match="the cache"):
        write_kv(q, q, k_cache, v_cache, torch.zeros(2, dtype=torch.int64, device=DEVICE))
    with pytest.raises(ValueError, match="slots is"):
        write_kv(q[:, :2], q[:, :2], k_cache, v_cache, torch.zeros(3, dtype=torch.int64, device=DEVICE))
    if not CUDA:
        with pytest.raises(ValueError, match=r"seq_lens\[0\] = 99 must lie in 0 .. 12"):
            gathered_attention(q, k_cache, v_cache, tables, ints([99, 9]), None)
        with pytest.raises(ValueError, match=r"block_tables\[0\] = .* must lie in 0 .. 8"):
            gathered_attention(q, k_cache, v_cache, tables + 100, lens, None)
