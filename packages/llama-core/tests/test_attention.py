"""The attention seam: plain, fused, padded and packed attention say the same."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import (
    Llama,
    PackedAttend,
    PaddedAttend,
    causal_attend,
    plain_attend,
    positions_from_documents,
    positions_from_mask,
    sdpa,
)
from llama_core.ops import linear_cross_entropy


def qkv(
    length: int, heads: int = 6, kv_heads: int = 2, width: int = 8, batch: int = 2, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    shapes = ((batch, length, heads, width), *2 * ((batch, length, kv_heads, width),))
    return tuple(torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes)  # type: ignore[return-value]


def by_loops(q: Tensor, k: Tensor, v: Tensor, sees: Tensor) -> Tensor:
    """One query at a time; sees (B, S, S) says which keys."""
    out = torch.zeros_like(q)
    group = q.shape[2] // k.shape[2]
    for b in range(q.shape[0]):
        for h in range(q.shape[2]):
            for i in range(q.shape[1]):
                keys = sees[b, i].nonzero()[:, 0]
                scores = k[b, keys, h // group] @ q[b, i, h] / q.shape[-1] ** 0.5
                out[b, i, h] = scores.softmax(0) @ v[b, keys, h // group]
    return out


@pytest.mark.parametrize("heads", [(4, 4), (6, 2), (3, 1)], ids=str)
@pytest.mark.parametrize("length", [1, 2, 17])
def test_plain_and_fused_against_loops(length: int, heads: tuple[int, int]) -> None:
    q, k, v = qkv(length, *heads)
    sees = torch.ones(length, length, dtype=torch.bool).tril().expand(2, -1, -1)
    expected = by_loops(q, k, v, sees)
    upstream = torch.randn_like(q)
    want = torch.autograd.grad(expected, (q, k, v), upstream)
    documents = torch.zeros(2, length, dtype=torch.int64)
    for attend in (plain_attend, causal_attend, PaddedAttend(torch.ones(2, length)), PackedAttend(documents)):
        out = attend(0, q, k, v)
        assert out.shape == q.shape
        torch.testing.assert_close(out, expected, rtol=0, atol=1e-12)
        for a, b in zip(torch.autograd.grad(out, (q, k, v), upstream), want, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(dtype: torch.dtype) -> None:
    q, k, v = qkv(33, dtype=dtype)
    exact = plain_attend(0, q.double(), k.double(), v.double())
    for attend in (plain_attend, causal_attend):
        out = attend(0, q, k, v)
        assert out.dtype == dtype
        assert (out - exact).norm() < 4 * torch.finfo(dtype).eps * exact.norm()


def test_causality_is_exact_on_the_plain_path(make_t0: Callable[..., Llama]) -> None:
    model = make_t0()
    model.attend = plain_attend
    tokens = torch.randint(0, 128, (2, 12))
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % 128
    before, after = model.logits(model(tokens)), model.logits(model(changed))
    assert torch.equal(before[:, :7], after[:, :7])
    assert (before[:, 7:] - after[:, 7:]).abs().amin(dim=(0, 2)).max() > 0
    assert (before[:, 7] - after[:, 7]).abs().max() > 1e-3
    torch.testing.assert_close(make_t0()(tokens), model(tokens), rtol=0, atol=1e-6)


class NewElements(TorchDispatchMode):
    """Counts the elements of every storage that the operations inside allocate."""

    def __init__(self, *inputs: Tensor) -> None:
        super().__init__()
        self.seen = {x.untyped_storage().data_ptr(): x for x in inputs}  # kept alive, so that no address comes twice
        self.total = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor) and x.untyped_storage().data_ptr() not in self.seen:
                self.seen[x.untyped_storage().data_ptr()] = x
                self.total += x.untyped_storage().size() // x.element_size()
        return out


@pytest.mark.parametrize("queries", [1, 64], ids=["decode", "prefill"])
def test_grouped_heads_are_not_repeated(queries: int) -> None:
    """32 query heads on one key/value head: copies of keys and values would be 64 times as large as the keys."""
    q, k = torch.randn(1, queries, 32, 16), torch.randn(1, 64, 1, 16)
    mask = torch.ones(queries, 64, dtype=torch.bool)[None, None]

    def allocated(backend: SDPBackend) -> int:
        with torch.no_grad(), sdpa_kernel(backend), NewElements(q, k, mask) as new:
            sdpa(q, k, k, mask=mask)
        return new.total

    output, logsumexp = q.numel(), 32 * queries
    assert allocated(SDPBackend.FLASH_ATTENTION) <= output + logsumexp + 2 * mask.numel()
    assert allocated(SDPBackend.MATH) >= 64 * k.numel()  # torch's own reference does copy: the measure sees it


def test_b37_causal_with_unequal_lengths_is_an_error() -> None:
    """torch would anchor the triangle at the top left, and rows would see too little."""
    q, k, v = qkv(6)
    for attend in (plain_attend, causal_attend):
        for queries, keys in ((6, 2), (2, 6), (6, 1), (1, 6)):
            with pytest.raises(ValueError, match=rf"{queries} queries|{keys} and {queries}"):
                attend(0, q[:, :queries], k[:, :keys], v[:, :keys])


def test_sdpa_with_a_mask_of_unequal_lengths() -> None:
    q, k, v = qkv(6)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()[4:][None, None]
    out = sdpa(q[:, 4:], k, v, mask=mask)
    torch.testing.assert_close(out, plain_attend(0, q, k, v)[:, 4:], rtol=0, atol=1e-12)


def test_padded_attend_against_loops() -> None:
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 0, 0], [1, 0, 1, 1, 0]])
    q, k, v = qkv(5, batch=3)
    sees = (torch.ones(5, 5).tril() * mask[:, None, :]).bool() | torch.eye(5, dtype=torch.bool)
    torch.testing.assert_close(PaddedAttend(mask)(0, q, k, v), by_loops(q, k, v, sees), rtol=0, atol=1e-12)
    for same in (mask.bool(), mask.float()):
        assert torch.equal(PaddedAttend(same).mask, PaddedAttend(mask).mask)


def test_positions_from_mask() -> None:
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1, 1, 1, 1, 1, 1, 1], [1, 1, 0, 0, 0, 0, 0]])
    expected = [[0, 0, 0, 0, 0, 1, 2], [0, 1, 2, 3, 4, 5, 6], [0, 1, 1, 1, 1, 1, 1]]
    assert positions_from_mask(mask).tolist() == expected
    assert positions_from_mask(mask.bool()).dtype == torch.int64


B18_A, B18_B = [5, 6, 7], [9, 8, 7, 6, 5, 4, 3]


def greedy(model: Llama, rows: list[list[int]], steps: int, pad: int) -> tuple[list[list[int]], Tensor, Tensor]:
    """Left-padded greedy decoding by full recomputation; also the first step's logits and the last positions."""
    new: list[list[int]] = [[] for _ in rows]
    first = None
    for _ in range(steps):
        whole = [row + added for row, added in zip(rows, new, strict=True)]
        width = max(len(row) for row in whole)
        tokens = torch.tensor([[pad] * (width - len(row)) + row for row in whole])
        mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in whole])
        positions = positions_from_mask(mask)
        logits = model.logits(model(tokens, positions, PaddedAttend(mask)))
        assert logits.isfinite().all()
        first = logits[:, -1] if first is None else first
        for row, chosen in zip(new, logits[:, -1].argmax(-1).tolist(), strict=True):
            row.append(chosen)
    assert first is not None
    return new, first, positions[:, -1]


