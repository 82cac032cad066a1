"""Every backend that runs here against float64 attention written out: values, log-sum-exp, three gradients."""

import pytest
import torch
from torch import Tensor

from llama_kernels.attention import attention, attention_backward, attention_forward
from llama_kernels.merge import merge_attention
from llama_kernels.reference_attention import attention_reference

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
# What can run on this machine. On a CPU, triton is Triton's interpreter (see conftest).
HERE = ["plain", "triton"] if CUDA else ["plain", "flash_cpu", "triton"]
# Largest difference to float64. Inputs and gradients are of order 1; half types round the result and P once each, and
# the interpreter truncates to bfloat16 where a GPU rounds (kernels.md section 5), so 3 units of 2^-8 there.
TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.2e-2}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator).to(DEVICE, dtype)


def bounds(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def compare(q: Tensor, k: Tensor, v: Tensor, backend: str | None, dout: Tensor | None = None, **how) -> Tensor:
    """Assert agreement with float64 in values, log-sum-exp and gradients; return the output."""
    tolerance = TOLERANCE[q.dtype]
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    out, lse = attention(*inputs, return_lse=True, backend=backend, **how)
    true_out, true_lse = attention_reference(*exact, **how)
    assert out.dtype == q.dtype
    assert out.shape == q.shape
    assert lse.dtype == torch.float32
    dout = draw(*q.shape, dtype=q.dtype, seed=7) if dout is None else dout
    grads = torch.autograd.grad(out, inputs, dout)
    true_grads = [torch.zeros_like(x) for x in exact]
    if true_out.requires_grad:  # not so where there is no key at all
        true_grads = torch.autograd.grad(true_out, exact, dout.double(), allow_unused=True, materialize_grads=True)
    # Scores of half inputs are float32 sums of exact products; torch's CPU kernel alone rounds some of them on the way.
    close = 1e-5 if q.dtype == torch.float32 else tolerance / 10
    torch.testing.assert_close(lse.double(), true_lse, atol=close, rtol=close)
    torch.testing.assert_close(out.double(), true_out, atol=tolerance, rtol=tolerance)
    for x, true, name in zip(grads, true_grads, ("dq", "dk", "dv")):
        # A key's gradient sums over every query head of its group and every row: errors grow with its size.
        scale = max(1.0, true.abs().max().item() / 2) if true.numel() else 1.0
        torch.testing.assert_close(
            x.double(), true, atol=tolerance * scale, rtol=tolerance, msg=lambda m, n=name: n + ": " + m
        )
    return out.detach()


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("seq_q", "seq_k"), [(1, 1), (1, 33), (35, 35), (7, 40), (40, 7)])
@pytest.mark.parametrize("causal", [True, False])
def test_values_and_gradients(backend: str, dtype: torch.dtype, seq_q: int, seq_k: int, causal: bool) -> None:
    q, k, v = (
        draw(2, seq_q, 4, 32, dtype=dtype),
        draw(2, seq_k, 2, 32, dtype=dtype, seed=1),
        draw(2, seq_k, 2, 32, dtype=dtype, seed=2),
    )
    compare(q, k, v, backend, causal=causal)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("offset", [-50, -3, 0, 4, 50])
def test_mask_offset(backend: str, offset: int) -> None:
    q, k, v = draw(1, 20, 2, 16), draw(1, 37, 1, 16, seed=1), draw(1, 37, 1, 16, seed=2)
    out = compare(q, k, v, backend, causal=True, q_offset=offset)
    empty = min(20, max(0, -offset))
    assert (out[:, :empty] == 0).all()


