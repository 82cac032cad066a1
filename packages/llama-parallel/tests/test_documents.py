"""Bounds of packed documents against masks written out."""

import pytest
import torch
from torch import Tensor

from llama_core import PackedAttend, causal_attend
from llama_parallel.documents import DocumentAttend, crossing_bounds, document_bounds, number_documents


def random_documents(rows: int, length: int, seed: int, share: float = 0.2) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return (torch.rand(rows, length, generator=generator) < share).long().cumsum(1)


def mask_of(bounds_q: Tensor, bounds_k: Tensor, queries: int, keys: int) -> Tensor:
    """(queries, keys): which pairs are of one document."""
    mask = torch.zeros(queries, keys, dtype=torch.bool)
    for number in range(len(bounds_q) - 1):
        rows, columns = (slice(int(b[number]), int(b[number + 1])) for b in (bounds_q, bounds_k))
        mask[rows, columns] = True
    return mask


def test_numbers_rise_and_none_comes_twice() -> None:
    found = number_documents(torch.tensor([[7, 7, 2, 2, 7, 1], [5, 5, 5, 5, 5, 5]]))
    assert found.tolist() == [[0, 0, 1, 1, 2, 3], [0] * 6]
    with pytest.raises(ValueError, match=r"documents have shape \(6,\)"):
        number_documents(torch.zeros(6))


def test_bounds_are_the_documents_beginnings() -> None:
    cu_q, cu_k = document_bounds(torch.tensor([[0, 0, 1, 2], [0, 0, 0, 0], [0, 1, 1, 1]]))
    assert cu_q.tolist() == [0, 2, 3, 4, 8, 9, 12]
    assert cu_q is cu_k
    assert cu_q.dtype == torch.int32


@pytest.mark.parametrize("share", [0.0, 0.05, 0.3, 1.0])
def test_crossing_bounds_equal_the_mask_of_equal_numbers(share: float) -> None:
    """Queries behind the keys, with or without a gap between: as in every step of a ring but the first."""
    rows, crossing = 3, 0
    for seed in range(20):
        numbers = number_documents(random_documents(rows, 24, seed, share))
        for keys, queries in ((numbers[:, :6], numbers[:, 6:18]), (numbers[:, :8], numbers[:, 18:])):
            cu_q, cu_k = crossing_bounds(queries, keys)
            found = mask_of(cu_q, cu_k, queries.numel(), keys.numel())
            same_row = torch.block_diag(*[torch.ones(queries.shape[1], keys.shape[1])] * rows).bool()
            wanted = (queries.flatten()[:, None] == keys.flatten()) & same_row
            assert torch.equal(found, wanted)
            crossing += int(wanted.any())
    assert crossing == {0.0: 40, 1.0: 0}.get(share, crossing)
    assert share == 1.0 or crossing > 0


@pytest.mark.parametrize("packed", [True, False])
def test_attention_within_documents(packed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    documents = random_documents(2, 13, 1) if packed else None
    q, k, v, dout = (torch.randn(2, 13, h, 8, dtype=torch.float64, generator=generator) for h in (6, 2, 2, 6))
    results = []
    for attend in (DocumentAttend(documents), causal_attend if documents is None else PackedAttend(documents)):
        leaves = [x.clone().requires_grad_() for x in (q, k, v)]
        out = attend(0, *leaves)
        results.append((out.detach(), *torch.autograd.grad(out, leaves, dout)))
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-12)
