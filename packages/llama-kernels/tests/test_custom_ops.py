"""What every operation owes torch: torch.compile without a graph break, CUDA graphs, device, imports."""

import subprocess
import sys

import pytest
import torch

import llama_kernels


def everything(hidden, weight, norm, cos, sin, targets):
    """A tiny layer and loss that passes through every training operation."""
    ops = llama_kernels
    x = ops.rms_norm(hidden, norm, 1e-5)
    q, k = ops.rope(x.unflatten(-1, (2, 8)), x.unflatten(-1, (4, 4))[:, :, :2].repeat(1, 1, 1, 2), cos, sin)
    y, total = ops.add_rms_norm(q.flatten(2), hidden, norm, 1e-5)
    out = ops.swiglu(y, total) + k.flatten(2)[..., :16]
    mean = ops.linear_cross_entropy(out, weight, targets, z_loss=1e-3)
    return mean + ops.linear_cross_entropy(out, weight, targets, reduction="none").square().mean()


def arguments(device):
    hidden = torch.randn(2, 3, 16, device=device, requires_grad=True)
    weight = torch.randn(37, 16, device=device, requires_grad=True)
    norm = torch.randn(16, device=device, requires_grad=True)
    theta = torch.rand(1, 3, 4, device=device)
    targets = torch.randint(37, (2, 3), device=device)
    targets[0, 1] = -100  # 2: compiled, with ignored rows
    return hidden, weight, norm, theta.cos(), theta.sin(), targets


def test_2_23_25_compiles_whole(device, near):
    # 23: eps and z_loss are Python numbers, float64 to a compiler; kernels get float32.
    args = arguments(device)
    expected = everything(*args)
    expected_grads = torch.autograd.grad(expected, args[:3])
    # aot_eager traces forward and backward as inductor does, and needs no C++ compiler on the CPU.
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    compiled = torch.compile(everything, fullgraph=True, backend=backend)
    actual = compiled(*args)
    near(actual, expected)
    for a, b in zip(torch.autograd.grad(actual, args[:3]), expected_grads, strict=True):
        near(a, b, slack=2)


@pytest.mark.gpu
def test_cuda_graph_replays_on_new_data(near):
    inputs = [x.detach() for x in arguments("cuda")]

    def step():
        leaves = [x.detach().requires_grad_() for x in inputs[:3]]  # leaves of the capturing stream
        loss = everything(*leaves, *inputs[3:])
        return loss.detach(), *torch.autograd.grad(loss, leaves)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels compile before the capture
        step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    inputs[0].copy_(torch.randn_like(inputs[0]))
    graph.replay()
    for actual, expected in zip(captured, step(), strict=True):
        near(actual, expected, slack=2)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_24_launches_where_the_tensors_are(near):
    torch.cuda.set_device(0)
    args = arguments("cuda:1")
    assert everything(*args).device == torch.device("cuda:1")
    near(everything(*args), everything(*[a.detach().to("cuda:0") for a in args]))


def test_works_without_triton():
    # sys.modules[name] = None makes `import name` fail as if it were not installed.
    code = """
import sys
sys.modules['triton'] = None
import torch, llama_kernels
x = torch.randn(2, 4, requires_grad=True)
ops = llama_kernels.ops("cpu")
ops.rms_norm(x, torch.ones(4), 1e-5).sum().backward()
llama_kernels.rms_norm(x, torch.ones(4), 1e-5)
loss = llama_kernels.linear_cross_entropy(x, torch.randn(5, 4), torch.tensor([1, 2]))
loss.backward()
print("fine")
"""
    environment = {"CUDA_VISIBLE_DEVICES": "", "PATH": "", "HOME": "/nonexistent"}
    if "site-packages" not in llama_kernels.__file__:
        environment["PYTHONPATH"] = ":".join(p for p in sys.path if p)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=environment, check=False)
    assert done.stdout == "fine\n", done.stderr


def test_ops_have_the_fields_of_a_model():
    names = ["rms_norm", "add_rms_norm", "rope", "swiglu", "linear_cross_entropy", "swiglu_linear"]
    assert list(llama_kernels.Ops.__dataclass_fields__) == names
    plain, fast = llama_kernels.ops("cpu"), llama_kernels.ops("cuda")
    assert fast.rms_norm is llama_kernels.rms_norm
    x = torch.randn(2, 3, 8)
    torch.testing.assert_close(plain.swiglu(x, x), fast.swiglu(x, x))
