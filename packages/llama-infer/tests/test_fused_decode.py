"""The fused decode step against the model's own forward pass."""

import dataclasses

import pytest
import torch

from llama_core import Llama, LlamaConfig, pack_projections, preset
from llama_infer.fused_decode import fused_decode
from llama_infer.paged_cache import PagedKVCache, PagedStep
from llama_infer.quantize import quantize_model


def shape(**changes) -> LlamaConfig:
    base = preset("tiny").replace(hidden_size=128, intermediate_size=256, num_attention_heads=4, head_dim=32)
    return dataclasses.replace(base, num_key_value_heads=2, **changes)


def built(kind, **changes) -> Llama:
    model = Llama(shape(**changes)).requires_grad_(False)
    if kind == "float":
        pack_projections(model)
    else:
        quantize_model(model, kind)
    return model


def steps(model, rows):
    """Two caches and the attention of the newest token of `rows` sequences over each."""
    torch.manual_seed(0)
    both = []
    memory = None
    for _ in range(2):
        cache = PagedKVCache(model.config, 8, 4, torch.float32)
        memory = torch.randn_like(cache.memory) if memory is None else memory
        cache.memory.copy_(memory)
        tables = torch.arange(2 * rows, dtype=torch.int32).view(rows, 2)
        lengths = torch.arange(3, 3 + rows, dtype=torch.int32)
        slots = torch.tensor([2 * i * 4 + int(n) - 1 for i, n in enumerate(lengths)], dtype=torch.int32)
        both.append(PagedStep(cache, slots, tables, lengths, None, 1, 8))
    return both


@pytest.mark.parametrize("kind", ["float", "int8", "int4", "fp8"])
@pytest.mark.parametrize("rows", [1, 3])
@torch.inference_mode()
def test_equals_the_forward_pass(kind, rows):
    model = built(kind)
    fused = fused_decode(model, torch.float32)
    assert fused is not None
    one, other = steps(model, rows)
    ids = torch.tensor([5, 7, 11])[:rows]
    positions = one.lengths.long() - 1
    expected = model(ids.unsqueeze(0), positions.unsqueeze(0), one)[0]
    torch.testing.assert_close(fused(ids, positions, other), expected, rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(other.cache.memory, one.cache.memory, rtol=2e-5, atol=2e-5)


def test_what_does_not_fit_is_left_to_the_model():
    assert fused_decode(Llama(shape()), torch.float32) is None  # not joined
    assert fused_decode(built("float"), torch.bfloat16) is None
    assert fused_decode(built("float", attention_bias=True), torch.float32) is None
    assert fused_decode(built("int8", mlp_bias=True), torch.float32) is None
    model = built("float")
    model.model.layers[0].mlp.down_proj.product = lambda x, weight, bias: x @ weight.T
    assert fused_decode(model, torch.float32) is None
