"""Attention on a GPU: real sizes, every kernel of torch and ours, compile, graphs, tensors beyond 2^31 elements."""

import pytest
import torch
from torch import Tensor

from llama_kernels.attention import attention, attention_backward, attention_forward
from llama_kernels.attention_backends import BACKENDS
from llama_kernels.attention_call import describe
from llama_kernels.merge import merge_attention
from llama_kernels.reference_attention import attention_reference

pytestmark = pytest.mark.gpu

FAST = ["flash4", "cudnn", "triton", "flash_torch"]
# Largest difference to float64 relative to the largest true value: two or three roundings of the type.
TOLERANCE = {torch.float16: 2e-3, torch.bfloat16: 1.2e-2, torch.float32: 1e-5}


def draw(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=generator, device="cuda", dtype=dtype)


def bounds(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device="cuda")


def served(backend: str, q: Tensor, k: Tensor, causal: bool, **how) -> None:
    call = describe(q, k, how.get("cu_seqlens_q"), how.get("cu_seqlens_k"), causal, how.get("q_offset"), None, None)
    if reason := BACKENDS[backend].why_not(call):
        pytest.skip(reason)


def near(x: Tensor, true: Tensor, dtype: torch.dtype) -> None:
    assert x.isfinite().all()
    assert (x.double() - true).abs().max() <= TOLERANCE[dtype] * max(1.0, true.abs().max().item())


def compare(q: Tensor, k: Tensor, v: Tensor, backend: str, causal: bool, **how) -> None:
    served(backend, q, k, causal, **how)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    exact = [x.detach().double().requires_grad_() for x in (q, k, v)]
    dout = draw(*q.shape, dtype=q.dtype, seed=5)
    out, lse = attention(*inputs, causal=causal, return_lse=True, backend=backend, **how)
    true_out, true_lse = attention_reference(*exact, causal=causal, **{n: x for n, x in how.items() if "max" not in n})
    near(out, true_out, q.dtype)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-4, rtol=1e-4)
    grads = torch.autograd.grad(out, inputs, dout)
    for x, true in zip(grads, torch.autograd.grad(true_out, exact, dout.double())):
        near(x, true, q.dtype)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("width", [64, 128])
@pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (8, 2)])
@pytest.mark.parametrize("causal", [True, False])
def test_training_sizes(backend: str, dtype: torch.dtype, width: int, heads: int, kv_heads: int, causal: bool) -> None:
    q = draw(2, 1024, heads, width, dtype=dtype)
    k, v = (draw(2, 1024, kv_heads, width, dtype=dtype, seed=i) for i in (1, 2))
    compare(q, k, v, backend, causal)


@pytest.mark.parametrize("backend", FAST)
@pytest.mark.parametrize("width", [32, 40, 96, 192, 256])
@pytest.mark.parametrize("lengths", [(1000, 1000), (333, 777), (777, 333), (1, 1025)])
def test_odd_lengths_and_widths(backend: str, width: int, lengths: tuple[int, int]) -> None:
    q = draw(1, lengths[0], 6, width)
    k, v = (draw(1, lengths[1], 2, width, seed=i) for i in (1, 2))
    compare(q, k, v, backend, True)


@pytest.mark.parametrize("width", [64, 128, 256])
def test_triton_float32_is_exact(width: int) -> None:
    q = draw(1, 257, 4, width, dtype=torch.float32)
    k, v = (draw(1, 257, 2, width, dtype=torch.float32, seed=i) for i in (1, 2))
    compare(q, k, v, "triton", True)


@pytest.mark.parametrize("backend", ["flash4", "triton", "flash_torch"])
@pytest.mark.parametrize("bound", [None, 700])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize(
    "cuts", [((0, 500, 1130, 1300), (0, 500, 1130, 1300)), ((0, 3, 3, 600, 601), (0, 1, 500, 900, 900))]
)
def test_packed_documents(backend: str, bound: int | None, causal: bool, cuts: tuple) -> None:
    """Tensors reach behind the last document: rows there are empty, as are rows of documents without keys."""
    q = draw(cuts[0][-1] + 30, 8, 128)
    k, v = (draw(cuts[1][-1] + 50, 2, 128, seed=i) for i in (1, 2))
    how = {"cu_seqlens_q": bounds(*cuts[0]), "cu_seqlens_k": bounds(*cuts[1])}
    compare(q, k, v, backend, causal, max_seqlen_q=bound, max_seqlen_k=bound, **how)


@pytest.mark.parametrize("backend", FAST)
def test_strided_inputs_and_gradients(backend: str) -> None:
    qkv = draw(2, 300, 12, 64)
    q, k, v = qkv[:, :, :8], qkv[:, :, 8:10], qkv[:, :, 10:]
    compare(q, k, v, backend, True)
    inputs = [x.detach().requires_grad_() for x in (q, k, v)]
    one = torch.ones((), device="cuda", dtype=torch.bfloat16)
    for dout in (one.expand(q.shape), draw(2, 300, 8, 128)[..., ::2], draw(2, 8, 300, 64).transpose(1, 2)):
        out = attention(*inputs, causal=True, backend=backend)
        given = torch.autograd.grad(out, inputs, dout, retain_graph=True)
        dense = torch.autograd.grad(out, inputs, dout.contiguous())
        for x, y in zip(given, dense):
            torch.testing.assert_close(x, y, atol=2e-2, rtol=0)  # atomic additions come in any order


