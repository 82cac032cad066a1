"""The adapters of flash-attn 2 and flash-attn-4: every argument lands where their functions expect it.

Neither package is here. Stand-ins have the real functions' parameter lists, in their order (flash-attn 2.8
flash_attn_interface.py, flash-attn-4 4.0.0b36 cute/interface.py), and compute with float64 attention from what they
receive, so that a swapped or forgotten argument shows as a wrong number. flash-attn 2 itself was never run by us: it
ships as source only.
"""

import inspect
import math

import pytest
import torch
from torch import Tensor

from llama_kernels import flash_attention
from llama_kernels.attention_backends import choose
from llama_kernels.attention_call import describe
from llama_kernels.reference_attention import attention_reference, plain_backward


def reference_forward(q, k, v, scale, causal, cu_q=None, cu_k=None) -> tuple[Tensor, Tensor]:
    assert scale == pytest.approx(q.shape[-1] ** -0.5)
    return attention_reference(q, k, v, causal=causal, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k)


def reference_backward(dout, q, k, v, out, lse, causal, cu_q=None, cu_k=None) -> tuple[Tensor, ...]:
    return plain_backward(dout, q, k, v, out, lse, describe(q, k, cu_q, cu_k, causal, None, None, None), cu_q, cu_k)


def plus_infinity(lse: Tensor) -> Tensor:
    return lse.masked_fill(lse == -math.inf, math.inf)


def minus_infinity(lse: Tensor) -> Tensor:
    assert not (lse == -math.inf).any(), "flash-attn 2 marks empty rows by +inf"
    return lse.masked_fill(lse == math.inf, -math.inf)


class Flash2:
    """flash_attn.flash_attn_interface, version 2.8."""

    @staticmethod
    def _flash_attn_forward(
        q, k, v, dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes,
        return_softmax,
    ):  # fmt: skip
        assert (dropout_p, softcap, alibi_slopes, return_softmax) == (0.0, 0.0, None, False)
        assert (window_size_left, window_size_right) == (-1, -1)
        out, lse = reference_forward(q, k, v, softmax_scale, causal)
        return out, plus_infinity(lse), torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_varlen_forward(
        q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, dropout_p, softmax_scale, causal,
        window_size_left=-1, window_size_right=-1, softcap=0.0, alibi_slopes=None, return_softmax=False,
        block_table=None, leftpad_k=None, seqused_k=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, window_size_left, window_size_right) == (0.0, 0.0, -1, -1)
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        assert cu_seqlens_k.diff().max() <= max_seqlen_k
        out, lse = reference_forward(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k)
        return out, plus_infinity(lse), torch.empty(0), torch.empty(2)

    @staticmethod
    def _flash_attn_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, dropout_p, softmax_scale, causal, window_size_left,
        window_size_right, softcap, alibi_slopes, deterministic, rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, window_size_left, window_size_right) == (0.0, 0.0, -1, -1)
        for to, grad in zip((dq, dk, dv), reference_backward(dout, q, k, v, out, minus_infinity(softmax_lse), causal)):
            to.copy_(grad)
        return torch.empty(0)

    @staticmethod
    def _flash_attn_varlen_backward(
        dout, q, k, v, out, softmax_lse, dq, dk, dv, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k,
        dropout_p, softmax_scale, causal, window_size_left, window_size_right, softcap, alibi_slopes, deterministic,
        rng_state=None,
    ):  # fmt: skip
        assert (dropout_p, softcap, window_size_left, window_size_right) == (0.0, 0.0, -1, -1)
        assert cu_seqlens_q.diff().max() <= max_seqlen_q
        lse = minus_infinity(softmax_lse)
        grads = reference_backward(dout, q, k, v, out, lse, causal, cu_seqlens_q, cu_seqlens_k)
        for to, grad in zip((dq, dk, dv), grads):
            to.copy_(grad)
        return torch.empty(0)


class Flash4:
    """flash_attn.cute.interface, 4.0.0b36; the parameters between those we pass are left out, none is positional."""

    @staticmethod
    def _flash_attn_fwd(
        q, k, v, qv=None, cu_seqlens_q=None, cu_seqlens_k=None, seqused_q=None, seqused_k=None, max_seqlen_q=None,
        max_seqlen_k=None, min_seqlen_k=None, page_table=None, softmax_scale=None, causal=False, softcap=None,
        window_size_left=None, window_size_right=None, return_lse=False,
    ):  # fmt: skip
        assert return_lse
        assert (max_seqlen_q is None) == (cu_seqlens_q is None)
        out, lse = reference_forward(q, k, v, softmax_scale, causal, cu_seqlens_q, cu_seqlens_k)
        return out, lse, None, None, None

    @staticmethod
    def _flash_attn_bwd(
        q, k, v, out, dout, lse, softmax_scale=None, causal=False, softcap=0.0, window_size_left=None,
        window_size_right=None, cu_seqlens_q=None, cu_seqlens_k=None, max_seqlen_q=None, max_seqlen_k=None,
    ):  # fmt: skip
        assert softmax_scale == pytest.approx(q.shape[-1] ** -0.5)
        return reference_backward(dout, q, k, v, out, lse, causal, cu_seqlens_q, cu_seqlens_k)


@pytest.mark.parametrize("version", [2, 4])
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("packed", [True, False])
def test_arguments_land_where_they_belong(version: int, causal: bool, packed: bool) -> None:
    torch.manual_seed(0)
    library = {2: Flash2, 4: Flash4}[version]
    forward = getattr(flash_attention, f"flash{version}_forward")
    backward = getattr(flash_attention, f"flash{version}_backward")
    q, k, v, dout = (torch.randn(2, n, heads, 16).double() for n, heads in ((9, 4), (7, 2), (7, 2), (9, 4)))
    cuts: tuple[Tensor | None, Tensor | None] = (None, None)
    if packed:
        q, k, v, dout = (x[0] for x in (q, k, v, dout))
        cuts = (torch.tensor([0, 5, 8], dtype=torch.int32), torch.tensor([0, 2, 6], dtype=torch.int32))  # with tails
    call = describe(q, k, *cuts, causal, None, None, None)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    true_out, true_lse = attention_reference(*leaves, causal=causal, cu_seqlens_q=cuts[0], cu_seqlens_k=cuts[1])
    true_grads = torch.autograd.grad(true_out, leaves, dout)
    out, lse = forward(q, k, v, call, *cuts, library=library)
    torch.testing.assert_close(out, true_out)
    torch.testing.assert_close(lse, true_lse)
    for x, true in zip(backward(dout, q, k, v, out, lse, call, *cuts, library=library), true_grads):
        torch.testing.assert_close(x, true)


def test_stand_ins_reject_what_the_packages_would() -> None:
    """A stand-in that took anything would prove nothing."""
    for library in (Flash2, Flash4):
        for function in (x for name, x in vars(library).items() if name.startswith("_flash")):
            kinds = {p.kind for p in inspect.signature(function.__func__).parameters.values()}
            assert kinds == {inspect.Parameter.POSITIONAL_OR_KEYWORD}


def test_absent_packages_are_named() -> None:
    q = torch.randn(1, 4, 2, 16, dtype=torch.bfloat16)
    call = describe(q, q, None, None, True, None, None, None)
    for name, module, package in (
        ("flash2", flash_attention.FLASH2, "flash-attn"),
        ("flash4", flash_attention.FLASH4, "flash-attn-4"),
    ):
        if not flash_attention.installed(module):
            with pytest.raises(ValueError, match=f"{name}: the package {package}"):
                choose(call, name)
    assert choose(call, "flash").name == "flash_cpu"
