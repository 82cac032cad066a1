"""Output head and cross-entropy in one operation: the full logits never exist.

Tokens go through in chunks. A chunk's logits come from one matrix product; `cross_entropy_` turns them in place into
their gradient; two more products give dhidden and add to dweight. So a training step makes three products, as if
logits had been stored, and holds one chunk of logits. The chunk is as large as a fixed budget allows (about 1 GB on a
GPU): every chunk reads and writes dweight once, and thin products are slow.

The gradient is made in the forward pass for an incoming gradient of 1 and scaled in the backward pass; "mean" is
folded into that scale, so float16 never holds p/n. For "none" each row has its own incoming gradient: backward makes
the logits again. dweight is rounded to the weight's dtype once per chunk, or kept in float32 (`float32_weight_grad`).

Shapes: T tokens, E hidden, V vocabulary.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels.compat import cdiv, device_guard, runs_triton, tl, triton
from llama_kernels.cross_entropy import cross_entropy_
from llama_kernels.reference import wide

GPU_CHUNK_BYTES = 1_100_000_000  # of logits; 8192 tokens of a 128,256 vocabulary in bfloat16 take two chunks
CPU_CHUNK_BYTES = 32_000_000


@triton.jit
def _scale_kernel(x_ptr, factor_ptr, out_ptr, count, BLOCK: tl.constexpr):
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at, mask=at < count, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, (x * tl.load(factor_ptr)).to(out_ptr.dtype.element_ty), mask=at < count)


def _scaled(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    """x · factor with a float32 factor on the device: torch would round a 0-d factor to x's dtype first."""
    if not runs_triton(x):
        return (x.to(wide(x.dtype)) * factor).to(dtype)
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    if x.numel():
        with device_guard(x):
            _scale_kernel[(cdiv(x.numel(), 4096),)](x, factor, out, x.numel(), BLOCK=4096, num_warps=8)
    return out


def _chunk_rows(rows: int, row_bytes: int, budget: int) -> int:
    """Tokens per chunk: the fewest chunks within the budget, of equal size, in multiples of a GEMM tile."""
    chunks = cdiv(rows * row_bytes, budget)
    return min(rows, cdiv(cdiv(rows, chunks), 128) * 128)