@pytest.mark.parametrize("backend", FAST)
def test_ring_steps(backend: str) -> None:
    """Two blocks of keys: the first seen in full, the second causally, as the second rank of a ring meets them."""
    q, dout = draw(1, 512, 8, 128), draw(1, 512, 8, 128, seed=3)
    k, v = (draw(1, 1024, 2, 128, seed=i) for i in (1, 2))
    served(backend, q, k[:, 512:], True)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = attention_reference(*exact, causal=True)
    true_grads = torch.autograd.grad(true_out, exact, dout.double())
    blocks = [(slice(0, 512), False), (slice(512, None), True)]
    parts = [attention_forward(q, k[:, s], v[:, s], causal=causal, backend=backend) for s, causal in blocks]
    out, lse = merge_attention(*parts[0], *parts[1])
    near(out, true_out, q.dtype)
    torch.testing.assert_close(lse.double(), true_lse, atol=1e-4, rtol=1e-4)
    grads = [
        attention_backward(dout, q, k[:, s], v[:, s], out.to(q.dtype), lse, causal=causal, backend=backend)
        for s, causal in blocks
    ]
    near(grads[0][0].float() + grads[1][0].float(), true_grads[0], q.dtype)
    for i in (1, 2):
        near(torch.cat([grads[0][i], grads[1][i]], 1), true_grads[i], q.dtype)


@pytest.mark.parametrize("backend", FAST)
def test_compile_fullgraph_and_graph_replay(backend: str) -> None:
    q, k, v = (draw(2, 512, n, 64, seed=n).requires_grad_() for n in (8, 2, 2))
    served(backend, q, k, True)

    def step(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attention(q * 1.0, k, v, causal=True, backend=backend).float().square().sum()

    eager = torch.autograd.grad(step(q, k, v), (q, k, v))
    compiled = torch.compile(step, fullgraph=True)
    for x, y in zip(torch.autograd.grad(compiled(q, k, v), (q, k, v)), eager):
        torch.testing.assert_close(x, y, atol=3e-2, rtol=2e-2)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grads = torch.autograd.grad(step(q, k, v), (q, k, v))
    with torch.no_grad():
        q.copy_(draw(2, 512, 8, 64, seed=11))
    graph.replay()
    for x, y in zip(grads, torch.autograd.grad(step(q, k, v), (q, k, v))):
        torch.testing.assert_close(x, y, atol=3e-2, rtol=2e-2)


def test_opcheck() -> None:
    q, k, v = (draw(1, 128, n, 64, seed=n).requires_grad_() for n in (4, 2, 2))
    torch.library.opcheck(
        torch.ops.llama_kernels.attention_forward, (q, k, v, None, None, True, None, None, None, "triton"),
        test_utils=["test_schema", "test_autograd_registration", "test_faketensor"],
    )  # fmt: skip


def test_rows_12_13_14_beyond_two_to_the_31_elements() -> None:
    """The last document lies behind element 2^31 of every tensor; it must equal the same document alone."""
    heads, width, document = 64, 128, 1024
    count = 2**31 // (heads * width * document) + 1
    total = count * document
    torch.manual_seed(0)
    q, k, v, dout = (torch.empty(total, heads, width, device="cuda", dtype=torch.bfloat16).normal_() for _ in range(4))
    assert q.numel() > 2**31
    cuts = torch.arange(count + 1, device="cuda", dtype=torch.int32) * document
    how = {"causal": True, "backend": "triton"}
    out, lse = attention_forward(q, k, v, cu_seqlens_q=cuts, cu_seqlens_k=cuts, **how)
    grads = attention_backward(dout, q, k, v, out, lse, cu_seqlens_q=cuts, cu_seqlens_k=cuts, **how)
    last = [x[None, -document:] for x in (dout, q, k, v)]
    alone, alone_lse = attention_forward(*last[1:], **how)
    torch.testing.assert_close(out[-document:], alone[0])
    torch.testing.assert_close(lse[:, -document:], alone_lse[0])
    for x, y in zip(grads, attention_backward(*last, alone, alone_lse, **how)):
        torch.testing.assert_close(x[-document:], y[0])


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_row_24_tensors_on_a_device_that_is_not_current() -> None:
    q, k, v = (draw(1, 64, 2, 64, seed=i) for i in range(3))
    there = attention(*(x.to("cuda:1") for x in (q, k, v)), causal=True, backend="triton")
    torch.testing.assert_close(there.to("cuda:0"), attention(q, k, v, causal=True, backend="triton"))
