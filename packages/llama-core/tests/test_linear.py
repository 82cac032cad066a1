"""The product of every linear layer can be exchanged, for one model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Llama, pack_projections, preset, set_linear_product
from llama_core.linear import shared_linear

TOKENS = torch.tensor([[3, 1, 4, 1, 5]])


@pytest.mark.parametrize(("packed", "products"), [(False, 2 * 7 + 1), (True, 2 * 4 + 1)])
def test_every_product_goes_through_it(packed: bool, products: int) -> None:
    model, other = Llama(preset("tiny")), Llama(preset("tiny"))
    if packed:
        pack_projections(model)
    expected = model.logits(model(TOKENS))
    shapes: list[tuple[int, ...]] = []

    def counted(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        shapes.append(tuple(weight.shape))
        return F.linear(x, weight, bias)

    set_linear_product(model, counted)
    torch.testing.assert_close(model.logits(model(TOKENS)), expected)
    assert len(shapes) == products
    other.logits(other(TOKENS))
    assert len(shapes) == products  # another model keeps its own
    clone = copy.deepcopy(model)
    clone.logits(clone(TOKENS))
    assert len(shapes) == 2 * products


def test_joined_before_or_after_is_the_same() -> None:
    model = Llama(preset("tiny"))
    set_linear_product(model, lambda x, weight, bias: 2 * F.linear(x, weight, bias))
    expected = model(TOKENS)
    pack_projections(model)
    torch.testing.assert_close(model(TOKENS), expected)


def test_one_input_of_several_weights_has_the_gradients_of_separate_products() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 8, dtype=torch.float64, generator=generator, requires_grad=True)
    weights = [torch.randn(n, 8, dtype=torch.float64, generator=generator, requires_grad=True) for n in (4, 2, 5)]
    weights[1].requires_grad_(False)  # frozen
    learned = [x, weights[0], weights[2]]

    def gradients(outs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        total = torch.stack([out.pow(i + 2).sum() for i, out in enumerate(outs)]).sum()
        return torch.autograd.grad(total, learned, retain_graph=True)

    shared, apart = shared_linear(x, weights), tuple(F.linear(x, weight) for weight in weights)
    for a, b in zip(shared, apart, strict=True):
        assert torch.equal(a, b)
    for a, b in zip(gradients(shared), gradients(apart), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    only_first = shared_linear(x, weights)[0].sum()  # the others' gradients are zeros
    torch.testing.assert_close(torch.autograd.grad(only_first, x), torch.autograd.grad(apart[0].sum(), x))


def test_a_shared_product_is_for_layers_that_multiply_as_their_module_does() -> None:
    model = Llama(preset("tiny"))
    calls: list[int] = []

    def shared(x: Tensor, weights: object) -> tuple[Tensor, ...]:
        calls.append(len(weights))  # type: ignore[arg-type]
        return tuple(F.linear(x, weight) for weight in weights)  # type: ignore[attr-defined]

    def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return F.linear(x, weight, bias)

    expected = model(TOKENS)
    set_linear_product(model, product, shared)
    assert torch.equal(model(TOKENS), expected)
    assert calls == [3, 2] * 2  # q, k, v and gate, up of two layers
    model.model.layers[0].self_attn.k_proj.product = F.linear  # type: ignore[union-attr]
    model(TOKENS)
    assert calls == [3, 2] * 2 + [2, 3, 2]
    set_linear_product(model, product)
    model(TOKENS)
    assert len(calls) == 7
