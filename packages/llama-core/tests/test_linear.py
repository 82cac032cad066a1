"""The product of every linear layer can be exchanged, for one model."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import Llama, pack_projections, preset, set_linear_product

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
