"""sample: exactly the tokens that the sorted definition keeps, each as often as its probability says."""

import importlib

import pytest
import torch

from llama_kernels import reference, sample

module = importlib.import_module("llama_kernels.sample")


@pytest.fixture
def small_blocks(device, monkeypatch):
    """Several blocks and brackets that do not fit, at sizes the interpreter can bear."""
    if device.type == "cpu":
        monkeypatch.setattr(module, "BLOCK", 32)


def rows_of(logits, n, device):
    return logits.to(device).expand(n, -1), torch.arange(n, device=device)


def settings(n, temperature=1.0, top_k=0, top_p=1.0, min_p=0.0):
    values = (temperature, top_k, top_p, min_p)
    dtypes = (torch.float32, torch.int32, torch.float32, torch.float32)
    return [torch.full((n,), v, dtype=d) for v, d in zip(values, dtypes, strict=True)]


def peaked(vocabulary):
    return torch.randn(vocabulary).mul(4)


def flat(vocabulary):
    return torch.randn(vocabulary).mul(0.3)


def tied(vocabulary):
    return torch.randint(0, 4, (vocabulary,)).float()


def masked(vocabulary):
    return torch.where(torch.arange(vocabulary) % 5 == 0, torch.randn(vocabulary), -torch.inf)


def ordered_by_place(vocabulary):
    return torch.linspace(3, -3, vocabulary)  # as if sorted by frequency: a sample of one end would mislead


SHAPES = [peaked, flat, tied, masked, ordered_by_place]
FILTERS = [
    {},
    {"top_k": 1},
    {"top_k": 60},
    {"top_p": 0.5},
    {"top_p": 0.97, "temperature": 0.5},
    {"min_p": 0.3},
    {"top_k": 50, "top_p": 0.8, "min_p": 0.05},
    {"top_k": 90, "temperature": 3.0, "top_p": 0.99},
]


