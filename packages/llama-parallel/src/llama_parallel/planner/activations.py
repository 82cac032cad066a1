"""Bytes that a layer's forward pass leaves for its backward pass: Korthikanti et al. 2022, arXiv:2205.05198, section 4,
counted anew for what this model stores.

They count 34 E + 5 a S bytes for each token of a GPT layer: dropout masks, scores, GELU. Here there is no dropout, no
score is kept (attention is fused), queries and keys have heads of their own numbers, and the feed-forward is gated.
With c bytes to an element, E hidden, F feed-forward, Q = H·D widths of queries and K' = K·D of keys, for each token:

    kept by                          none                       selective                full
    the layer's input x              c·E   (first norm)         c·E                      c·E
    q, k, v products                 c·E   (their input)        c·(Q + 2 K') (results)
    attention                        c·(2 Q + 2 K') + 4 H       c·Q + 4 H                           q, k, v, out, LSE
    o product                              (its input is out)   c·E (result)
    second norm                      c·E   (x + o)
    gate, up products                c·E   (their input)        c·2 F  (results)
    SwiGLU                           c·2 F
    down product                     c·F   (its input) or 0 *   c·E (result)

* 0 with llama_kernels, where neither tp nor a zero-bubble schedule has the down product its own way: the backward pass
  makes it again from gate and up (`swiglu_linear`).

With tp ranks, widths of heads and F are each rank's own, and E, kept for a rank's share of the sequence, is divided
too; but selective checkpointing also keeps the row products' sums over ranks, beside the whole partial results.
"""

from __future__ import annotations

from dataclasses import dataclass

from .comm_volume import kv_heads_of_rank
from .work import Work


@dataclass(frozen=True)
class Widths:
    """Bytes of one token on a rank, by what they belong to."""

    stream: float
    """Residual stream: c·E, this rank's share of the sequence counted as so much less of each token."""
    whole: float
    """c·E of the whole sequence."""
    queries: float
    keys: float
    lse: float
    inner: float
    """c·F."""
    norm_extra: float
    """What the plain norm keeps more than its input."""
    inner_extra: float
    """What is kept more than gate and up: SwiGLU's result, for the product that reads it, and the plain one's
    silu(gate)."""


def widths(work: Work) -> Widths:
    """Of this work's model and layout."""
    model, tp, compute = work.model, work.layout.tp, work.bytes_of.compute
    heads = model.num_attention_heads // tp
    whole = float(compute * model.hidden_size)
    inner = compute * model.intermediate_size / tp
    # In 16 bits the plain norm keeps x and its normalised form in float32 instead of x; in 32, one rstd for each row.
    extra = (8 - compute) * model.hidden_size / work.stream_ranks if compute == 2 else 0.0
    again = tp == 1 and not (work.layout.pp > 1 and work.schedule == "zero_bubble")
    return Widths(
        stream=whole / work.stream_ranks,
        whole=whole,
        queries=float(compute * heads * model.head_width),
        keys=float(compute * kv_heads_of_rank(model, tp) * model.head_width),
        lse=float(max(4, compute) * heads),
        inner=inner,
        norm_extra=0.0 if work.kernels else extra,
        inner_extra=(0.0 if again else inner) if work.kernels else 2 * inner,
    )


def kept_by_layer(work: Work, checkpointing: str | None = None) -> float:
    """Bytes that a layer keeps of one micro-batch between its passes."""
    w, mode = widths(work), work.checkpointing if checkpointing is None else checkpointing
    if mode == "full":
        token = w.stream
    elif mode == "selective":
        sums = 2 * w.stream if work.layout.tp > 1 else 0.0
        token = w.stream + (w.queries + 2 * w.keys) + (w.queries + w.lse) + 2 * w.whole + 2 * w.inner + sums
    else:
        attention = 2 * w.queries + 2 * w.keys + w.lse
        token = 4 * w.stream + attention + 2 * w.inner + 2 * w.norm_extra + w.inner_extra
    return token * work.tokens


def backward_of_layer(work: Work) -> float:
    """Bytes that come on top while one layer runs backward: what is recomputed, and gradients of activations.

    The widest place is SwiGLU's: the gradient of its result in, those of gate and up out (3 F), beside the residual
    stream's own. With checkpointing everything that was not kept exists once more for this layer.
    """
    w = widths(work)
    again = max(0.0, kept_by_layer(work, "none") - kept_by_layer(work)) if work.checkpointing != "none" else 0.0
    gathered = 2 * w.whole if work.layout.tp > 1 else 0.0  # column products' input, whole, in pieces and joined
    return again + (3 * w.inner + 2 * w.stream + gathered) * work.tokens
