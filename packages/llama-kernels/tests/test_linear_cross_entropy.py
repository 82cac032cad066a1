"""linear_cross_entropy against float64; numbers after # are rows of the project's table of known bugs."""

import importlib

import pytest
import torch

from llama_kernels import linear_cross_entropy, reference

chunked = importlib.import_module("llama_kernels.linear_cross_entropy")


@pytest.fixture(params=["one chunk", "several chunks"])
def chunks(request, monkeypatch):
    if request.param == "several chunks":
        monkeypatch.setattr(chunked, "_chunk_rows", lambda rows, row_bytes, budget: min(rows, 3))


@pytest.fixture(params=["kernel", "plain"])
def path(request, device, monkeypatch):
    """The Triton kernel, and torch's path that serves a CPU without the interpreter."""
    if request.param == "plain":
        monkeypatch.setattr("llama_kernels.cross_entropy.runs_triton", lambda x: False)


def data(rows, width, vocabulary, dtype, device, ignored=()):
    hidden = torch.randn(rows, width, device=device).to(dtype)
    weight = torch.randn(vocabulary, width, device=device).to(dtype)
    targets = torch.randint(vocabulary, (rows,), device=device)
    targets[list(ignored)] = -100
    return hidden.requires_grad_(), weight.requires_grad_(), targets


def oracle(hidden, weight, targets, grad=None, **options):
    hidden, weight = (t.detach().double().cpu().requires_grad_() for t in (hidden, weight))
    loss = reference.linear_cross_entropy(hidden, weight, targets.cpu(), **options)
    loss.backward(None if grad is None else grad.double().cpu())
    return loss, hidden.grad, weight.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize(("shape", "z_loss"), [((5, 7, 123), 0.0), ((7, 5, 63), 1e-2)])
def test_5_6_9_values_and_gradients(shape, z_loss, reduction, dtype, device, near, chunks, path):
    # 5, 6: no vocabulary here is a multiple of the block: columns that do not exist weigh nothing.
    # 9: gradients are exact, no small probability is skipped.
    hidden, weight, targets = data(*shape, dtype, device, ignored=[1])
    options = {"reduction": reduction, "z_loss": z_loss}
    loss = linear_cross_entropy(hidden, weight, targets, **options)
    grad = torch.randn(loss.shape, device=device)
    loss.backward(grad)
    loss64, d_hidden64, d_weight64 = oracle(hidden, weight, targets, grad, **options)
    assert loss.dtype == torch.float32
    # The loss is float32, but of logits in the input's dtype, at most about 20: an error of 20 · 2⁻⁹ in bfloat16.
    allowed = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    loss, loss64 = loss.detach().double().cpu(), loss64.detach()
    assert (loss - loss64).abs().max() <= allowed * max(1, float(loss64.abs().max()) / 4)
    # The logits' rounding moves probabilities by as much; and there are up to three chunks' roundings of dweight.
    slack = 2 if dtype == torch.float32 else 4
    near(hidden.grad, d_hidden64, slack)
    near(weight.grad, d_weight64, slack)


def test_2_ignored_rows_have_zero_loss_and_gradient(device, chunks, path):
    hidden, weight, targets = data(7, 8, 50, torch.float32, device, ignored=[0, 3, 6])
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    losses.sum().backward()
    assert losses[[0, 3, 6]].tolist() == [0, 0, 0]
    assert hidden.grad[[0, 3, 6]].abs().max() == 0
    assert hidden.grad[[1, 2, 4, 5]].abs().min(1).values.min() > 0


@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_4_all_ignored(reduction, device, path):
    hidden, weight, targets = data(4, 8, 50, torch.float32, device, ignored=range(4))
    loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction, z_loss=0.1)
    loss.sum().backward()
    assert loss.abs().max() == 0
    assert hidden.grad.abs().max() == 0
    assert weight.grad.abs().max() == 0


def test_3_sure_predictions(device, near, path):
    # p = 0.999…: p − 1 must be formed in float32, not from a p rounded to bfloat16.
    hidden = torch.full((2, 4), 1.75, dtype=torch.bfloat16, device=device, requires_grad=True)
    weight = torch.zeros(33, 4, dtype=torch.bfloat16, device=device)
    weight[5] = 1.5  # logit 10.5 against 0
    weight.requires_grad_()
    targets = torch.tensor([5, 5], device=device)
    linear_cross_entropy(hidden, weight, targets, reduction="sum").backward()
    near(weight.grad, oracle(hidden, weight, targets, reduction="sum")[2], slack=2)