@pytest.mark.parametrize("filters", FILTERS, ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_draws_only_what_the_filters_keep(shape, filters, device, small_blocks):
    logits = shape(101)
    n = 3 if device.type == "cpu" else 2000  # a row takes the interpreter a tenth of a second
    ids = sample(*rows_of(logits, n, device), **filters).cpu()
    kept = reference.kept_tokens(logits[None].double(), *settings(1, **filters))[0]
    assert kept[ids].all(), f"drew {ids[~kept[ids]].unique().tolist()}, kept {kept.nonzero().squeeze(1).tolist()}"
    if device.type == "cuda":  # and everything that is likely to be drawn in 2000 tries
        t = filters.get("temperature", 1.0)
        p = torch.where(kept, (logits.double() / t), -torch.inf).softmax(0)
        assert set((p > 0.02).nonzero().squeeze(1).tolist()) <= set(ids.tolist())


def test_frequencies(device, small_blocks):
    # Chi-square against the probabilities of eight tokens in two blocks; 24.3 is passed once in a thousand seeds.
    logits = torch.full((64,), -torch.inf)
    at = torch.tensor([1, 2, 3, 30, 33, 34, 60, 63])
    logits[at] = torch.tensor([0.0, 1.0, 1.5, 0.5, 1.5, 0.2, 1.0, 0.3])
    n = 150 if device.type == "cpu" else 100_000
    ids = sample(*rows_of(logits, n, device)).cpu()
    seen = torch.bincount(ids, minlength=64)[at].double()
    expected = logits[at].double().softmax(0) * n
    assert float(((seen - expected) ** 2 / expected).sum()) < 24.3


def test_seed_and_offset_decide(device, small_blocks):
    logits = flat(101).to(device).expand(6, -1)
    seeds = torch.tensor([5, 6, 5, 7, 2**62 + 5, -3], device=device)
    first = sample(logits, seeds)
    assert torch.equal(first, sample(logits, seeds))
    assert first[0] == first[2]  # not its place in the batch
    assert torch.equal(sample(logits[3:5], seeds[3:5]), first[3:5])
    later = [sample(logits, seeds, offsets=n)[0].item() for n in range(8)]
    assert len(set(later)) > 4
    per_row = sample(logits, seeds, offsets=torch.arange(6, device=device))
    assert per_row[2] == later[2]


def test_settings_per_row(device, small_blocks):
    logits = flat(101).to(device).expand(4, -1)
    seeds = torch.arange(4, device=device)
    temperature = torch.tensor([0.0, 1.0, 1.0, 0.7], device=device)
    top_k = torch.tensor([0, 1, 0, 3], device=device)
    top_p = torch.tensor([1.0, 1.0, 0.4, 1.0], device=device)
    together = sample(logits, seeds, temperature=temperature, top_k=top_k, top_p=top_p)
    for row in range(4):
        alone = sample(
            logits[row : row + 1], seeds[row : row + 1],
            temperature=float(temperature[row]), top_k=int(top_k[row]), top_p=float(top_p[row]),
        )  # fmt: skip
        assert together[row] == alone[0]
    assert together[0] == together[1] == logits[0].argmax()


def test_greedy_takes_the_first_of_equals(device, small_blocks):
    logits = torch.zeros(2, 101, device=device)
    logits[0, [40, 77]] = 5.0
    assert sample(logits, torch.arange(2, device=device), temperature=0.0).tolist() == [40, 0]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_strides(dtype, device, small_blocks):
    logits = torch.randn(3, 202, device=device).to(dtype)[:, ::2]
    seeds = torch.arange(3, device=device)
    ids = sample(logits, seeds, top_k=4)
    assert torch.equal(ids, sample(logits.float(), seeds, top_k=4))
    assert torch.equal(ids, sample(logits.contiguous(), seeds, top_k=4))


def test_hopeless_rows_stay_in_range(device, small_blocks):
    logits = torch.full((2, 50), -torch.inf, device=device)
    logits[1] = torch.nan
    ids = sample(logits, torch.arange(2, device=device), top_p=0.9)
    assert (ids >= 0).all()
    assert (ids < 50).all()


def test_one_token_and_no_rows(device):
    assert sample(torch.zeros(1, 1, device=device), torch.zeros(1, dtype=torch.int64, device=device)).item() == 0
    empty = sample(torch.zeros(0, 9, device=device), torch.zeros(0, dtype=torch.int64, device=device))
    assert empty.shape == (0,)


def test_plain_path(monkeypatch):
    monkeypatch.setattr(module, "runs_triton", lambda x: False)
    logits = peaked(101).expand(300, -1)
    ids = sample(logits, torch.arange(300), top_k=5, top_p=0.9)
    kept = reference.kept_tokens(logits[:1], *settings(1, top_k=5, top_p=0.9))[0]
    assert set(ids.tolist()) == set(kept.nonzero().squeeze(1).tolist())
    assert sample(logits[:1], torch.arange(1), temperature=0.0).item() == logits[0].argmax()


@pytest.mark.parametrize(
    "wrong", [{"temperature": -1.0}, {"top_k": -2}, {"top_p": 0.0}, {"top_p": 1.5}, {"min_p": 2.0}, {"offsets": -1}]
)
def test_ranges(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        sample(torch.zeros(2, 5), torch.arange(2), **wrong)


def test_shapes():
    with pytest.raises(ValueError, match="seeds"):
        sample(torch.zeros(2, 5), torch.arange(3))
    with pytest.raises(ValueError, match="top_p"):
        sample(torch.zeros(2, 5), torch.arange(2), top_p=torch.ones(3))


def test_25_opcheck(device):
    args = (
        torch.randn(2, 40, device=device),
        torch.arange(2, device=device),
        torch.zeros(2, dtype=torch.int64, device=device),
    )
    torch.library.opcheck(
        torch.ops.llama_kernels.sample.default, (*args, *(s.to(device) for s in settings(2, top_k=3, top_p=0.9)))
    )


@pytest.mark.gpu
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(
    "filters",
    [{"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.999}, {"top_k": 20_000, "top_p": 0.7}, {"top_k": 40, "top_p": 0.9},
     {"top_k": 100_000}, {"min_p": 0.02}],
    ids=str,
)  # fmt: skip
def test_real_vocabulary(shape, filters):
    vocabulary, n = 128_256, 512
    logits = shape(vocabulary)
    ids = sample(*rows_of(logits.float(), n, "cuda"), **filters).cpu()
    kept = reference.kept_tokens(logits[None].double(), *settings(1, **filters))[0]
    # A float32 sum of 128k weights is off by 1e-6: the nucleus may end a few equals-in-weight later or earlier.
    wrong = ids[~kept[ids]]
    edge = torch.where(kept, logits.double(), torch.inf).min()
    assert (logits.double()[wrong] - edge).abs().le(1e-4).all()
    mean = (logits.double() * torch.where(kept, logits.double(), -torch.inf).softmax(0).nan_to_num())[kept].sum()
    p = torch.where(kept, logits.double(), -torch.inf).softmax(0)
    variance = (p * (logits.double().nan_to_num(neginf=0) - mean) ** 2).sum()
    assert (logits.double()[ids].mean() - mean).abs() < 5 * (variance / n).sqrt() + 1e-6
