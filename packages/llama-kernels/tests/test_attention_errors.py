"""What attention refuses, and that it says why."""

import pytest
import torch
from torch import Tensor

from llama_kernels.attention import attention, attention_backward
from llama_kernels.attention_backends import BACKENDS, attention_backends

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, device=DEVICE)


def bounds(*ends: int) -> Tensor:
    return torch.tensor(ends, dtype=torch.int32, device=DEVICE)


def test_named_backends_say_why_not() -> None:
    q, k, v = draw(1, 6, 2, 16), draw(1, 6, 2, 16), draw(1, 6, 2, 16)
    with pytest.raises(ValueError, match=r"'cudnn' cannot serve this call: cudnn: it "):
        attention(q, k, v, causal=True, backend="cudnn")
    with pytest.raises(ValueError, match=r"'flash4' cannot serve this call: flash4: "):
        attention(q, k, v, causal=True, backend="flash4")
    with pytest.raises(ValueError, match=r"backend 'fast' is unknown; choose one of None, 'sdpa', 'flash', 'flash4'"):
        attention(q, k, v, causal=True, backend="fast")
    with pytest.raises(ValueError, match=r"'sdpa' cannot serve this call: it has no log-sum-exp"):
        attention(q, k, v, causal=True, backend="sdpa", return_lse=True)
    with pytest.raises(ValueError, match=r"'sdpa' cannot serve this call: it has no q_offset=-2"):
        attention(q, k[:, :4], v[:, :4], causal=True, backend="sdpa")
    with pytest.raises(ValueError, match="no float64"):
        attention(q.double(), k.double(), v.double(), causal=True, backend="triton")
    assert set(attention_backends("cpu")) == set(BACKENDS)
    assert attention_backends("cpu")["plain"] is None
    assert attention_backends("cpu")["flash_cpu"] is None


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (1, 6, 3, 16), "v": (1, 6, 3, 16)}, "2 query heads are no multiple of 3"),
        ({"v": (1, 5, 2, 16)}, "must have one shape"),
        ({"k": (1, 6, 2, 8), "v": (1, 6, 2, 8)}, "head width is 16 in q and 8 in k"),
        ({"k": (2, 6, 2, 16), "v": (2, 6, 2, 16)}, "q has batch 1 and k has batch 2"),
        ({"q": (6, 2, 16)}, r"q has shape \(6, 2, 16\); expected \(B, S, H, D\)"),
        ({"q": (1, 6, 2, 320), "k": (1, 6, 2, 320), "v": (1, 6, 2, 320)}, "1 to 256"),
    ],
)
def test_shapes_that_do_not_fit(change: dict[str, tuple[int, ...]], message: str) -> None:
    shapes = {"q": (1, 6, 2, 16), "k": (1, 6, 2, 16), "v": (1, 6, 2, 16)} | change
    with pytest.raises(ValueError, match=message):
        attention(*(draw(*shape) for shape in shapes.values()), causal=True)


def test_document_bounds_that_do_not_fit() -> None:
    q, k, v = draw(6, 2, 16), draw(6, 2, 16), draw(6, 2, 16)
    with pytest.raises(ValueError, match="come together"):
        attention(q, k, v, causal=True, cu_seqlens_q=bounds(0, 6))
    with pytest.raises(ValueError, match="expected int32"):
        attention(q, k, v, causal=True, cu_seqlens_q=bounds(0, 6).long(), cu_seqlens_k=bounds(0, 6))
    with pytest.raises(ValueError, match="the same documents"):
        attention(q, k, v, causal=True, cu_seqlens_q=bounds(0, 6), cu_seqlens_k=bounds(0, 3, 6))
    if not CUDA:  # a GPU's numbers are not read
        for backend in ("plain", "flash_cpu", "triton"):
            with pytest.raises(ValueError, match=r"cu_seqlens_q = \[0, 4, 3\] must start at 0"):
                attention(
                    q, k, v, causal=True, cu_seqlens_q=bounds(0, 4, 3), cu_seqlens_k=bounds(0, 3, 6), backend=backend
                )


def test_what_a_ring_step_refuses() -> None:
    q, lse = draw(1, 6, 2, 16), draw(1, 2, 6)
    with pytest.raises(ValueError, match=r"dout is torch\.float32 \(1, 5, 2, 16\); expected"):
        attention_backward(q[:, :5], q, q, q, q, lse, causal=True)
    with pytest.raises(ValueError, match=r"lse is torch\.float32 \(1, 6, 2\); expected torch\.float32 \(1, 2, 6\)"):
        attention_backward(q, q, q, q, q, lse.transpose(1, 2), causal=True)