def _run(
    hidden: Tensor, weight: Tensor, targets: Tensor, scales: Tensor | None, ignore_index: int, z_loss: float,
    grad_hidden: bool, grad_weight: bool, float32_weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Losses (T,), and the gradients of their sum (each row times its scale); empty where not asked for."""
    rows, vocabulary = hidden.shape[0], weight.shape[0]
    losses = hidden.new_empty(rows, dtype=wide(hidden.dtype))
    d_hidden = hidden.new_empty(hidden.shape if grad_hidden else (0,))
    acc_dtype = wide(weight.dtype) if float32_weight_grad else weight.dtype
    d_weight = weight.new_empty(weight.shape if grad_weight else (0,), dtype=acc_dtype)
    if not rows:
        return losses, d_hidden, d_weight.zero_()
    # Rows of the buffer start at multiples of 128 bytes: 16-byte accesses and aligned products for odd vocabularies.
    stride = cdiv(vocabulary, 64) * 64
    budget = GPU_CHUNK_BYTES if hidden.is_cuda else CPU_CHUNK_BYTES
    size = _chunk_rows(rows, stride * hidden.element_size(), budget)
    buffer = hidden.new_empty(size, stride)
    for start in range(0, rows, size):
        x, y = hidden[start : start + size], targets[start : start + size]
        logits = torch.mm(x, weight.T, out=buffer[: len(x), :vocabulary])
        scale = None if scales is None else scales[start : start + size]
        cross_entropy_(logits, y, losses[start : start + size], scale, ignore_index, z_loss, grad_hidden or grad_weight)
        if grad_hidden:
            torch.mm(logits, weight, out=d_hidden[start : start + size])
        if grad_weight:
            _accumulate_(d_weight, logits, x, first=start == 0)
    return losses, d_hidden, d_weight


def _accumulate_(d_weight: Tensor, d_logits: Tensor, x: Tensor, first: bool) -> None:
    """d_weight (+)= d_logitsᵀ · x, in d_weight's dtype, the sum of each product in float32."""
    left = d_logits.T
    if d_weight.dtype == x.dtype:
        torch.mm(left, x, out=d_weight) if first else d_weight.addmm_(left, x)
    elif x.is_cuda:
        if first:
            torch.mm(left, x, out_dtype=d_weight.dtype, out=d_weight)
        else:
            torch.addmm(d_weight, left, x, out_dtype=d_weight.dtype, out=d_weight)
    else:
        product = left.to(d_weight.dtype) @ x.to(d_weight.dtype)
        d_weight.copy_(product) if first else d_weight.add_(product)


@torch.library.custom_op("llama_kernels::linear_cross_entropy", mutates_args=())
def _reduced(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, mean: bool, z_loss: float,
    grad_hidden: bool, grad_weight: bool, float32_weight_grad: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    losses, d_hidden, d_weight = _run(
        hidden, weight, targets, None, ignore_index, z_loss, grad_hidden, grad_weight, float32_weight_grad
    )
    share = 1.0 / (targets != ignore_index).sum().clamp(min=1).to(losses.dtype) if mean else losses.new_ones(())
    return losses.sum() * share, share, d_hidden, d_weight


@_reduced.register_fake
def _(hidden, weight, targets, ignore_index, mean, z_loss, grad_hidden, grad_weight, float32_weight_grad):
    scalar = hidden.new_empty((), dtype=wide(hidden.dtype))
    d_weight_dtype = wide(weight.dtype) if float32_weight_grad else weight.dtype
    return (
        scalar,
        torch.empty_like(scalar),
        hidden.new_empty(hidden.shape if grad_hidden else (0,)),
        weight.new_empty(weight.shape if grad_weight else (0,), dtype=d_weight_dtype),
    )


@torch.library.custom_op("llama_kernels::scaled", mutates_args=())
def _scaled_op(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return _scaled(x, factor, dtype)


@_scaled_op.register_fake
def _(x: Tensor, factor: Tensor, dtype: torch.dtype) -> Tensor:
    return x.new_empty(x.shape, dtype=dtype)


def _save_reduced(ctx, inputs, output) -> None:
    ctx.set_materialize_grads(False)  # else torch fills gradients of the saved gradients with zeros
    _, share, d_hidden, d_weight = output
    ctx.save_for_backward(share, d_hidden, d_weight)
    ctx.weight_dtype = inputs[1].dtype
    ctx.grad_hidden, ctx.grad_weight = inputs[6], inputs[7]


def _backward_reduced(ctx, d_loss, *_unused):
    if d_loss is None:
        return (None,) * 9
    share, d_hidden, d_weight = ctx.saved_tensors
    factor = d_loss * share
    return (
        _scaled_op(d_hidden, factor, d_hidden.dtype) if ctx.grad_hidden else None,
        _scaled_op(d_weight, factor, ctx.weight_dtype) if ctx.grad_weight else None,
        *(None,) * 7,
    )


_reduced.register_autograd(_backward_reduced, setup_context=_save_reduced)


@torch.library.custom_op("llama_kernels::linear_cross_entropy_rows", mutates_args=())
def _rows(
    hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float, float32_weight_grad: bool
) -> Tensor:
    return _run(hidden, weight, targets, None, ignore_index, z_loss, False, False, False)[0]


@_rows.register_fake
def _(hidden, weight, targets, ignore_index, z_loss, float32_weight_grad):
    return hidden.new_empty(hidden.shape[0], dtype=wide(hidden.dtype))


@torch.library.custom_op("llama_kernels::linear_cross_entropy_rows_backward", mutates_args=())
def _rows_backward(
    d_losses: Tensor, hidden: Tensor, weight: Tensor, targets: Tensor, ignore_index: int, z_loss: float,
    float32_weight_grad: bool,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    scales = d_losses.contiguous()  # an expanded gradient has stride 0 (#20)
    _, d_hidden, d_weight = _run(hidden, weight, targets, scales, ignore_index, z_loss, True, True, float32_weight_grad)
    return d_hidden, d_weight.to(weight.dtype)


@_rows_backward.register_fake
def _(d_losses, hidden, weight, targets, ignore_index, z_loss, float32_weight_grad):
    return hidden.new_empty(hidden.shape), weight.new_empty(weight.shape)


def _save_rows(ctx, inputs, output) -> None:
    hidden, weight, targets, *ctx.rest = inputs
    ctx.save_for_backward(hidden, weight, targets)


def _backward_rows(ctx, d_losses):
    return *_rows_backward(d_losses, *ctx.saved_tensors, *ctx.rest), None, None, None, None


_rows.register_autograd(_backward_rows, setup_context=_save_rows)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    z_loss: float = 0.0,
    float32_weight_grad: bool = False,
) -> Tensor:
    """Cross-entropy of softmax(hidden · weightᵀ) against targets, without ever holding all logits.

    Args:
        hidden: (..., E).
        weight: (V, E), the output head; taken in hidden's dtype.
        targets: (...), int64; `ignore_index` rows count for nothing.
        reduction: "mean" over the counted rows, "sum", or "none" (zeros at ignored rows; costs a fourth product).
        z_loss: weight of log²Z added per row.
        float32_weight_grad: sum the weight's gradient over chunks in float32, for twice its memory. Otherwise it is
            rounded to the weight's dtype once per chunk of about 1 GB of logits. float16 always uses float32.

    Returns:
        A scalar, or (...) for "none", in float32 (float64 for float64). With every row ignored it is 0, with zero
        gradients. On a GPU a target outside [0, V) makes the loss and the gradients NaN, without a synchronisation.

    Raises:
        ValueError: shapes that do not fit, an unknown reduction, or, on a CPU, a target outside [0, V).
    """
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction is {reduction!r}; it must be 'mean', 'sum' or 'none'")
    if weight.dim() != 2 or hidden.shape[:-1] != targets.shape or hidden.shape[-1] != weight.shape[-1]:
        raise ValueError(
            f"hidden {tuple(hidden.shape)}, weight {tuple(weight.shape)} and targets {tuple(targets.shape)} do not "
            "fit: (..., E), (V, E), (...) are wanted"
        )
    if targets.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = targets[(targets != ignore_index) & ((targets < 0) | (targets >= len(weight)))]
        if len(wrong):
            raise ValueError(
                f"target {int(wrong[0])} is outside [0, {len(weight)}) (rows with {ignore_index} are ignored)"
            )
    rows, labels = hidden.reshape(-1, hidden.shape[-1]), targets.reshape(-1).contiguous()
    head = weight.to(hidden.dtype)  # under autocast the head is still float32
    float32_weight_grad = float32_weight_grad or hidden.dtype == torch.float16
    if reduction == "none":
        losses: Tensor = _rows(rows, head, labels, ignore_index, z_loss, float32_weight_grad)
        return losses.reshape(targets.shape)
    learning = torch.is_grad_enabled()
    loss: Tensor = _reduced(
        rows, head, labels, ignore_index, reduction == "mean", z_loss,
        learning and hidden.requires_grad, learning and weight.requires_grad, float32_weight_grad,
    )[0]  # fmt: skip
    return loss