@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_7_label_out_of_range(reduction, device):
    for wrong in (50, -1):
        hidden, weight, targets = data(4, 8, 50, torch.float32, device)
        targets[2] = wrong
        if device.type == "cpu":
            with pytest.raises(ValueError, match=rf"target {wrong} is outside \[0, 50\)"):
                linear_cross_entropy(hidden, weight, targets, reduction=reduction)
        else:
            loss = linear_cross_entropy(hidden, weight, targets, reduction=reduction)
            loss.sum().backward()
            assert loss.isnan().any()
            assert weight.grad.isnan().all()


def test_7_kernel_poisons(device, path):
    # What a GPU does, seen in the interpreter as well.
    logits = torch.randn(3, 50, device=device)
    losses = torch.empty(3, device=device)
    kernel = importlib.import_module("llama_kernels.cross_entropy").cross_entropy_
    kernel(logits, torch.tensor([1, 50, -7], device=device), losses, None, -100, 0.0, True)
    assert losses.isnan().tolist() == [False, True, True]
    assert logits.isnan().all(1).tolist() == [False, True, True]


def test_8_common_offset(device, near, path):
    # Logits of 3000 + small: log Σ − (x_y − m) keeps what lse − x_y loses.
    hidden = torch.ones(1, 1, device=device, requires_grad=True)
    weight = (3000 + torch.arange(5.0, device=device)[:, None] / 4).requires_grad_()
    targets = torch.tensor([4], device=device)
    loss = linear_cross_entropy(hidden, weight, targets)
    near(loss, oracle(hidden, weight, targets)[0])


def test_30_infinite_logits(device, near):
    # −∞ on whole stretches of a row (a masked vocabulary): the rest is a softmax of its own.
    kernel = importlib.import_module("llama_kernels.cross_entropy").cross_entropy_
    logits = torch.full((1, 40), float("-inf"), device=device)
    logits[0, 20:25] = torch.randn(5, device=device)
    expected = torch.nn.functional.cross_entropy(logits.double(), torch.tensor([22], device=device))
    losses = torch.empty(1, device=device)
    kernel(logits, torch.tensor([22], device=device), losses, None, -100, 0.0, True)
    near(losses[0], expected)
    assert logits.isfinite().all()


def test_20_expanded_gradient(device):
    hidden, weight, targets = data(6, 8, 50, torch.float32, device)
    results = []
    for grad in (torch.full((), 0.5, device=device).expand(6), torch.full((6,), 0.5, device=device)):
        loss = linear_cross_entropy(hidden, weight, targets, reduction="none")
        results.append(torch.autograd.grad(loss, (hidden, weight), grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_strided_inputs(device, near):
    wide, weight, targets = data(6, 16, 50, torch.float32, device)
    hidden = wide.detach().view(2, 3, 16)[..., ::2]
    head = weight.detach()[:, 8:]
    labels = targets.view(2, 3).T.contiguous().T
    loss = linear_cross_entropy(hidden, head, labels)
    near(loss, reference.linear_cross_entropy(hidden.double(), head.double(), labels))


def test_19_float32_weight_gradient(device, near, monkeypatch):
    # Forty chunks of one token: in bfloat16 the sum over chunks is rounded forty times, in float32 once at the end.
    monkeypatch.setattr(chunked, "_chunk_rows", lambda rows, row_bytes, budget: 1)
    hidden, weight, targets = data(40, 8, 5, torch.bfloat16, device)
    linear_cross_entropy(hidden, weight, targets, reduction="sum", float32_weight_grad=True).backward()
    near(weight.grad, oracle(hidden, weight, targets, reduction="sum")[2])


def test_float16_mean_over_many_tokens_does_not_vanish(device, near, monkeypatch):
    if device.type == "cpu":  # 600 rows take long in the interpreter; the scale is outside the kernel
        monkeypatch.setattr("llama_kernels.cross_entropy.runs_triton", lambda x: False)
    # p/n of a large vocabulary over many tokens is below float16's smallest number: the mean is folded in afterwards.
    hidden, weight, targets = data(600, 4, 200, torch.float16, device)
    scale = 65536.0  # a loss scaler's
    (linear_cross_entropy(hidden, weight, targets) * scale).backward()
    grad = torch.tensor(scale)
    near(weight.grad, oracle(hidden, weight, targets, grad)[2], slack=2)


def test_gradient_only_where_wanted(device):
    hidden, weight, targets = data(4, 8, 50, torch.float32, device)
    full = torch.autograd.grad(linear_cross_entropy(hidden, weight, targets), (hidden, weight))
    (alone,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, targets), weight)
    assert torch.equal(alone, full[1])
    (alone,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), targets), hidden)
    assert torch.equal(alone, full[0])
    with torch.no_grad():
        assert not linear_cross_entropy(hidden, weight, targets).requires_grad


