"""rope_write_kv against rope and write_kv."""

import pytest
import torch

from llama_kernels import reference, rope_write_kv


def case(tokens, heads, kv_heads, width, dtype, device):
    qkv = torch.randn(tokens, (heads + 2 * kv_heads) * width, device=device).to(dtype)
    angles = torch.randn(tokens, width // 2, device=device)
    caches = torch.zeros(2, 5, 4, kv_heads, width, dtype=dtype, device=device)
    return qkv, angles.cos(), angles.sin(), caches


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("heads", "kv_heads", "width"), [(4, 2, 8), (3, 1, 6), (2, 2, 64)])
def test_values(heads, kv_heads, width, dtype, device, near):
    qkv, cos, sin, caches = case(5, heads, kv_heads, width, dtype, device)
    slots = torch.tensor([3, 19, -1, 0, 20], dtype=torch.int32, device=device)  # the third and the last go nowhere
    q = rope_write_kv(qkv, cos, sin, caches[0], caches[1], slots, heads)
    q_in, k_in, v_in = qkv.double().split([heads * width, kv_heads * width, kv_heads * width], 1)
    q_want, k_want = reference.rope(
        q_in.view(1, 5, heads, width), k_in.view(1, 5, kv_heads, width), cos[None].double(), sin[None].double()
    )
    near(q, q_want[0])
    places = [3, 19, 0]
    tokens = [0, 1, 3]
    near(caches[0].flatten(0, 1)[places], k_want[0, tokens])
    assert torch.equal(caches[1].flatten(0, 1)[places].double(), v_in.view(5, kv_heads, width)[tokens])
    others = [at for at in range(20) if at not in places]
    assert not caches[:, :].flatten(1, 2)[:, others].any()


def test_a_part_of_a_wider_product(device):
    qkv, cos, sin, caches = case(2, 2, 1, 8, torch.float32, device)
    slots = torch.tensor([1, 2], device=device)
    wide = torch.cat((qkv, qkv), dim=1)[:, :32]
    again = caches.clone()
    assert torch.equal(
        rope_write_kv(wide, cos, sin, caches[0], caches[1], slots, 2),
        rope_write_kv(qkv, cos, sin, again[0], again[1], slots, 2),
    )
    assert torch.equal(caches, again)
    empty = rope_write_kv(qkv[:0], cos[:0], sin[:0], caches[0], caches[1], slots[:0], 2)
    assert empty.shape == (0, 2, 8)


def test_operator(device):
    qkv, cos, sin, caches = case(2, 2, 1, 8, torch.float32, device)
    slots = torch.tensor([1, 2], dtype=torch.int32, device=device)
    arguments = (qkv, cos, sin, caches[0], caches[1].clone(), slots, 2)
    written = torch.ops.llama_kernels.rope_write_kv.default
    torch.library.opcheck(written, arguments, test_utils=("test_schema", "test_faketensor"))


def test_errors():
    qkv, cos, sin, caches = case(2, 2, 1, 8, torch.float32, "cpu")
    slots = torch.tensor([1, 2])
    with pytest.raises(ValueError, match=r"must be \(T, 40\)"):
        rope_write_kv(qkv, cos, sin, caches[0], caches[1], slots, 3)
    with pytest.raises(ValueError, match="cos"):
        rope_write_kv(qkv, cos[:1], sin[:1], caches[0], caches[1], slots, 2)
    with pytest.raises(ValueError, match="slots"):
        rope_write_kv(qkv, cos, sin, caches[0], caches[1], slots[:1], 2)
    with pytest.raises(ValueError, match="k_cache is"):
        rope_write_kv(qkv, cos, sin, caches[0].half(), caches[1], slots, 2)
    with pytest.raises(ValueError, match="even D"):
        rope_write_kv(qkv[0], cos, sin, caches[0], caches[1], slots, 2)
