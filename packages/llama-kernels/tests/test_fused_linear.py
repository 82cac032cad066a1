"""fused_linear against the separate steps in float64: every format, norm, gate and sum."""

import pytest
import torch

from llama_kernels import fused_linear, quantize_fp8, quantize_int4, quantize_int8, reference

FORMATS = ("float", "int8", "fp8", "int4")


def weights(kind, outputs, width, dtype, device):
    """The operands of a format, and the weight that they stand for, in float64."""
    weight = torch.randn(outputs, width, device=device)
    if kind == "float":
        return (weight.to(dtype),), weight.to(dtype).double()
    if kind == "int4":
        packed = quantize_int4(weight.to(dtype))
        return packed, reference.int4_weight(*(part.double() if part.is_floating_point() else part for part in packed))
    q, scale = (quantize_int8 if kind == "int8" else quantize_fp8)(weight)
    return (q, scale), q.double() * scale.double().unsqueeze(1)


def expected(x, weight, norm_weight, eps, gated, residual):
    """In float64, but for the normed x, which is rounded to x's dtype as everywhere."""
    if norm_weight is not None:
        x = reference.rms_norm(x, norm_weight, eps)
    y = x.double() @ weight.T
    if gated:
        gate, up = y.chunk(2, dim=-1)
        y = torch.nn.functional.silu(gate) * up
    return y if residual is None else y + residual.double()


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize(("norm", "gated", "add"), [(0, 0, 0), (1, 0, 0), (0, 0, 1), (1, 1, 0), (1, 1, 1)])
def test_values(kind, dtype, rows, norm, gated, add, device, near):
    outputs, width = 10, 384
    operands, weight = weights(kind, outputs, width, dtype, device)
    x = torch.randn(rows, width, device=device).to(dtype)
    norm_weight = torch.rand(width, device=device).to(dtype) if norm else None
    residual = torch.randn(rows, outputs // (2 if gated else 1), device=device).to(dtype) if add else None
    y = fused_linear(x, *operands, norm_weight=norm_weight, eps=1e-5, gated=bool(gated), residual=residual)
    assert y.dtype == dtype
    # The interpreter cuts to bfloat16 where a GPU rounds, up to 2⁻⁸ each time and always downwards: in x (with a norm,
    # and then in both factors of a gate), in each of the separate steps, and in y.
    slack = 4 if device.type == "cpu" and dtype == torch.bfloat16 else 1
    near(y, expected(x, weight, norm_weight, 1e-5, gated, residual), slack)


@pytest.mark.parametrize("kind", ["float", "int8", "fp8"])
@pytest.mark.parametrize(("outputs", "width"), [(1, 1), (7, 63), (33, 130)])
def test_odd_shapes(kind, outputs, width, device, near):
    operands, weight = weights(kind, outputs, width, torch.float32, device)
    x = torch.randn(width, device=device)
    near(fused_linear(x, *operands), expected(x, weight, None, 0, False, None))
    norm_weight = torch.rand(width, device=device)
    near(
        fused_linear(x, *operands, norm_weight=norm_weight, eps=1e-6),
        expected(x, weight, norm_weight, 1e-6, False, None),
    )


def test_more_outputs_than_programs(device, near):
    for kind in FORMATS:
        operands, weight = weights(kind, 70, 128, torch.bfloat16, device)
        x = torch.randn(1, 128, device=device).bfloat16()
        near(fused_linear(x, *operands, gated=True), expected(x, weight, None, 0, True, None))


def test_a_part_of_a_weight_and_strided_x(device):
    weight = torch.randn(8, 128, device=device)
    x = torch.randn(2, 1, 128, device=device)[..., ::2]
    for one in x:
        whole = fused_linear(one.contiguous(), weight[:, 64:].contiguous())
        assert torch.equal(fused_linear(one, weight[:, 64:]), whole)
    assert fused_linear(x[:, :0], weight[:, 64:]).shape == (2, 0, 8)  # 27: zero rows
    assert fused_linear(x[0], weight[:0, 64:]).shape == (1, 0)


@pytest.mark.parametrize("kind", FORMATS)
def test_nan_is_not_hidden(kind, device):
    operands, _ = weights(kind, 6, 256, torch.bfloat16, device)
    x = torch.randn(1, 256, device=device).bfloat16()
    x[0, 200] = torch.nan
    assert fused_linear(x, *operands).isnan().all()
    if device.type != "cpu":  # numpy, which interprets, warns where all of a group is NaN
        assert fused_linear(x, *operands, norm_weight=torch.ones_like(x[0]), eps=1e-5, gated=True).isnan().all()


def test_operator(device):
    x, weight = torch.randn(1, 64, device=device), torch.randn(6, 64, device=device)
    ones, residual = torch.ones(64, device=device), torch.randn(1, 3, device=device)
    arguments = (x, weight, None, None, ones, 1e-5, True, residual)
    fused_row = torch.ops.llama_kernels.fused_row.default
    torch.library.opcheck(fused_row, arguments, test_utils=("test_schema", "test_faketensor"))


def test_errors():
    x, weight = torch.randn(1, 64), torch.randn(5, 64)
    with pytest.raises(ValueError, match="must be"):
        fused_linear(torch.randn(1, 63), weight)
    with pytest.raises(ValueError, match="even number of rows, got 5"):
        fused_linear(x, weight, gated=True)
    with pytest.raises(ValueError, match=r"norm_weight \(63,\)"):
        fused_linear(x, weight, norm_weight=torch.ones(63))
    with pytest.raises(ValueError, match="residual"):
        fused_linear(x, weight, residual=torch.ones(1, 4))
    with pytest.raises(ValueError, match="or a scale"):
        fused_linear(x, weight.half())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", FORMATS)
def test_real_sizes_in_a_graph(kind, near):
    """A chain of overlapping launches, replayed: each reads what the one before wrote."""
    device = torch.device("cuda")
    hidden, inner = 4096, 14336
    x = torch.randn(1, hidden, device=device).bfloat16()
    norm_weight = torch.rand(hidden, device=device).bfloat16()
    up, up_weight = weights(kind, 2 * inner, hidden, torch.bfloat16, device)
    down, down_weight = weights(kind, hidden, inner, torch.bfloat16, device)

    def layers():
        y = x
        for _ in range(3):
            act = fused_linear(y, *up, norm_weight=norm_weight, eps=1e-5, gated=True)
            y = fused_linear(act, *down, residual=y)
        return act, y

    layers()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = layers()
    for _ in range(20):
        graph.replay()
    again = layers()
    torch.cuda.synchronize()
    assert all(map(torch.equal, captured, again))
    first = fused_linear(x, *up, norm_weight=norm_weight, eps=1e-5, gated=True)
    near(first, expected(x, up_weight, norm_weight, 1e-5, True, None))
    near(fused_linear(first, *down, residual=x), expected(first, down_weight, None, 0, False, x))
