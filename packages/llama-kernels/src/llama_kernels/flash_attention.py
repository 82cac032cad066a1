"""The flash-attn packages under our conventions: version 2 (`flash_attn`) and version 4 (`flash_attn.cute`).

Both are optional and imported at the first call. Their low-level functions are used, since a ring step needs a backward
that is given the whole row's output and log-sum-exp. Signatures: flash-attn 2.7 and later, flash-attn-4 4.0.0b36.
`library` stands in for the imported module in tests: version 2 ships as source only and was not run by us.
"""

from __future__ import annotations

import importlib
import importlib.util
from functools import cache
from typing import Any

import torch
from torch import Tensor

from llama_kernels.attention_call import AttentionCall

FLASH2 = "flash_attn.flash_attn_interface"
FLASH4 = "flash_attn.cute.interface"


@cache
def installed(module: str) -> bool:
    """Whether a module can be found; nothing of it is run beyond its parent packages."""
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def with_tails(cu_q: Tensor, cu_k: Tensor, call: AttentionCall) -> tuple[Tensor, Tensor]:
    """Bounds with two more documents: the unclaimed queries (which see no key), the unclaimed keys (seen by none).

    Without them these kernels leave the rows behind the last document unwritten.
    """
    end_q, end_k = (torch.full((1,), n, dtype=torch.int32, device=cu_q.device) for n in (call.seq_q, call.seq_k))
    return torch.cat([cu_q, end_q, end_q]), torch.cat([cu_k, cu_k[-1:], end_k])


def without_keys(lse: Tensor, call: AttentionCall) -> Tensor:
    """Rows without keys: +inf in FlashAttention-2 (softmax.h:180), -inf with us and in every merge. Its own inverse."""
    return torch.where(lse.isinf(), -lse, lse) if call.may_have_empty_rows else lse


def flash2_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    library: Any = None,
) -> tuple[Tensor, Tensor]:
    library = library or importlib.import_module(FLASH2)
    options = {
        "dropout_p": 0.0, "softmax_scale": call.scale, "causal": call.causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "return_softmax": False,
    }  # fmt: skip
    if cu_q is None or cu_k is None:
        out, lse, *_ = library._flash_attn_forward(q, k, v, **options)
    else:
        cu_q, cu_k = with_tails(cu_q, cu_k, call)
        out, lse, *_ = library._flash_attn_varlen_forward(q, k, v, cu_q, cu_k, call.max_q, call.max_k, **options)
    return out, without_keys(lse, call)


def flash2_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    library: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    library = library or importlib.import_module(FLASH2)
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    given = (dout, q, k, v, out, without_keys(lse, call), dq, dk, dv)
    options = {
        "dropout_p": 0.0, "softmax_scale": call.scale, "causal": call.causal, "window_size_left": -1,
        "window_size_right": -1, "softcap": 0.0, "alibi_slopes": None, "deterministic": False,
    }  # fmt: skip
    if cu_q is None or cu_k is None:
        library._flash_attn_backward(*given, **options)
    else:
        cu_q, cu_k = with_tails(cu_q, cu_k, call)
        library._flash_attn_varlen_backward(*given, cu_q, cu_k, call.max_q, call.max_k, **options)
    return dq, dk, dv


def _flash4_options(call: AttentionCall, cu_q: Tensor | None, cu_k: Tensor | None) -> dict[str, Any]:
    options: dict[str, Any] = {"softmax_scale": call.scale, "causal": call.causal}
    if cu_q is not None and cu_k is not None:
        cu_q, cu_k = with_tails(cu_q, cu_k, call)
        options |= {"cu_seqlens_q": cu_q, "cu_seqlens_k": cu_k, "max_seqlen_q": call.max_q, "max_seqlen_k": call.max_k}
    return options


def flash4_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    library: Any = None,
) -> tuple[Tensor, Tensor]:
    library = library or importlib.import_module(FLASH4)
    # Two results up to beta 18, four or five since; the first two have stayed.
    out, lse, *_ = library._flash_attn_fwd(q, k, v, return_lse=True, **_flash4_options(call, cu_q, cu_k))
    return out, lse  # -inf where there is no key (softmax.py), unlike version 2


def flash4_backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    call: AttentionCall,
    cu_q: Tensor | None,
    cu_k: Tensor | None,
    library: Any = None,
) -> tuple[Tensor, Tensor, Tensor]:
    library = library or importlib.import_module(FLASH4)
    dq, dk, dv, *_ = library._flash_attn_bwd(q, k, v, out, dout, lse, **_flash4_options(call, cu_q, cu_k))
    return dq, dk, dv
