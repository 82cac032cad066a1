"""int4_linear against float64."""

import pytest
import torch

from llama_kernels import int4_linear, reference
from llama_kernels.int4_linear import quantize_int4


def expected(x, packed, scale, minimum):
    return x.double() @ reference.int4_weight(packed, scale.double(), minimum.double()).T


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 17, 70])
@pytest.mark.parametrize(("outputs", "width"), [(7, 128), (33, 640), (33, 8320)])
def test_values(dtype, rows, outputs, width, device, near):
    packed = quantize_int4(torch.randn(outputs, width, device=device).to(dtype))
    x = torch.randn(rows, width, device=device).to(dtype)
    y = int4_linear(x, *packed)
    assert y.dtype == dtype
    near(y, expected(x, *packed))


def test_packing_by_hand():
    # Values 0 … 15 with scale 1 and minimum 0 come back exactly; input 16 i + j sits in nibble i of word j.
    weight = torch.zeros(1, 128)
    weight[0, :16] = torch.arange(16.0)
    weight[0, 127] = 15
    packed, scale, minimum = quantize_int4(weight)
    assert (scale.item(), minimum.item()) == (1.0, 0.0)
    assert [int(w) & 15 for w in packed[0, 0]] == list(range(16))
    assert (int(packed[0, 0, 15]) >> 28) & 15 == 15
    assert torch.equal(reference.int4_weight(packed, scale, minimum), weight)


def test_quantisation_error():
    weight = torch.randn(4, 256)
    weight[2, :128] = 0.5  # a constant group
    packed, scale, minimum = quantize_int4(weight)
    error = (reference.int4_weight(packed, scale, minimum) - weight).abs().unflatten(1, (2, 128)).amax(2)
    assert (error <= scale / 2 * 1.0001).all()


def test_one_input_at_a_time(device):
    # x = a unit vector reads one column: every nibble is where the packing says.
    weight = torch.randn(3, 256, device=device)
    packed = quantize_int4(weight)
    columns = torch.stack([int4_linear(row, *packed) for row in torch.eye(256, device=device)[::5]])
    torch.testing.assert_close(columns, reference.int4_weight(*packed).T[::5], rtol=1e-5, atol=1e-5)


def test_shapes_and_strides(device):
    packed = quantize_int4(torch.randn(5, 128, device=device))
    x = torch.randn(2, 3, 256, device=device)[..., ::2]
    assert torch.equal(int4_linear(x, *packed), int4_linear(x.contiguous(), *packed))
    assert int4_linear(x[:, :0], *packed).shape == (2, 0, 5)  # 27: zero rows


@pytest.mark.parametrize("at", [3, 200])
def test_nan_is_not_hidden(at, device):
    packed = quantize_int4(torch.randn(5, 256, device=device))
    x = torch.randn(1, 256, device=device).bfloat16()
    x[0, at] = torch.nan
    assert int4_linear(x, *packed).isnan().all()


def test_outliers_cost_little(device, near):
    # Fixed point within a group of 128: an input a thousand times the others takes precision from its group alone.
    packed = quantize_int4(torch.randn(5, 256, device=device))
    x = torch.randn(1, 256, device=device).bfloat16()
    x[0, 70] = 3000.0
    near(int4_linear(x, *packed), expected(x, *packed))
    x[0, 70] = 0.0
    x[0, 128:] *= 1e-3
    near(int4_linear(x, *packed), expected(x, *packed))
    assert int4_linear(torch.zeros_like(x), *packed).abs().max() == 0


def test_errors():
    with pytest.raises(ValueError, match="divisible by 128"):
        quantize_int4(torch.randn(4, 100))
    packed, scale, minimum = quantize_int4(torch.randn(4, 128))
    with pytest.raises(ValueError, match="last dimension of 128"):
        int4_linear(torch.randn(2, 64), packed, scale, minimum)
    with pytest.raises(ValueError, match="scale"):
        int4_linear(torch.randn(2, 128), packed, scale[:2], minimum)


def test_25_opcheck(device):
    packed = quantize_int4(torch.randn(5, 128, device=device))
    torch.library.opcheck(torch.ops.llama_kernels.int4_linear.default, (torch.randn(2, 128, device=device), *packed))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 2, 64, 65])
def test_real_sizes(rows, near):
    for outputs, width in [(14336, 4096), (4096, 14336), (1000, 4224)]:
        packed = quantize_int4(torch.randn(outputs, width, device="cuda").bfloat16())
        x = torch.randn(rows, width, device="cuda").bfloat16()
        near(int4_linear(x, *packed), expected(x, *packed))