@pytest.mark.parametrize("pad", [0, 2, 11], ids=["pad 0", "pad = eos", "pad 11"])
@pytest.mark.parametrize("order", ["A, B", "B, A"])
def test_b18_left_padding_changes_nothing(make_t0: Callable[..., Llama], pad: int, order: str) -> None:
    model = make_t0(eos_token_id=2)
    rows = [B18_A, B18_B] if order == "A, B" else [B18_B, B18_A]
    together, first, last = greedy(model, rows, 8, pad)
    for row, ids, logits in zip(rows, together, first, strict=True):
        alone = list(row)
        for _ in range(8):
            alone.append(int(model.logits(model(torch.tensor([alone])))[0, -1].argmax()))
        assert ids == alone[len(row) :]
        torch.testing.assert_close(logits, model.logits(model(torch.tensor([row])))[0, -1], rtol=0, atol=1e-5)
    assert last.tolist() == [len(row) + 6 for row in rows]  # the seventh new token is the last one read


def test_b18_the_pad_id_changes_nothing(make_t0: Callable[..., Llama]) -> None:
    model = make_t0()
    mask = torch.tensor([[0, 0, 0, 0, 1, 1, 1], [1] * 7])
    positions = positions_from_mask(mask)
    assert positions[0, 4:].tolist() == [0, 1, 2]

    def logits(pad: int, attend: PaddedAttend | None) -> Tensor:
        tokens = torch.tensor([[pad] * 4 + B18_A, B18_B])
        return model.logits(model(tokens, positions, attend))

    padded = PaddedAttend(mask)
    assert torch.equal(logits(0, padded)[mask.bool()], logits(11, padded)[mask.bool()])
    assert logits(11, padded).isfinite().all()
    assert (logits(0, None)[0, -1] - logits(11, None)[0, -1]).abs().max() > 1e-3  # without the mask it would
    hidden = model(torch.tensor([[0] * 4 + B18_A, B18_B]), positions, padded)
    hidden.sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())  # pads give no NaN either