def test_10_small_gradients_survive_beside_large_ones(device, near, path):
    # 10: one buffer holds logits, then gradients: each probability is formed in float32 from logits as stored, so tiny
    # gradients keep their relative precision next to p − 1.
    logits = torch.tensor([[9.0, 0.0, -4.0, -8.0]], device=device).bfloat16()
    expected = logits.double().softmax(1)
    expected[0, 0] -= 1
    kernel = importlib.import_module("llama_kernels.cross_entropy").cross_entropy_
    kernel(logits, torch.tensor([0], device=device), torch.empty(1, device=device), None, -100, 0.0, True)
    for column in range(4):
        near(logits[:, column], expected[:, column])


def test_15_backward_twice(device):
    hidden, weight, targets = data(4, 8, 50, torch.float32, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    first = torch.autograd.grad(3 * loss, (hidden, weight), retain_graph=True)
    second = torch.autograd.grad(3 * loss, (hidden, weight))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_27_zero_tokens(device):
    hidden, weight, targets = data(0, 8, 50, torch.float32, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    assert loss.item() == 0
    assert weight.grad.abs().max() == 0


def test_float32_head_under_autocast_is_taken_in_hidden_dtype(device):
    hidden, weight, targets = data(4, 8, 50, torch.bfloat16, device)
    head = weight.detach().float().requires_grad_()
    loss = linear_cross_entropy(hidden, head, targets)
    loss.backward()
    assert head.grad.dtype == torch.float32
    assert torch.equal(loss, linear_cross_entropy(hidden, weight, targets))


def test_float64(device, near):
    hidden, weight, targets = data(4, 8, 50, torch.float64, device)
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    expected = oracle(hidden, weight, targets)
    for actual, wanted in zip((loss, hidden.grad, weight.grad), expected, strict=True):
        near(actual, wanted)


def test_errors():
    hidden, weight, targets = data(4, 8, 50, torch.float32, "cpu")
    with pytest.raises(ValueError, match="reduction is 'max'"):
        linear_cross_entropy(hidden, weight, targets, reduction="max")
    with pytest.raises(ValueError, match="do not fit"):
        linear_cross_entropy(hidden, weight, targets[:3])


def test_chunks_are_few_and_equal():
    size = chunked._chunk_rows(8192, 128_256 * 2, chunked.GPU_CHUNK_BYTES)
    assert size == 4096  # two chunks of 1.05 GB
    assert chunked._chunk_rows(5, 10, 1000) == 5
    assert chunked._chunk_rows(1000, 1000, 300_000) == 256  # four chunks, not three and a rest


# torch itself reads .grad of a non-leaf there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_opcheck(device):
    hidden, weight, targets = data(4, 8, 50, torch.float32, device)
    ops = torch.ops.llama_kernels
    flags = (True, 0.0, True, True, False)
    torch.library.opcheck(ops.linear_cross_entropy.default, (hidden, weight, targets, -100, *flags))
    torch.library.opcheck(ops.linear_cross_entropy_rows.default, (hidden, weight, targets, -100, 0.0, False))


@pytest.mark.gpu
def test_real_size_memory_and_gradients(near):
    tokens, width, vocabulary = 4096, 1024, 128_256
    hidden, weight, targets = data(tokens, width, vocabulary, torch.bfloat16, "cuda")
    weight = (weight.detach() / 32).requires_grad_()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    loss = linear_cross_entropy(hidden, weight, targets)
    loss.backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < chunked.GPU_CHUNK_BYTES + 2.3 * (hidden.nbytes + weight.nbytes)
    hidden32, weight32 = (t.detach().float().requires_grad_() for t in (hidden, weight))
    expected = torch.nn.functional.cross_entropy(hidden32 @ weight32.T, targets)
    expected.backward()
    near(loss, expected, slack=50)  # of bfloat16 logits
    near(hidden.grad, hidden32.grad)
    near(weight.grad, weight32.grad)


@pytest.mark.gpu
def test_11_more_than_2_to_31_logits(monkeypatch, near):
    monkeypatch.setattr(chunked, "GPU_CHUNK_BYTES", 10**11)
    hidden, weight, targets = data(2**31 // 32_768 + 7, 64, 32_768, torch.bfloat16, "cuda")
    losses = linear_cross_entropy(hidden, weight, targets, reduction="none")
    tail = linear_cross_entropy(hidden[-5:], weight, targets[-5:], reduction="none")
    near(losses[-5:], tail, slack=10)


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
def test_no_synchronisation():
    hidden, weight, targets = data(300, 64, 1000, torch.bfloat16, "cuda")
    linear_cross_entropy(hidden, weight, targets).backward()
    try:
        torch.cuda.set_sync_debug_mode("error")
        linear_cross_entropy(hidden, weight, targets).backward()
        linear_cross_entropy(hidden, weight, targets, reduction="none").sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
