"""swiglu_linear against float64 and against its two halves; numbers after # are rows of the project's table of bugs."""

import pytest
import torch
import torch.nn.functional as F

from llama_kernels import reference, swiglu, swiglu_linear


def tensors(shape, width, dtype, device):
    gate, up = (torch.randn(shape, device=device).mul(3).to(dtype).requires_grad_() for _ in range(2))
    weight = (torch.randn(width, shape[-1], device=device) / shape[-1] ** 0.5).to(dtype).requires_grad_()
    return gate, up, weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("shape", "width"), [((5, 123), 7), ((2, 3, 64), 32), ((1, 1), 1)])
def test_values_and_gradients(shape, width, dtype, device, near):
    gate, up, weight = tensors(shape, width, dtype, device)
    dy = torch.randn(*shape[:-1], width, device=device).to(dtype)
    y = swiglu_linear(gate, up, weight)
    y.backward(dy)
    gate64, up64, weight64 = (t.detach().double().cpu().requires_grad_() for t in (gate, up, weight))
    y64 = F.linear(reference.swiglu(gate64, up64), weight64)
    y64.backward(dy.double().cpu())
    assert y.dtype == dtype
    # Two roundings, of h or dh and of the result, each within the tolerance of one.
    for actual, expected in [(y, y64), (gate.grad, gate64.grad), (up.grad, up64.grad), (weight.grad, weight64.grad)]:
        near(actual, expected, slack=2)


def test_what_is_kept_is_gate_and_up(device):
    gate, up, weight = tensors((6, 64), 32, torch.float32, device)

    def kept(function):
        sizes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.untyped_storage().data_ptr()) or t, id):
            function()
        return set(sizes)

    own = {t.untyped_storage().data_ptr() for t in (gate, up, weight)}
    assert kept(lambda: swiglu_linear(gate, up, weight)) == own
    assert len(kept(lambda: F.linear(swiglu(gate, up), weight))) == 4  # the oracle: two operations keep h too


def test_slices_of_one_packed_projection_and_a_frozen_weight(device):
    _, _, weight = tensors((1, 63), 16, torch.float32, device)
    packed = torch.randn(3, 5, 126, device=device, requires_grad=True)
    frozen = weight.detach()
    grads = []
    for parts in (packed.chunk(2, dim=-1), [x.contiguous() for x in packed.chunk(2, dim=-1)]):
        grads.append(torch.autograd.grad(swiglu_linear(*parts, frozen).square().sum(), packed)[0])
    assert torch.equal(*grads)


def test_20_gradient_of_stride_0_and_16_a_second_backward(device):
    inputs = tensors((4, 64), 16, torch.float32, device)
    y = swiglu_linear(*inputs)
    first = torch.autograd.grad(y.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(y, inputs, torch.ones_like(y))
    for a, b in zip(first, second, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # cuBLAS takes other products for other strides


def test_27_zero_rows(device):
    gate, up, weight = tensors((0, 64), 16, torch.float32, device)
    swiglu_linear(gate, up, weight).sum().backward()
    assert gate.grad.shape == (0, 64)
    assert weight.grad.abs().max() == 0


# Dynamo of torch 2.11 looks at .grad of tensors that are no leaves
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")
def test_25_compiles_whole(device):
    inputs = tensors((3, 64), 16, torch.float32, device)
    compiled = torch.compile(swiglu_linear, fullgraph=True, backend="aot_eager")
    grads = [torch.autograd.grad(f(*inputs).square().sum(), inputs) for f in (swiglu_linear, compiled)]
    for a, b in zip(*grads, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)


def test_errors():
    gate, up, weight = torch.randn(2, 4), torch.randn(2, 4), torch.randn(3, 4)
    with pytest.raises(ValueError, match="must be alike"):
        swiglu_linear(gate, up[:1], weight)
    with pytest.raises(ValueError, match="weight's dtype"):
        swiglu_linear(gate, up, weight.bfloat16())
    with pytest.raises(ValueError, match="must be"):
        swiglu_linear(gate, up, weight[:, :2])