B29 = torch.tensor([[0] * 5 + [1] * 7 + [2] * 4, [3] * 9 + [4] * 7])


def test_b29_positions_restart() -> None:
    expected = [[*range(5), *range(7), *range(4)], [*range(9), *range(7)]]
    assert positions_from_documents(B29).tolist() == expected
    assert positions_from_documents(torch.zeros(2, 3, dtype=torch.int64)).tolist() == [[0, 1, 2]] * 2
    reused = torch.tensor([[5, 5, 9, 5, 5]])  # the number comes again, the document does not
    assert positions_from_documents(reused).tolist() == [[0, 1, 0, 0, 1]]
    assert not PackedAttend(reused).mask[0, 0, 3:, :2].any()


@pytest.mark.parametrize("backend", [None, SDPBackend.MATH], ids=["default", "plain"])
def test_b29_documents_do_not_see_each_other(make_t0: Callable[..., Llama], backend: SDPBackend | None) -> None:
    model = make_t0()
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))

    def logits(tokens: Tensor, documents: Tensor = B29) -> Tensor:
        positions = positions_from_documents(documents)
        if backend is None:
            return model.logits(model(tokens, positions, PackedAttend(documents)))
        with sdpa_kernel(backend):
            return model.logits(model(tokens, positions, PackedAttend(documents)))

    base = logits(tokens)
    for row, start, stop in ((0, 0, 5), (0, 5, 12), (0, 12, 16), (1, 0, 9), (1, 9, 16)):
        alone = model.logits(model(tokens[row : row + 1, start:stop]))
        torch.testing.assert_close(base[row, start:stop], alone[0], rtol=0, atol=1e-5)
        for position in range(start, stop):
            changed = tokens.clone()
            changed[row, position] = (changed[row, position] + 1) % 128
            difference = (logits(changed) - base).abs()
            other = torch.ones_like(B29, dtype=torch.bool)
            other[row, position:stop] = False
            assert difference[other].max() <= (0 if backend is SDPBackend.MATH else 1e-6)
            assert difference[row, position].max() > 1e-3
    flipped = logits(tokens.flip(0), B29.flip(0))
    torch.testing.assert_close(flipped.flip(0), base, rtol=0, atol=1e-6)


def test_b29_border_targets_do_not_count(make_t0: Callable[..., Llama]) -> None:
    """Targets inside documents only: 13 + 14 = 27; the loss is their sum over 27."""
    model = make_t0()
    tokens = torch.randint(0, 128, (2, 16), generator=torch.Generator().manual_seed(0))
    targets = torch.full_like(tokens, -100)
    targets[:, :-1] = torch.where(B29[:, 1:] == B29[:, :-1], tokens[:, 1:], -100)
    assert (targets != -100).sum(1).tolist() == [13, 14]
    assert model.lm_head is not None
    hidden = model(tokens, positions_from_documents(B29), PackedAttend(B29))
    loss = linear_cross_entropy(hidden, model.lm_head.weight, targets)
    total = torch.zeros(())
    for row, start, stop in ((0, 0, 5), (0, 5, 12), (0, 12, 16), (1, 0, 9), (1, 9, 16)):
        alone = model(tokens[row : row + 1, start : stop - 1])
        labels = tokens[row : row + 1, start + 1 : stop]
        total += linear_cross_entropy(alone, model.lm_head.weight, labels, reduction="sum")
    torch.testing.assert_close(loss, total / 27, rtol=0, atol=1e-5)


@pytest.mark.parametrize("make", [PaddedAttend, PackedAttend, positions_from_documents])
def test_masks_of_another_shape(make: Callable[[Tensor], object]) -> None:
    with pytest.raises(ValueError, match=r"has shape \(3,\); \(batch, sequence\) is wanted"):
        make(torch.ones(3, dtype=torch.int64))
