"""From logits to token ids: temperature, top-k, top-p and min-p, each row on its own.

The filters apply in this order, which is transformers' (and vLLM's before its V1 engine, which takes min-p first):

    temperature → top-k → top-p → min-p → draw

Shape legend: B rows (sequences), V vocabulary, C candidates of the sorted filters (C ≤ V).

Each row may have its own settings and its own generator. Nothing here mixes rows, so what a row draws does not
depend on its neighbours or on its place in the batch.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

PerRow = float | Sequence[float] | Tensor
Generators = torch.Generator | Sequence[torch.Generator | None] | None

_NEVER = float("-inf")
# A temperature that float32 would round to zero (or to a slow subnormal) acts like the smallest normal one.
_SMALLEST_TEMPERATURE = torch.finfo(torch.float32).tiny


def filter_logits(
    logits: Tensor, temperature: PerRow = 1.0, top_k: PerRow = 0, top_p: PerRow = 1.0, min_p: PerRow = 0.0
) -> Tensor:
    """The logits after every filter: ``softmax`` of the result is the distribution that :func:`sample` draws from.

    Args:
        logits: (B, V), any floating dtype.
        temperature: at least 0. A row at 0 keeps only its largest logit (the first of equals); nothing is divided.
        top_k: keep the k largest logits, and any equal to the k-th; 0 or -1 keeps all.
        top_p: in (0, 1]; keep the fewest most probable tokens whose probabilities sum to at least this
            (nucleus sampling, Holtzman et al. 2020, https://arxiv.org/abs/1904.09751), and any equal to the last.
        min_p: in [0, 1]; keep tokens at least this probable relative to the most probable one
            (Nguyen et al. 2024, https://arxiv.org/abs/2407.01082).
        Each may be one number or B numbers.

    Returns:
        (B, V) float32, removed tokens at -inf, each row's largest value 0.

    Raises:
        ValueError: a setting outside its range, or not one number nor B numbers; a row of logits without a largest
            finite one, which a broken model or an overflow makes.
    """
    return _filtered(logits, _Settings(logits, temperature, top_k, top_p, min_p))


def sample(
    logits: Tensor,
    temperature: PerRow = 1.0,
    top_k: PerRow = 0,
    top_p: PerRow = 1.0,
    min_p: PerRow = 0.0,
    generator: Generators = None,
) -> Tensor:
    """Draw one token id per row; the settings are those of :func:`filter_logits`.

    A row at temperature 0 is its argmax, whatever the other settings say. Any other row takes one uniform number
    from its generator and inverts the cumulative distribution, so the same seed draws the same on every device.

    Args:
        logits: (B, V), any floating dtype.
        generator: one CPU generator for all rows, or B of them (None among them, or None instead: torch's default).

    Returns:
        (B,) int64 on the logits' device.

    Raises:
        ValueError: as :func:`filter_logits`; or a number of generators that is not B.
    """
    settings = _Settings(logits, temperature, top_k, top_p, min_p)
    uniform_B1 = _uniform(generator, logits.shape[0], draw=not settings.all_greedy)
    if uniform_B1 is None:
        if logits.shape[0] == 0:
            return logits.argmax(dim=-1)
        largest_B, ids_B = logits.max(dim=-1)
        _check_largest(largest_B)
        return ids_B
    # float64: a float32 running sum over 128k probabilities is off by more than the rarest tokens weigh.
    cumulative_BV = _filtered(logits, settings).softmax(dim=-1).cumsum(dim=-1, dtype=torch.float64)
    total_B1 = cumulative_BV[:, -1:]
    # Stay below the total: rounding up to it would point past the last token.
    point_B1 = torch.minimum(
        uniform_B1.to(logits.device) * total_B1, torch.nextafter(total_B1, torch.zeros_like(total_B1))
    )
    # right=True finds the first sum *above* the point, so a token of probability zero is never drawn.
    return torch.searchsorted(cumulative_BV, point_B1, right=True).squeeze(-1)


class _Settings:
    """The four settings as checked rows: Python lists for decisions, tensors for arithmetic."""

    def __init__(self, logits: Tensor, temperature: PerRow, top_k: PerRow, top_p: PerRow, min_p: PerRow) -> None:
        if logits.ndim != 2 or logits.shape[1] == 0:
            raise ValueError(f"logits must have shape (rows, vocabulary), got {tuple(logits.shape)}")
        rows, vocabulary = logits.shape
        self.device = logits.device
        self.temperature = _rows("temperature", temperature, rows, 0.0, math.inf, "a finite number of at least 0")
        top_k_rows = _rows("top_k", top_k, rows, -1, math.inf, "an integer: -1 or 0 (off), or at least 1")
        for value in top_k_rows:
            if value != int(value):
                raise ValueError(f"top_k must be an integer: -1 or 0 (off), or at least 1; got {value}")
        self.top_k = [min(int(k), vocabulary) if k > 0 else vocabulary for k in top_k_rows]
        self.top_p = _rows("top_p", top_p, rows, math.ulp(0.0), 1.0, "in (0, 1]")
        self.min_p = _rows("min_p", min_p, rows, 0.0, 1.0, "in [0, 1]")
        self.any_greedy = 0.0 in self.temperature
        self.all_greedy = not any(self.temperature)

    def column(self, values: Sequence[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float32, device=self.device).unsqueeze(-1)


def _rows(name: str, value: PerRow, rows: int, low: float, high: float, allowed: str) -> list[float]:
    if isinstance(value, Tensor):
        value = value.tolist()
    values = [value] * rows if isinstance(value, int | float) else list(value)
    if len(values) != rows:
        raise ValueError(f"{name} must be one number or {rows}, one for each row; got {len(values)}")
    for each in values:
        # Written so that NaN fails too.
        if not (low <= each <= high) or math.isinf(each):
            raise ValueError(f"{name} must be {allowed}; got {each}")
    return values


def _check_largest(largest: Tensor) -> None:
    """NaN anywhere in a row is its largest value. Drawn from, such a row would give an id past the vocabulary; taken
    at temperature 0, a meaningless one."""
    wrong = (~largest.isfinite()).flatten().nonzero().flatten().tolist()
    if wrong:
        raise ValueError(
            f"the largest logit of row {wrong[0]} is {largest.flatten()[wrong[0]].item()}; it must be a finite number: "
            "the weights are damaged, or the model overflows in this dtype"
        )


def _filtered(logits: Tensor, settings: _Settings) -> Tensor:
    """(B, V) float32: scaled logits, those below the row's threshold at -inf."""
    temperature_B1 = settings.column([max(t, _SMALLEST_TEMPERATURE) if t else 1.0 for t in settings.temperature])
    scaled_BV = logits.float()
    # The largest becomes 0 before the division, so a tiny temperature gives 0 and -inf, never inf or NaN.
    largest_B1 = scaled_BV.amax(dim=-1, keepdim=True)
    _check_largest(largest_B1)
    scaled_BV = (scaled_BV - largest_B1) / temperature_B1
    threshold_B1 = settings.column([math.log(p) if p else _NEVER for p in settings.min_p])
    if min(settings.top_k) < logits.shape[1] or min(settings.top_p) < 1.0:
        threshold_B1 = torch.maximum(threshold_B1, _rank_threshold(scaled_BV, settings))
    kept_BV = scaled_BV.masked_fill(scaled_BV < threshold_B1, _NEVER)
    if settings.any_greedy:
        best_B1 = logits.argmax(dim=-1, keepdim=True)
        greedy_BV = torch.full_like(kept_BV, _NEVER).scatter_(-1, best_B1, 0.0)
        greedy_B1 = torch.tensor([[t == 0.0] for t in settings.temperature], device=logits.device)
        kept_BV = torch.where(greedy_B1, greedy_BV, kept_BV)
    return kept_BV


def _rank_threshold(scaled_BV: Tensor, settings: _Settings) -> Tensor:
    """(B, 1): the smallest logit that top-k and top-p keep.

    A value and not a set of ids, so that neither the order of equal logits nor the number of candidates (the largest
    k of the batch) changes what a row keeps: rows stay independent to the last bit.
    """
    # Sorted from the most probable; as few as the largest k where every row has one.
    largest_k = max(settings.top_k)
    if largest_k < scaled_BV.shape[1]:
        values_BC = scaled_BV.topk(largest_k, dim=-1, sorted=True).values
    else:
        values_BC = scaled_BV.sort(dim=-1, descending=True).values
    rank_C = torch.arange(values_BC.shape[1], device=scaled_BV.device)
    kept_BC = rank_C < torch.tensor(settings.top_k, device=scaled_BV.device).unsqueeze(-1)
    if min(settings.top_p) < 1.0:
        weights_BC = values_BC.double().exp().masked_fill(~kept_BC, 0.0)
        sums_BC = weights_BC.cumsum(dim=-1)
        # Rows with top-p off get infinity: the rounded weight before the last tokens may equal the whole.
        share_B1 = torch.tensor([p if p < 1.0 else math.inf for p in settings.top_p], dtype=torch.float64)
        wanted_B1 = share_B1.to(scaled_BV.device).unsqueeze(-1) * sums_BC[:, -1:]
        kept_BC &= (sums_BC - weights_BC < wanted_B1) | (rank_C == 0)
    return values_BC.gather(-1, kept_BC.sum(dim=-1, keepdim=True) - 1)


def _uniform(generator: Generators, rows: int, *, draw: bool) -> Tensor | None:
    """(B, 1) float64 in [0, 1), each row from its own generator; None if nothing is to be drawn."""
    if generator is not None and not isinstance(generator, torch.Generator) and len(generator) != rows:
        raise ValueError(f"generator must be one, or {rows}, one for each row; got {len(generator)}")
    if not draw:
        return None
    if generator is None or isinstance(generator, torch.Generator):
        return torch.rand(rows, 1, dtype=torch.float64, generator=generator)
    return torch.stack([torch.rand(1, dtype=torch.float64, generator=each) for each in generator])
