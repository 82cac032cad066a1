"""The vocabulary-parallel loss against llama_core's plain one: values and gradients, odd vocabularies and chunks."""

from typing import Any

import pytest
import torch
from torch import Tensor

from llama_core.ops import linear_cross_entropy
from llama_parallel import ParallelConfig, build_mesh
from llama_parallel.collectives import Axis
from llama_parallel.testing import RankError, run_ranks
from llama_parallel.vocab_loss import VocabParallelCrossEntropy

B, S, E = 2, 6, 8


def example(vocab: int, ignored: str = "some", dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(vocab)
    hidden = torch.randn(B, S, E, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(vocab, E, generator=generator, dtype=torch.float64).to(dtype)
    targets = torch.randint(0, vocab, (B, S), generator=generator)
    targets[0, 0], targets[1, -1] = 0, vocab - 1
    if ignored != "none":
        targets[:, 1:3] = -100
    if ignored == "all":
        targets[:] = -100
    return hidden, weight, targets


def stretch(x: Tensor, size: int, rank: int) -> Tensor:
    """A rank's part of all tokens of (B, S, …), laid end to end."""
    return x.flatten(0, 1).chunk(size)[rank].unflatten(0, (len(x), -1))


def on_rank(
    rank: int, size: int, sample: tuple[Tensor, Tensor, Tensor], upstream: Tensor, shared: bool, chunk: int | None,
    options: dict[str, Any],
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    hidden, weight, targets = sample
    axis = Axis.of(build_mesh(ParallelConfig(tp=size)), "tp")
    own_hidden = (stretch(hidden, size, rank) if shared else hidden).clone().requires_grad_()
    own_weight = weight.chunk(size)[rank].clone().requires_grad_()
    loss = VocabParallelCrossEntropy(axis, len(weight), shared, chunk)(own_hidden, own_weight, targets, **options)
    loss.backward(upstream)
    assert own_hidden.grad is not None
    assert own_weight.grad is not None
    return loss.detach(), own_hidden.grad, own_weight.grad


@pytest.mark.parametrize(
    ("size", "vocab", "shared", "chunk", "ignored", "options"),
    [
        (2, 16, True, None, "some", {"reduction": "sum"}),
        (2, 17, True, 5, "some", {"reduction": "mean"}),
        (3, 10, True, 1, "none", {"reduction": "mean", "z_loss": 0.1}),  # 4, 4 and 2 rows
        (2, 17, True, 5, "some", {"reduction": "none", "z_loss": 0.1}),
        (2, 17, False, 7, "some", {"reduction": "sum", "z_loss": 0.1}),
        (2, 17, False, None, "some", {"reduction": "none"}),
        (2, 16, True, None, "all", {"reduction": "mean"}),
        (2, 16, True, 4, "all", {"reduction": "none", "z_loss": 0.1}),
        (1, 16, True, 4, "some", {"reduction": "mean", "ignore_index": 3}),
    ],
)
def test_equals_the_plain_loss(
    size: int, vocab: int, shared: bool, chunk: int | None, ignored: str, options: dict[str, Any]
) -> None:
    hidden, weight, targets = example(vocab, ignored)
    if options.get("ignore_index") == 3:
        targets[targets == -100] = 3
    sample = hidden.clone().requires_grad_(), weight.clone().requires_grad_(), targets
    wanted = linear_cross_entropy(*sample, **options)
    upstream = torch.rand(wanted.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    wanted.backward(upstream)
    assert sample[0].grad is not None
    assert sample[1].grad is not None
    results = run_ranks(on_rank, size, size, (hidden, weight, targets), upstream, shared, chunk, options)
    close = {"rtol": 1e-12, "atol": 1e-12}
    for rank, (loss, grad_hidden, grad_weight) in enumerate(results):
        torch.testing.assert_close(loss, wanted.detach(), **close)
        right = stretch(sample[0].grad, size, rank) if shared else sample[0].grad
        torch.testing.assert_close(grad_hidden, right, **close)
        torch.testing.assert_close(grad_weight, sample[1].grad.chunk(size)[rank], **close)
        if ignored == "all":
            assert float(loss.abs().sum() + grad_hidden.abs().sum() + grad_weight.abs().sum()) == 0.0


def test_half_precision_is_summed_in_float32() -> None:
    hidden, weight, targets = example(17, dtype=torch.bfloat16)
    wanted = linear_cross_entropy(hidden.double(), weight.double(), targets)
    upstream = torch.ones(())
    for loss, grad_hidden, grad_weight in run_ranks(
        on_rank, 2, 2, (hidden, weight, targets), upstream, True, 5, {"reduction": "mean"}
    ):
        assert loss.dtype == torch.float32
        assert grad_hidden.dtype == grad_weight.dtype == torch.bfloat16
        # logits are rounded to bfloat16 by the product (2⁻⁹ of about 5); what follows is float32
        torch.testing.assert_close(loss.double(), wanted, rtol=0, atol=0.02)


def test_the_gradient_of_a_nearly_certain_target_survives_bfloat16() -> None:
    """Its softmax is 1 - 9e-5, which bfloat16 rounds to 1; and the other rank's part of the vocabulary weighs e⁻¹²."""
    hidden = torch.zeros(1, 2, 4, dtype=torch.bfloat16)
    hidden[..., 0] = 1
    weight = torch.zeros(16, 4, dtype=torch.bfloat16)
    weight[3, 0] = 12
    targets = torch.full((1, 2), 3)
    leaf = weight.double().requires_grad_()
    linear_cross_entropy(hidden.double(), leaf, targets).backward()
    assert leaf.grad is not None
    for rank, (_, _, found) in enumerate(
        run_ranks(on_rank, 2, 2, (hidden, weight, targets), torch.ones(()), True, None, {"reduction": "mean"})
    ):
        torch.testing.assert_close(found.double(), leaf.grad.chunk(2)[rank], rtol=0.01, atol=0)  # 2⁻⁹, three times


def test_evaluation_computes_no_gradient() -> None:
    def work(rank: int) -> float:
        hidden, weight, targets = example(16)
        axis = Axis.of(build_mesh(ParallelConfig(tp=2)), "tp")
        head = weight.chunk(2)[rank].clone().requires_grad_()
        with torch.no_grad():
            loss = VocabParallelCrossEntropy(axis, 16, True)(stretch(hidden, 2, rank), head, targets)
        assert loss.grad_fn is None
        return float(loss)

    assert run_ranks(work, 2) == pytest.approx([float(linear_cross_entropy(*example(16)))] * 2, rel=1e-12)


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (lambda h, w, t: (h, w, t[:, 1:]), {}, r"do not fit: \(B, S / 1, E\)"),
        (lambda h, w, t: (h, w, t.int()), {}, "torch.int32; torch.int64 is wanted"),
        (lambda h, w, t: (h, w, t + 16), {}, r"is outside \[0, 16\)"),
        (lambda h, w, t: (h, w, t), {"reduction": "max"}, "reduction is 'max'"),
    ],
)
def test_nonsense_is_refused(change: Any, options: dict[str, Any], message: str) -> None:
    loss = VocabParallelCrossEntropy(Axis("no group", 1, 0), 16, True)
    with pytest.raises(ValueError, match=message):
        loss(*change(*example(16, "none")), **options)


def test_a_shard_of_another_length_is_refused_on_ranks_too() -> None:
    def work(rank: int) -> None:
        hidden, weight, targets = example(16)
        axis = Axis.of(build_mesh(ParallelConfig(tp=2)), "tp")
        VocabParallelCrossEntropy(axis, 16, True)(hidden, weight.chunk(2)[rank], targets)

    with pytest.raises(RankError, match=r"do not fit: \(B, S / 2, E\)"):
        run_ranks(work, 2)
