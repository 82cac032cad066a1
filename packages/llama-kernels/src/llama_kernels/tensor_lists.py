"""One launch for many tensors of different sizes: what an optimizer step does to all parameters.

A model has hundreds of parameters, and a launch for each costs the host more time than a small one takes on the GPU. So
each program gets a stretch of `chunk` elements of one tensor. A table on the GPU holds the tensors' addresses, another
says to which tensor a program belongs; both are made anew for each call, since gradients lie elsewhere every time.
"""

# mypy: disable-error-code="no-untyped-def,untyped-decorator"

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_kernels.compat import cdiv, device_guard, runs_triton, tl, triton

BLOCK = 1024  # elements at once: 16 bytes of each of 128 threads in 16 bits
_SUM_CHUNK, _NORM_CHUNK = 8 * BLOCK, 32 * BLOCK


@dataclass(frozen=True)
class Table:
    """Where the tensors are, and which program works on what."""

    rows: Tensor
    """(tensors, lists + 2) int64: an address in each list, number of elements, first program."""
    owner: Tensor
    """(programs,) int32: the tensor that a program belongs to."""

    @property
    def programs(self) -> int:
        return len(self.owner)


def tabulate(lists: Sequence[Sequence[Tensor]], chunk: int) -> Table:
    """A table of lists of tensors, the n-th of each of one shape, all of a list of one dtype.

    Raises:
        ValueError: no tensors, shapes or dtypes that differ, or a tensor that no kernel can take: not dense, not at a
            multiple of 16 bytes, float64, or on a device without Triton.
    """
    first = lists[0]
    if not first:
        raise ValueError("there are no tensors")
    for tensors in lists:
        for tensor, other in zip(tensors, first, strict=True):
            if tensor.shape != other.shape or tensor.dtype != tensors[0].dtype:
                raise ValueError(
                    f"tensors {tuple(tensor.shape)} {tensor.dtype} and {tuple(other.shape)} {tensors[0].dtype} must be "
                    "alike"
                )
            if not tensor.is_contiguous() or tensor.data_ptr() % 16:
                raise ValueError(f"a tensor {tuple(tensor.shape)} is not contiguous at a multiple of 16 bytes")
            if not runs_triton(tensor):
                raise ValueError(f"Triton and float32 or 16 bits are needed, not {tensor.dtype} on {tensor.device}")
    device = first[0].device
    counts = [tensor.numel() for tensor in first]
    programs = [cdiv(count, chunk) for count in counts]
    begin, rows = 0, []
    for index, (count, number) in enumerate(zip(counts, programs, strict=True)):
        rows.append([*(tensors[index].data_ptr() for tensors in lists), count, begin])
        begin += number
    on_host = torch.tensor(rows, dtype=torch.int64)
    table = on_host.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else on_host
    starts = table[:, -1].contiguous()
    # The last tensor that begins at or before a program; one without elements begins where the next does.
    owner = torch.searchsorted(starts, torch.arange(begin, device=device), right=True, out_int32=True) - 1
    return Table(table, owner)


def tl_dtype(tensors: Sequence[Tensor]):
    """Triton's name of a list's dtype."""
    return {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}[tensors[0].dtype]


@triton.jit
def place(table_ptr, owner_ptr, LISTS: tl.constexpr, CHUNK: tl.constexpr):
    """(row of the table, elements of the tensor, first element of this program)."""
    owner = tl.load(owner_ptr + tl.program_id(0))
    row_ptr = table_ptr + owner * (LISTS + 2)
    count = tl.load(row_ptr + LISTS)
    first = (tl.program_id(0) - tl.load(row_ptr + LISTS + 1)) * CHUNK
    return row_ptr, owner, count, first


@triton.jit
def pointer(row_ptr, LIST: tl.constexpr, DTYPE: tl.constexpr):
    """To the tensor of a list; all are at multiples of 16 bytes."""
    return tl.multiple_of(tl.load(row_ptr + LIST).to(tl.pointer_type(DTYPE)), 16)


