"""Products of bytes by the GPU's four-way integer dot product: how the int8 and int4 kernels keep up with memory.

Turning each weight into a float and multiplying takes four to five instructions for a weight, and at batch 1 that is
slower than reading it. `dp4a` adds four products of bytes in one. x becomes fixed point for it: within a group of 128
inputs, x = s · (256 · high + low), s = max|x| / 32,512, with high and low signed bytes. Rounding x so costs 2⁻¹⁶ of the
group's largest magnitude; bfloat16 itself costs 2⁻⁹ of each.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

import torch
from torch import Tensor

from llama_kernels.compat import tl, triton


def has_dp4a(x: Tensor) -> bool:
    """Whether kernels on x may use the instruction; elsewhere (interpreter, AMD) shifts and products say the same."""
    return x.is_cuda and torch.version.cuda is not None


@triton.jit
def dot4(a, b, c, ASM: tl.constexpr):
    """c + Σ aᵢ · bᵢ over the four signed bytes of int32 a and b."""
    if ASM:
        return tl.inline_asm_elementwise(
            "dp4a.s32.s32 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        c += ((a << 24) >> 24) * ((b << 24) >> 24) + ((a << 16) >> 24) * ((b << 16) >> 24)
        return c + ((a << 8) >> 24) * ((b << 8) >> 24) + (a >> 24) * (b >> 24)


@triton.jit
def fixed_point(x, amax):
    """The integer round(x · 32,512 / amax) in the low 16 bits: added to 1.5 · 2²³, a float is its own integer."""
    inverse = 32512.0 / tl.where(amax > 0.0, amax, 32512.0)
    return (x * inverse + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def high_and_low_bytes(a, b, c, d):
    """Two int32 tensors of four bytes each, from four tensors of `fixed_point`: v = 256 · high + low, both signed."""
    low = (a & 255) | ((b & 255) << 8) | ((c & 255) << 16) | (d << 24)
    a, b, c, d = a + 128, b + 128, c + 128, d + 128  # low bytes are −128 … 127
    high = ((a >> 8) & 255) | (b & 0xFF00) | ((c & 0xFF00) << 8) | ((d & 0xFF00) << 16)
    return high, low
