"""Cases B25 and B30: what is divided by what."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

from llama_core import Llama
from llama_train.batches import IGNORED, Batch
from llama_train.config import OptimizerConfig
from llama_train.optimizer import Optimizer
from llama_train.step import accumulate_gradients, training_step

Make = Callable[..., Llama]


def _row(unmasked: int, seed: int, length: int = 12) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, 128, (1, length), generator=generator)
    targets = torch.randint(0, 128, (1, length), generator=generator)
    targets[:, unmasked:] = IGNORED
    return Batch(tokens, targets)


def _join(rows: Sequence[Batch]) -> Batch:
    return Batch(torch.cat([row.tokens for row in rows]), torch.cat([row.targets for row in rows]))


def _gradients(model: Llama) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


class _Fixed:
    """Stands for a model whose token losses are known: the loss of a target is its own value, times a weight."""

    def __init__(self) -> None:
        self.lm_head = torch.nn.Linear(1, 1, bias=False)
        torch.nn.init.ones_(self.lm_head.weight)
        self.ops = self

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        return tokens.float()

    def linear_cross_entropy(
        self, hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, reduction: str, z_loss: float
    ) -> torch.Tensor:
        assert reduction == "sum"
        return (torch.where(targets == IGNORED, 0, targets) * weight).sum()


def test_case_b25_arithmetic() -> None:
    """transformers#34191: 3 tokens of loss 1 and 5 of loss 3 are (3·1 + 5·3)/8 = 2.25, not 2."""
    model = _Fixed()
    micro_batches = [Batch(torch.zeros(1, n), torch.full((1, n), value)) for n, value in ((3, 1), (5, 3))]
    loss, targets = accumulate_gradients(model, micro_batches)  # type: ignore[arg-type]
    assert targets == 8
    assert float(loss) == 2.25
    assert float(model.lm_head.weight.grad) == 2.25  # type: ignore[arg-type]


def test_case_b25_model(t0: Make) -> None:
    """4 rows with 2, 5, 11 and 7 labels: 4 × 1, 2 × 2 and 1 × 4 are the same step."""
    rows = [_row(count, seed) for seed, count in enumerate((2, 5, 11, 7))]
    layouts = {"4x1": rows, "2x2": [_join(rows[:2]), _join(rows[2:])], "1x4": [_join(rows)]}
    results = {}
    for name, micro_batches in layouts.items():
        model = t0()
        head = model.lm_head
        assert head is not None
        whole = _join(rows)
        token_losses = model.ops.linear_cross_entropy(model(whole.tokens), head.weight, whole.targets, reduction="none")
        loss, targets = accumulate_gradients(model, micro_batches)
        assert targets == 25
        assert float(loss) == pytest.approx(float(token_losses.detach().sum()) / 25, abs=1e-5)
        gradients = _gradients(model)
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        results[name] = (loss, gradients, {name: p.detach() for name, p in model.named_parameters()})
    loss, gradients, weights = results["1x4"]
    for other in ("4x1", "2x2"):
        torch.testing.assert_close(results[other][0], loss, rtol=0, atol=1e-5)
        for name in gradients:
            torch.testing.assert_close(results[other][1][name], gradients[name], rtol=0, atol=1e-6)
            torch.testing.assert_close(results[other][2][name], weights[name], rtol=0, atol=1e-6)


def test_case_b30_1_a_micro_batch_without_labels_changes_nothing(t0: Make) -> None:
    """llama-cookbook#133 (1): loss and gradients equal those of the micro-batch that has labels."""
    both, alone = t0(), t0()
    loss, targets = accumulate_gradients(both, [_row(4, 0), _row(0, 1)])
    expected, _ = accumulate_gradients(alone, [_row(4, 0)])
    assert targets == 4
    assert torch.equal(loss, expected)
    for name, gradient in _gradients(alone).items():
        assert torch.equal(_gradients(both)[name], gradient)


def test_case_b30_2_no_label_at_all_leaves_everything_as_it_was(t0: Make) -> None:
    """llama-cookbook#133 (2): loss 0, and not even weight decay or Adam's moments move."""
    model = t0()
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig(weight_decay=0.1))
    training_step(model, optimizer, [_row(4, 3)], 1e-3, 1.0)  # so that there are moments to move
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = {name: value.clone() for name, value in optimizer.state_dict().items()}
    result = training_step(model, optimizer, [_row(0, 0), _row(0, 1)], 1e-3, 1.0)
    assert (float(result.loss), float(result.grad_norm), result.targets) == (0.0, 0.0, 0)
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter, weights[name])
        assert parameter.grad is None
    for name, value in optimizer.state_dict().items():
        assert torch.equal(value, state[name])


def test_a_step_lowers_the_loss_it_reports(t0: Make) -> None:
    model = t0()
    optimizer = Optimizer(model.named_parameters(), OptimizerConfig())
    batch = _row(12, 0)
    losses = [float(training_step(model, optimizer, [batch], 1e-2, 1.0).loss) for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]


def test_z_loss_is_that_of_the_formula(t0: Make) -> None:
    """PaLM, section 5: mean of (cross-entropy + z log²Z) over the unmasked tokens, and its gradient; in float64."""
    model, plain = t0().double(), t0().double()
    rows = [_row(5, 0), _row(11, 1)]
    loss, _ = accumulate_gradients(model, rows, z_loss=0.05)
    whole = _join(rows)
    logits = plain.logits(plain(whole.tokens))
    counted = whole.targets != IGNORED
    log_z = logits.logsumexp(-1)[counted]
    own = logits[counted].gather(-1, whole.targets[counted].unsqueeze(-1)).squeeze(-1)
    expected = (log_z - own + 0.05 * log_z.square()).mean()
    expected.backward()
    assert float(loss) == pytest.approx(float(expected.detach()), abs=1e-12)
    assert float(expected.detach()) > float((log_z - own).detach().mean()) + 0.1
    for name, gradient in _gradients(plain).items():
        torch.testing.assert_close(_gradients(model)[name], gradient, rtol=0, atol=1e-12)