@triton.jit
def load(ptr, at, count, WHOLE: tl.constexpr):
    """Values in float32; a whole tile has no mask, so that it is read 16 bytes at a time."""
    if WHOLE:
        x = tl.load(ptr + at)
    else:
        x = tl.load(ptr + at, mask=at < count, other=0.0)
    return x.to(tl.float32)


@triton.jit
def store(ptr, at, x, count, WHOLE: tl.constexpr):
    """Rounded to what the pointer is of."""
    if WHOLE:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty))
    else:
        tl.store(ptr + at, x.to(ptr.dtype.element_ty), mask=at < count)


@triton.jit
def _squares_kernel(table_ptr, owner_ptr, partial_ptr, DTYPE: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    row_ptr, _owner, count, first = place(table_ptr, owner_ptr, 1, CHUNK)
    x_ptr = pointer(row_ptr, 0, DTYPE)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, count), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:
            x = load(x_ptr, at, count, True)
            total += x * x
        else:
            x = load(x_ptr, at, count, False)
            total += x * x
    tl.store(partial_ptr + tl.program_id(0), tl.sum(total, axis=0))


@triton.jit
def _roots_kernel(table_ptr, partial_ptr, norm_ptr, tensors, programs, BLOCK: tl.constexpr):
    """√ of the sum of a tensor's partial sums, in a fixed order."""
    index = tl.program_id(0)
    first = tl.load(table_ptr + index * 3 + 2)
    end = programs.to(tl.int64)
    if index + 1 < tensors:
        end = tl.load(table_ptr + (index + 1) * 3 + 2)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in tl.range(first, end, BLOCK):
        at = start + tl.arange(0, BLOCK)
        total += tl.load(partial_ptr + at, mask=at < end, other=0.0)
    tl.store(norm_ptr + index, tl.sqrt(tl.sum(total, axis=0)))


@triton.jit
def _sum_kernel(
    table_ptr, owner_ptr, A: tl.constexpr, B: tl.constexpr, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row_ptr, _owner, count, first = place(table_ptr, owner_ptr, 3, CHUNK)
    a_ptr, b_ptr, out_ptr = pointer(row_ptr, 0, A), pointer(row_ptr, 1, B), pointer(row_ptr, 2, tl.float32)
    for start in tl.range(first, tl.minimum(first + CHUNK, count), BLOCK):
        at = start + tl.arange(0, BLOCK)
        if start + BLOCK <= count:
            store(out_ptr, at, load(a_ptr, at, count, True) + load(b_ptr, at, count, True), count, True)
        else:
            store(out_ptr, at, load(a_ptr, at, count, False) + load(b_ptr, at, count, False), count, False)


def norms(tensors: Sequence[Tensor]) -> Tensor:
    """The 2-norm of each tensor, (len(tensors),) float32 on their device; summed in float32, in a fixed order.

    Raises:
        ValueError: as `tabulate`.
    """
    table = tabulate([tensors], _NORM_CHUNK)
    found = torch.empty(len(tensors), dtype=torch.float32, device=tensors[0].device)
    partial = found.new_empty(max(1, table.programs))
    with device_guard(found):
        if table.programs:
            _squares_kernel[(table.programs,)](
                table.rows, table.owner, partial, DTYPE=tl_dtype(tensors), CHUNK=_NORM_CHUNK, BLOCK=BLOCK, num_warps=4
            )
        _roots_kernel[(len(tensors),)](
            table.rows, partial, found, len(tensors), table.programs, BLOCK=BLOCK, num_warps=4
        )
    return found


def sum_float32(a: Sequence[Tensor], b: Sequence[Tensor]) -> list[Tensor]:
    """a + b for each pair, in float32: into those of `a` where they are float32, else into new tensors.

    Raises:
        ValueError: as `tabulate`.
    """
    out = [x if x.dtype == torch.float32 else torch.empty_like(x, dtype=torch.float32) for x in a]
    table = tabulate([a, b, out], _SUM_CHUNK)
    if table.programs:
        with device_guard(out[0]):
            _sum_kernel[(table.programs,)](
                table.rows, table.owner, A=tl_dtype(a), B=tl_dtype(b), CHUNK=_SUM_CHUNK, BLOCK=BLOCK, num_warps=4
            )
    return out
