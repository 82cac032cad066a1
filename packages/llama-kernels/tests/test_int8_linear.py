"""int8_linear and fp8_linear (one kernel, two formats) against float64."""

import pytest
import torch

from llama_kernels import fp8_linear, int8_linear
from llama_kernels.fp8_linear import quantize_fp8
from llama_kernels.int8_linear import quantize_int8

FORMATS = {"int8": (quantize_int8, int8_linear), "fp8": (quantize_fp8, fp8_linear)}


def expected(x, q, scale):
    return x.double() @ (q.float().double() * scale.double().unsqueeze(1)).T


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize(("outputs", "width"), [(7, 63), (33, 130), (9, 384)])
def test_values(name, dtype, rows, outputs, width, device, near):
    quantize, linear = FORMATS[name]
    q, scale = quantize(torch.randn(outputs, width, device=device))
    x = torch.randn(rows, width, device=device).to(dtype)
    y = linear(x, q, scale)
    assert y.dtype == dtype
    near(y, expected(x, q, scale))


@pytest.mark.parametrize("name", FORMATS)
def test_quantisation_error(name):
    weight = torch.randn(9, 64) * torch.logspace(-3, 3, 9).unsqueeze(1)
    weight[4] = 0
    q, scale = FORMATS[name][0](weight)
    error = (q.float() * scale.unsqueeze(1) - weight).abs()
    # int8: half a step. fp8 e4m3 has 3 bits after the leading one: half a unit is 2⁻⁴ of the value, above 2⁻⁶ · scale.
    bound = scale.unsqueeze(1) / 2 if name == "int8" else torch.maximum(weight.abs() / 16, scale.unsqueeze(1) * 2**-10)
    assert (error <= bound * 1.0001).all()
    assert q[4].float().abs().max() == 0


@pytest.mark.parametrize("name", FORMATS)
def test_shapes_and_strides(name, device):
    quantize, linear = FORMATS[name]
    q, scale = quantize(torch.randn(5, 32, device=device))
    x = torch.randn(2, 3, 64, device=device)[..., ::2]
    assert torch.equal(linear(x, q, scale), linear(x.contiguous(), q, scale))
    assert linear(x, q, scale).shape == (2, 3, 5)
    assert linear(x[:, :0], q, scale).shape == (2, 0, 5)  # 27: zero rows
    assert torch.equal(linear(x[0, 0], q, scale), linear(x[:1, 0], q, scale)[0])
    wide_q, _ = quantize(torch.randn(5, 64, device=device))
    half = wide_q[:, 32:]
    assert torch.equal(linear(x[0], half, scale), linear(x[0], half.contiguous(), scale))


@pytest.mark.parametrize("at", [3, 200])
def test_nan_is_not_hidden(at, device):
    packed = quantize_int8(torch.randn(5, 256, device=device))
    x = torch.randn(1, 256, device=device).bfloat16()
    x[0, at] = torch.nan
    assert int8_linear(x, *packed).isnan().all()


def test_outliers_cost_little(device, near):
    # Fixed point within a group of 128: an input a thousand times the others takes precision from its group alone.
    packed = quantize_int8(torch.randn(5, 256, device=device))
    x = torch.randn(1, 256, device=device).bfloat16()
    x[0, 70] = 3000.0
    near(int8_linear(x, *packed), expected(x, *packed))
    x[0, 70] = 0.0
    x[0, 128:] *= 1e-3
    near(int8_linear(x, *packed), expected(x, *packed))
    assert int8_linear(torch.zeros_like(x), *packed).abs().max() == 0


def test_errors():
    q, scale = quantize_int8(torch.randn(5, 32))
    with pytest.raises(ValueError, match="must be"):
        int8_linear(torch.randn(2, 31), q, scale)
    with pytest.raises(ValueError, match="must be"):
        fp8_linear(torch.randn(2, 32), q, scale)
    with pytest.raises(ValueError, match="scale"):
        int8_linear(torch.randn(2, 32), q, scale[:3])


def test_25_opcheck(device):
    q, scale = quantize_int8(torch.randn(5, 32, device=device))
    torch.library.opcheck(torch.ops.llama_kernels.byte_linear.default, (torch.randn(2, 32, device=device), q, scale))


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_real_sizes(name, rows, near):
    quantize, linear = FORMATS[name]
    for outputs, width in [(14336, 4096), (4096, 14336), (1000, 4100)]:
        q, scale = quantize(torch.randn(outputs, width, device="cuda"))
        x = torch.randn(rows, width, device="cuda").bfloat16()
        near(linear(x, q, scale), expected(x, q, scale))