@pytest.mark.parametrize("backend", HERE)
def test_b37_rows_without_keys(backend: str) -> None:
    """B37: rows that see no key are exactly zero, forward and backward, and the mask hangs at the bottom right."""
    # (1) 6 queries, 2 keys
    q, k, v = draw(1, 6, 1, 8), draw(1, 2, 1, 8, seed=1), draw(1, 2, 1, 8, seed=2)
    ones = torch.ones_like(q)
    out = compare(q, k, v, backend, dout=ones, causal=True)
    assert (out[0, :4] == 0).all()
    torch.testing.assert_close(out[0, 4], v[0, 0], atol=1e-6, rtol=0)
    leaf = q.clone().requires_grad_()
    (dq,) = torch.autograd.grad(attention(leaf, k, v, causal=True, backend=backend), leaf, ones)
    assert (dq[0, :4] == 0).all()
    assert dq.isfinite().all()
    # (2) 2 queries, 6 keys: row 0 sees 5 of them, row 1 all
    q, k, v = draw(1, 2, 1, 8), draw(1, 6, 1, 8, seed=1), draw(1, 6, 1, 8, seed=2)
    out = compare(q, k, v, backend, dout=torch.ones_like(q), causal=True)
    five = attention_reference(q[:, :1].double(), k[:, :5].double(), v[:, :5].double(), causal=False)[0]
    torch.testing.assert_close(out[:, :1].double(), five, atol=1e-5, rtol=0)
    # (3) packed, lengths 3 and 4 over 1 and 4
    q, k, v = draw(7, 1, 8), draw(5, 1, 8, seed=1), draw(5, 1, 8, seed=2)
    packed = {"cu_seqlens_q": bounds(0, 3, 7), "cu_seqlens_k": bounds(0, 1, 5)}
    out = compare(q, k, v, backend, dout=torch.ones_like(q), causal=True, **packed)
    assert (out[:2] == 0).all()
    assert (out[2:] != 0).any(-1).all()


LENGTHS, WIDTHS = [1, 15, 16, 17, 67, 129], [8, 40, 64, 96]
# The interpreter takes a second for each: there every length at one width, and every width at one length.
SHAPES = {
    name: [(n, d) for n in LENGTHS for d in WIDTHS if CUDA or name != "triton" or d == 40 or n == 67] for name in HERE
}


@pytest.mark.parametrize(("backend", "length", "width"), [(b, *shape) for b in HERE for shape in SHAPES[b]])
def test_b38_lengths_and_widths_that_fill_no_block(backend: str, length: int, width: int) -> None:
    """B38: random inputs, causal and not, 6 query heads on 2 key heads, batch 2."""
    for dtype, causal in ((torch.float32, True), (torch.float32, False), (torch.float16, True), (torch.float16, False)):
        q, k, v = (draw(2, length, heads, width, dtype=dtype, seed=heads + i) for i, heads in enumerate((6, 2, 2)))
        if backend == "triton" and not CUDA and (dtype == torch.float16 or (length > 100 and not causal)):
            continue  # the interpreter computes both types in float32, and takes its time
        compare(q, k, v, backend, causal=causal)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize(("length", "width"), [(67, 40), (15, 8)])
def test_b38_probes(backend: str, length: int, width: int) -> None:
    """B38's probes A to D: padding keys in the softmax, lost channels, and the order of grouped heads."""
    q, k, v = (draw(2, length, heads, width, seed=heads) for heads in (6, 2, 2))
    for causal in (True, False):  # A
        out = attention(q, k, torch.ones_like(v), causal=causal, backend=backend)
        torch.testing.assert_close(out, torch.ones_like(out), atol=1e-6, rtol=0)
    ramp = torch.arange(length, device=DEVICE).float()[None, :, None, None].expand(2, length, 2, width)  # B
    out = attention(torch.zeros_like(q), torch.zeros_like(k), ramp, causal=False, backend=backend)
    torch.testing.assert_close(out, torch.full_like(out, (length - 1) / 2), atol=1e-4, rtol=0)
    last = torch.zeros(width, device=DEVICE)  # C
    last[-1] = 3.0
    out = compare(q * last, k * last, v, backend, causal=False)
    uniform = v.mean(1, keepdim=True).repeat_interleave(3, 2)
    assert (out - uniform).abs().max() > 0.1
    by_head = torch.tensor([1.0, 2.0], device=DEVICE)[:, None].expand(2, length, 2, width)  # D
    out = attention(q, k, by_head, causal=True, backend=backend)
    expected = torch.tensor([1.0, 1, 1, 2, 2, 2], device=DEVICE)[:, None].expand_as(out)
    torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


