"""rope against float64; numbers after # are rows of the project's table of known bugs."""

import pytest
import torch

from llama_kernels import reference, rope


def angles(batch, seq, width, device, dtype=torch.float32):
    theta = torch.rand(batch, seq, width // 2, device=device) * 6
    return theta.cos().to(dtype), theta.sin().to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("batch", "angle_batch", "seq", "q_heads", "k_heads", "width"),
    [(2, 1, 3, 4, 2, 8), (2, 2, 3, 3, 1, 6), (3, 3, 1, 2, 2, 64), (1, 1, 5, 9, 3, 10)],
)
def test_21_22_values_and_gradients(batch, angle_batch, seq, q_heads, k_heads, width, dtype, device, near):
    # 21, 22: batched angles use their batch stride; B > 1 with S = 1 (decoding) is right.
    q = torch.randn(batch, seq, q_heads, width, device=device).to(dtype).requires_grad_()
    k = torch.randn(batch, seq, k_heads, width, device=device).to(dtype).requires_grad_()
    cos, sin = angles(angle_batch, seq, width, device)
    out = rope(q, k, cos, sin)
    grads = [torch.randn_like(x) for x in out]
    torch.autograd.backward(out, grads)
    q64, k64 = (t.detach().double().cpu().requires_grad_() for t in (q, k))
    out64 = reference.rope(q64, k64, cos.double().cpu(), sin.double().cpu())
    torch.autograd.backward(out64, [g.double().cpu() for g in grads])
    for actual, expected in [*zip(out, out64, strict=True), (q.grad, q64.grad), (k.grad, k64.grad)]:
        near(actual, expected)
    assert out[0].dtype == dtype


def test_many_heads_take_several_programs(device, near):
    q, k = torch.randn(1, 2, 70, 64, device=device), torch.randn(1, 2, 35, 64, device=device)
    cos, sin = angles(1, 2, 64, device)
    for actual, expected in zip(rope(q, k, cos, sin), reference.rope(q.double(), k.double(), cos, sin), strict=True):
        near(actual, expected)


def test_angle_of_one_position(device):
    # Position 0 is the identity; a quarter turn sends channel j to j + D/2.
    q = torch.randn(1, 2, 1, 8, device=device)
    cos = torch.tensor([1.0, 0.0], device=device)[None, :, None].expand(1, 2, 4)
    out, _ = rope(q, q, cos, 1 - cos)
    assert torch.equal(out[:, 0], q[:, 0])
    assert torch.equal(out[0, 1, 0], torch.cat((-q[0, 1, 0, 4:], q[0, 1, 0, :4])))


def test_20_strided_inputs_and_gradients(device):
    # 20: views of a packed projection, transposed layouts and stride-0 gradients equal their dense copies exactly.
    packed = torch.randn(2, 3, 8 * 16, device=device)
    q, k = packed[..., :64].unflatten(-1, (4, 16)), packed[..., 64:96].unflatten(-1, (2, 16))
    cos, sin = angles(2, 3, 16, device)
    dense = rope(q.contiguous(), k.contiguous(), cos, sin)
    across = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k)]
    for strided in (rope(q, k, cos, sin), rope(*across, cos.mT.contiguous().mT, sin)):
        assert all(torch.equal(a, b) for a, b in zip(strided, dense, strict=True))
    results = []
    for expand in (True, False):
        a, b = q.clone().requires_grad_(), k.clone().requires_grad_()
        out = rope(a, b, cos, sin)
        grads = [torch.full((), 0.5, device=device).expand(x.shape) for x in out]
        torch.autograd.backward(out, grads if expand else [g.contiguous() for g in grads])
        results.append((a.grad, b.grad))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


def test_15_inputs_survive(device):
    q, k = (torch.randn(1, 3, 2, 8, device=device) for _ in range(2))
    before = q.clone(), k.clone()
    rope(q, k, *angles(1, 3, 8, device))
    assert torch.equal(q, before[0])
    assert torch.equal(k, before[1])


def test_27_zero_tokens(device):
    q = torch.randn(2, 0, 4, 8, device=device, requires_grad=True)
    out = rope(q, q, *angles(1, 0, 8, device))
    (out[0] + out[1]).sum().backward()
    assert q.grad.shape == q.shape


@pytest.mark.parametrize(
    "cos", [torch.ones(3, 4), torch.ones(3, 3, 4), torch.ones(1, 2, 4), torch.ones(1, 3, 8)], ids=lambda c: str(c.shape)
)
def test_22_wrong_angles_are_refused(cos):
    q = torch.randn(2, 3, 4, 8)
    with pytest.raises(ValueError, match="do not fit"):
        rope(q, q, cos, cos)


# torch itself reads .grad of a non-leaf there
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_opcheck(device):
    q = torch.randn(2, 3, 4, 8, device=device, requires_grad=True)
    k = torch.randn(2, 3, 2, 8, device=device, requires_grad=True)
    torch.library.opcheck(torch.ops.llama_kernels.rope.default, (q, k, *angles(1, 3, 8, device), False))


@pytest.mark.gpu
def test_12_beyond_2_to_31_elements():
    seq = 2**31 // 4096 + 5
    q = torch.randn(1, seq, 32, 128, dtype=torch.bfloat16, device="cuda")
    k = torch.randn(1, seq, 8, 128, dtype=torch.bfloat16, device="cuda")
    cos, sin = angles(1, seq, 128, "cuda")
    out = rope(q, k, cos, sin)
    tail = rope(q[:, -3:], k[:, -3:], cos[:, -3:], sin[:, -3:])
    assert torch.equal(out[0][:, -3:], tail[0])
    assert torch.equal(out[1][:, -3:], tail[1])
