"""merge_attention against the attention over all keys at once."""

import pytest
import torch

from llama_kernels.merge import merge_attention
from llama_kernels.reference_attention import attention_reference


@pytest.mark.parametrize("cut", [0, 1, 5, 12])
def test_two_parts_are_the_whole(cut: int) -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 7, 4, 8), torch.randn(2, 12, 2, 8), torch.randn(2, 12, 2, 8)
    parts = [attention_reference(q, k[:, keys], v[:, keys], causal=False) for keys in (slice(cut), slice(cut, None))]
    out, lse = merge_attention(*parts[0], *parts[1])
    whole, whole_lse = attention_reference(q, k, v, causal=False)
    torch.testing.assert_close(out, whole, atol=1e-6, rtol=0)
    torch.testing.assert_close(lse, whole_lse, atol=1e-6, rtol=0)


def test_packed_layout_and_half_inputs() -> None:
    torch.manual_seed(1)
    out_a, out_b = torch.randn(5, 3, 8).bfloat16(), torch.randn(5, 3, 8).bfloat16()
    lse_a, lse_b = torch.randn(3, 5), torch.randn(3, 5)
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out.dtype == lse.dtype == torch.float32  # row 29: nothing is rounded between two merges
    share = torch.sigmoid(lse_a - lse_b).T[..., None]
    torch.testing.assert_close(out, share * out_a.float() + (1 - share) * out_b.float())
    torch.testing.assert_close(lse, torch.logaddexp(lse_a, lse_b))


def test_parts_without_keys() -> None:
    """-inf on one side leaves the other, on both sides an empty row; gradients stay finite."""
    none = float("-inf")
    lse_a = torch.tensor([[none, 0.5, none]], requires_grad=True)
    lse_b = torch.tensor([[1.5, none, none]], requires_grad=True)
    out_a = torch.tensor([0.0, 2.0, 0.0]).view(3, 1, 1).requires_grad_()
    out_b = torch.tensor([3.0, 0.0, 0.0]).view(3, 1, 1).requires_grad_()
    out, lse = merge_attention(out_a, lse_a, out_b, lse_b)
    assert out.flatten().tolist() == [3.0, 2.0, 0.0]
    assert lse.flatten().tolist() == [1.5, 0.5, none]
    for grad in torch.autograd.grad(out.sum() + lse[lse.isfinite()].sum(), (out_a, lse_a, out_b, lse_b)):
        assert grad.isfinite().all()


def test_row_28_far_apart_and_huge() -> None:
    for a, b in ((1000.0, -1000.0), (-1000.0, 1000.0), (1e4, 1e4), (-1e4, -1e4)):
        out, lse = merge_attention(
            torch.full((1, 1, 1), 1.0), torch.tensor([[a]]), torch.full((1, 1, 1), 3.0), torch.tensor([[b]])
        )
        expected = 1.0 if a > b else 3.0 if b > a else 2.0
        assert out.item() == expected
        assert abs(lse.item() - max(a, b)) < 1.0


def test_shapes_that_do_not_fit() -> None:
    out, lse = torch.zeros(2, 5, 4, 8), torch.zeros(2, 4, 5)
    with pytest.raises(ValueError, match="parts differ"):
        merge_attention(out, lse, out[:, :3], lse)
    with pytest.raises(ValueError, match="heads before rows"):
        merge_attention(out, lse.transpose(1, 2), out, lse.transpose(1, 2))
