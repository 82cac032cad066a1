"""Attention over shared sequences equals attention in one process: outputs and the gradients of q, k and v."""

import os
import subprocess
import sys
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from llama_core import LlamaConfig, PackedAttend, plain_attend
from llama_parallel import ParallelConfig, build_mesh
from llama_parallel.context_parallel import check_context, context_attend
from llama_parallel.sequence_shards import shards_of_ranks, unshard_sequence
from llama_parallel.testing import RankError, run_ranks

# Norm of the error over that of the float64 result. A backend rounds each step's result to its own type, 2⁻⁹ in
# bfloat16; joining in float32 adds nothing to that, and storing the joined result rounds once more: 2⁻⁸. Gradients pass
# through two such roundings. float32 has 2⁻²⁴ for each of some tens of additions.
TOLERANCE = {torch.float64: 1e-12, torch.float32: 4e-6, torch.bfloat16: 1.6e-2}


class Case(NamedTuple):
    context: str
    heads: int = 4
    kv_heads: int = 2
    length: int = 16
    rows: int = 2
    documents: float | None = None
    """Share of tokens that begin a document."""
    backend: str | None = None
    dtype: torch.dtype = torch.float64
    width: int = 8


def inputs(case: Case) -> tuple[list[Tensor], Tensor | None]:
    """q, k, v and the gradient of the result, float64 but exact in the case's type; documents, numbers not rising."""
    generator = torch.Generator().manual_seed(case.length + case.heads)
    heads = (case.heads, case.kv_heads, case.kv_heads, case.heads)
    shapes = [(case.rows, case.length, h, case.width) for h in heads]
    tensors = [torch.randn(shape, generator=generator).to(case.dtype).double() for shape in shapes]
    if case.documents is None:
        return tensors, None
    starts = torch.rand(case.rows, case.length, generator=generator) < case.documents
    return tensors, starts.long().cumsum(1) % 3  # a number used again is another document


def alone(case: Case) -> list[Tensor]:
    """The oracle: scores written out, or with a mask over documents."""
    (q, k, v, dout), documents = inputs(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = (plain_attend if documents is None else PackedAttend(documents))(0, *leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def on_ranks(rank: int, size: int, cases: list[Case]) -> list[list[Tensor]]:
    mesh = build_mesh(ParallelConfig(cp=size))
    results = []
    for case in cases:
        tensors, documents = inputs(case)
        own = [shards_of_ranks(x, size, case.context)[rank].to(case.dtype) for x in tensors]
        numbers = None if documents is None else shards_of_ranks(documents, size, case.context)[rank]
        leaves = [x.requires_grad_() for x in own[:3]]
        out = context_attend(mesh, case.context, numbers, case.backend)(0, *leaves)
        found = [out.detach(), *torch.autograd.grad(out, leaves, own[3])]
        results.append([unshard_sequence(x, mesh, case.context) for x in found])
    return results


def check(size: int, cases: list[Case]) -> None:
    wanted = [alone(case) for case in cases]
    for results in run_ranks(on_ranks, size, size, cases):
        for case, found, right in zip(cases, results, wanted, strict=True):
            for name, ours, theirs in zip(("out", "dq", "dk", "dv"), found, right, strict=True):
                assert ours.dtype == case.dtype
                error = float((ours.double() - theirs).norm() / theirs.norm().clamp(min=1.0))  # a lone token has dq = 0
                assert error <= TOLERANCE[case.dtype], f"{name} of {case}: {error:.2g}"


DOCUMENTS = (None, 0.0, 0.1, 0.5, 1.0)
"""No documents; one for each row; some across several ranks; short ones; one token each."""


@pytest.mark.parametrize("size", [2, 3, 4])
def test_ring(size: int) -> None:
    lengths = (2 * size, 6 * size, 10 * size)  # pieces of 1, 3 and 5 tokens
    shapes = [(1, 1), (3, 1), (5, 5), (6, 3)]
    cases = [Case("ring", *shapes[i % 4], length, 1 + i % 2, d) for i, d in enumerate(DOCUMENTS) for length in lengths]
    check(size, cases)


@pytest.mark.parametrize(
    ("size", "shapes"),
    [
        (2, [(2, 1), (2, 2), (4, 1), (6, 3), (10, 5)]),  # 3 heads of 6 read key heads 0, 0, 1: no even groups
        (3, [(3, 1), (6, 2), (12, 4), (9, 3)]),  # the middle one of three ranks reads both of two key heads
        (4, [(4, 2), (8, 1), (8, 8), (12, 3)]),  # fewer key heads than ranks
    ],
)
def test_ulysses(size: int, shapes: list[tuple[int, int]]) -> None:
    cases = [Case("ulysses", *shape, 5 * size, 1 + i % 2, DOCUMENTS[i]) for i, shape in enumerate(shapes)]
    check(size, cases)
    check(size, [Case("ulysses", *shapes[-1], size, 2), Case("ulysses", *shapes[-1], 8 * size, 1, 0.1)])


@pytest.mark.parametrize("context", ["ring", "ulysses"])
def test_backends(context: str) -> None:
    check(
        2,
        [
            Case(context, 6, 2, length, 2, documents, backend, dtype, width)
            for backend, dtype in (
                ("plain", torch.float32), ("flash_cpu", torch.float32), ("flash", torch.bfloat16),
                ("plain", torch.bfloat16), (None, torch.float32),
            )
            for length, width in ((12, 8), (68, 40))
            for documents in (None, 0.1)
        ],
    )  # fmt: skip


PROGRAM = """
import runpy, sys, torch
test = runpy.run_path(sys.argv[1])
case = test["Case"]
for context in ("ring", "ulysses"):
    test["check"](2, [case(context, 4, 2, 20, 1, share, "triton", torch.float32, 16) for share in (None, 0.2)])
"""


def test_triton_backend_in_its_interpreter() -> None:
    """In a process of its own: the interpreter is chosen when triton is first imported."""
    pytest.importorskip("triton")
    environ = os.environ | {"TRITON_INTERPRET": "1"}
    command = [sys.executable, "-W", "ignore", "-c", PROGRAM, __file__]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_ulysses_over_torchs_own_choice() -> None:
    check(2, [Case("ulysses", backend="sdpa", dtype=torch.float32)])


def test_documents_matter() -> None:
    """The comparison can fail: without the documents the result is another."""
    case = Case("ring", documents=0.3)
    found = run_ranks(on_ranks, 2, 2, [case._replace(documents=None)])[0][0][0]
    assert float((found - alone(case)[0]).abs().max()) > 0.1


@pytest.mark.parametrize(
    ("context", "layout", "message"),
    [
        ("spiral", ParallelConfig(cp=2), "context = 'spiral'"),
        ("ulysses", ParallelConfig(cp=2, tp=2), "3 attention heads of a tensor-parallel rank do not divide over cp 2"),
    ],
)
def test_what_cannot_work_is_refused(context: str, layout: ParallelConfig, message: str) -> None:
    shape = LlamaConfig(hidden_size=48, num_attention_heads=6, num_key_value_heads=2)
    with pytest.raises(RankError, match=message):
        run_ranks(lambda rank: check_context(shape, build_mesh(layout), context), layout.num_processes)