PACKED = [
    ((0, 5, 38, 40), (0, 5, 38, 40)),  # self-attention
    ((0, 3, 3, 20, 25), (0, 1, 5, 37, 37)),  # row 31: more queries than keys, empty on either side
    ((0, 0, 12), (0, 9, 9)),  # a document without queries, one without keys
    ((0,), (0,)),  # no document at all
]


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("cuts", PACKED)
@pytest.mark.parametrize("how", [{"causal": True}, {"causal": False}, {"causal": True, "q_offset": 1}])
def test_packed_documents_and_row_35_tails(
    backend: str, cuts: tuple[tuple[int, ...], tuple[int, ...]], how: dict
) -> None:
    """Tensors are longer than the documents: what lies behind must come out as empty rows and zero gradients."""
    q, k, v = draw(41, 4, 24), draw(43, 2, 24, seed=1), draw(43, 2, 24, seed=2)
    out = compare(q, k, v, backend, cu_seqlens_q=bounds(*cuts[0]), cu_seqlens_k=bounds(*cuts[1]), **how)
    assert (out[cuts[0][-1] :] == 0).all()


@pytest.mark.parametrize("backend", HERE)
def test_rows_14_and_20_strided_inputs_and_gradients(backend: str) -> None:
    q = draw(2, 4, 9, 32).transpose(1, 2)  # heads before rows
    kv = draw(2, 9, 2, 2, 48, seed=1)[..., :32]  # one projection holds keys and values, rows wider than D
    k, v = kv[:, :, 0], kv[:, :, 1]
    for dout in (
        torch.ones((), device=DEVICE).expand(2, 9, 4, 32),  # what sum() sends
        draw(2, 9, 4, 64)[..., ::2],
        draw(2, 4, 9, 32).transpose(1, 2),
    ):
        compare(q, k, v, backend, dout=dout, causal=True)
    one_head = draw(2, 9, 1, 32).expand(2, 9, 4, 32)
    compare(one_head, k, v, backend, causal=True)
    compare(q, k, draw(1, 1, 2, 32).expand(2, 9, 2, 32), backend, causal=True)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("shape", [(0, 5, 5), (2, 0, 5), (2, 5, 0), (2, 0, 0)])
def test_row_27_nothing_to_do(backend: str, shape: tuple[int, int, int]) -> None:
    batch, seq_q, seq_k = shape
    q, k, v = draw(batch, seq_q, 4, 16), draw(batch, seq_k, 2, 16), draw(batch, seq_k, 2, 16)
    out = compare(q, k, v, backend, causal=True)
    assert (out == 0).all()


@pytest.mark.parametrize("backend", HERE)
def test_row_30_large_logits(backend: str) -> None:
    """Logits far below any finite mask value still count, and far above do not overflow."""
    q, k, v = draw(1, 9, 1, 16), draw(1, 9, 1, 16, seed=1), draw(1, 9, 1, 16, seed=2)
    k[:, :, :, 0] = 1.0
    for size in (-4e7, 4e3):
        far = q.clone()
        far[..., 0] = size
        out, lse = attention(far, k, v, causal=True, return_lse=True, backend=backend)
        true_out, true_lse = attention_reference(far.double(), k.double(), v.double(), causal=True)
        assert out.isfinite().all()
        torch.testing.assert_close(lse.double(), true_lse, rtol=1e-6, atol=0)
        torch.testing.assert_close(out[:, 0], v[:, 0])  # one key only: exactly its value, however small its weight
        if size == 4e3:  # float32 scores near 1000 are good to 6e-5, and so is each weight
            torch.testing.assert_close(out.double(), true_out, atol=1e-3, rtol=0)


@pytest.mark.parametrize("backend", HERE)
def test_row_22_a_decode_step(backend: str) -> None:
    q, k, v = draw(3, 1, 6, 40), draw(3, 21, 2, 40, seed=1), draw(3, 21, 2, 40, seed=2)
    compare(q, k, v, backend, causal=True)


@pytest.mark.parametrize("backend", HERE)
@pytest.mark.parametrize("ranks", [2, 4])
def test_ring_rows_29_32_33_34(backend: str, ranks: int) -> None:
    """Blocks of keys one after another, as a ring delivers them, equal the whole: values and all three gradients.

    Every rank's queries meet every rank's keys: a backward that reused its own keys would fail (row 32). Keys travel
    with their own number of heads (33). The error must not grow with the number of blocks (29).
    """
    length, per_rank = 32, 32 // ranks
    q, k, v = draw(1, length, 4, 16), draw(1, length, 2, 16, seed=1), draw(1, length, 2, 16, seed=2)
    dout = draw(1, length, 4, 16, seed=3)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = attention_reference(*exact, causal=True)
    true_grads = torch.autograd.grad(true_out, exact, dout.double())
    pieces = [slice(r * per_rank, (r + 1) * per_rank) for r in range(ranks)]
    dq, dk, dv = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for rows in pieces:
        out = torch.zeros_like(q[:, rows])
        lse = torch.full((1, 4, per_rank), float("-inf"), device=DEVICE)
        for keys in pieces:
            how = {"causal": True, "q_offset": rows.start - keys.start, "backend": backend}
            part, part_lse = attention_forward(q[:, rows], k[:, keys], v[:, keys], **how)
            out, lse = merge_attention(out, lse, part, part_lse)
        torch.testing.assert_close(out.double(), true_out[:, rows], atol=1e-5, rtol=1e-5)
        torch.testing.assert_close(lse.double(), true_lse[:, :, rows], atol=1e-5, rtol=1e-5)
        for keys in pieces:
            how = {"causal": True, "q_offset": rows.start - keys.start, "backend": backend}
            grads = attention_backward(dout[:, rows], q[:, rows], k[:, keys], v[:, keys], out, lse, **how)
            dq[:, rows] += grads[0]
            dk[:, keys] += grads[1]
            dv[:, keys] += grads[2]
    for x, true in zip((dq, dk, dv), true_grads):
        torch.testing.assert_close(x.double(), true, atol=1e-5, rtol=1e-5)


def test_plain_keeps_float64() -> None:
    q, k, v = (draw(1, 9, n, 8, seed=n).double().requires_grad_() for n in (4, 2, 2))
    out, lse = attention(q, k, v, causal=True, return_lse=True)
    assert lse.dtype == torch.float64
    assert torch.autograd.gradcheck(lambda *x: attention(*x, causal=True), (q, k, v))
    torch.testing.assert_close(out, attention_reference(q, k, v, causal=True)[0], atol=1e-14, rtol=1e-14)


def test_default_and_sdpa_agree_with_float64() -> None:
    q, k, v = draw(2, 19, 4, 32), draw(2, 19, 2, 32, seed=1), draw(2, 19, 2, 32, seed=2)
    true = attention_reference(q.double(), k.double(), v.double(), causal=True)[0]
    for backend in (None, "sdpa", *(["flash"] if not CUDA else [])):
        torch.testing.assert_close(attention(q, k, v, causal=True, backend=backend).double(), true, atol=1e-5, rtol=0)
    compare(q, k, v, None, causal=True)


# torch 2.15's check itself reads .grad of tensors inside the graph.
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("backend", HERE)
def test_row_25_operators_and_compile(backend: str) -> None:
    q, k, v = (draw(1, 9, n, 16, seed=n).requires_grad_() for n in (2, 1, 1))
    torch.library.opcheck(
        torch.ops.llama_kernels.attention_forward, (q, k, v, None, None, True, None, None, None, backend)
    )
    packed = [x.detach()[0].requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(
        torch.ops.llama_kernels.attention_forward,
        (*packed, bounds(0, 4, 9), bounds(0, 4, 9), True, None, None, None, backend),
    )

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out, lse = attention(q, k, v, causal=True, return_lse=True, backend=backend)
        return (out * out).sum() + lse.sum()

    compiled = torch.compile(loss, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(q, k, v), loss(q, k, v))
    for x, y in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), torch.autograd.grad(loss(q, k, v), (q, k, v))):
        torch.testing.assert_close(x, y)
