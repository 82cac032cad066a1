"""Products put off give the gradients that they give at once, and not a moment earlier."""

import pytest
import torch

from llama_core import Llama, LlamaConfig, init_weights, set_activation_checkpointing, set_linear_product
from llama_parallel.deferred_products import DeferredProducts, defer_products

SHAPE = LlamaConfig(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, attention_bias=True, mlp_bias=True, initializer_range=0.2,
)  # fmt: skip
TOKENS = torch.arange(24).view(2, 12)


@pytest.mark.parametrize("checkpointing", ["none", "selective", "full"])
def test_a_model_has_the_same_gradients_later(checkpointing: str) -> None:
    wanted, model = Llama(SHAPE).double(), Llama(SHAPE).double()
    for each in (wanted, model):
        init_weights(each, 1)
        set_activation_checkpointing(each, checkpointing)
    deferred = defer_products(model)
    for each in (wanted, model):
        each(TOKENS).square().sum().backward()
    matrices = {f"{part}_proj.weight" for part in ("q", "k", "v", "o", "gate", "up", "down")}
    waiting = [name for name, p in model.named_parameters() if p.grad is None and name != "lm_head.weight"]
    assert {".".join(name.split(".")[-2:]) for name in waiting} == matrices  # biases and norms do not wait
    assert len(waiting) == 14 == len(deferred.waiting)
    work = deferred.take()
    assert not deferred.waiting
    work()
    for (name, p), (_, q) in zip(model.named_parameters(), wanted.named_parameters(), strict=True):
        if q.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-12, atol=1e-12, msg=name)


def test_works_are_apart_and_add_up() -> None:
    deferred, weight = DeferredProducts(), torch.nn.Parameter(torch.randn(3, 2, dtype=torch.float64))
    xs = [torch.randn(4, 2, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    works = []
    for x in xs:
        deferred.product(x, weight, None).sum().backward()
        works.append(deferred.take())
    assert weight.grad is None
    works[1]()
    ones = torch.ones(4, 3, dtype=torch.float64)
    torch.testing.assert_close(weight.grad, ones.mT @ xs[1].detach())
    works[0]()
    torch.testing.assert_close(weight.grad, ones.mT @ (xs[0] + xs[1]).detach())


def test_frozen_weights_and_evaluation_put_nothing_off() -> None:
    deferred = DeferredProducts()
    frozen = torch.nn.Parameter(torch.randn(3, 2), requires_grad=False)
    x = torch.randn(4, 2, requires_grad=True)
    deferred.product(x, frozen, None).sum().backward()
    assert x.grad is not None
    with torch.no_grad():
        deferred.product(x, torch.nn.Parameter(torch.randn(3, 2)), None)
    assert not deferred.waiting


def test_an_input_without_gradient_makes_the_weights_at_once() -> None:
    deferred, weight = DeferredProducts(), torch.nn.Parameter(torch.randn(3, 2))
    x = torch.randn(4, 2)
    deferred.product(x, weight, None).sum().backward()
    torch.testing.assert_close(weight.grad, torch.ones(4, 3).mT @ x)


def test_other_products_are_refused() -> None:
    model = Llama(SHAPE)
    set_linear_product(model, lambda x, weight, bias: x @ weight.mT)
    with pytest.raises(ValueError, match="set_linear_product"):
        defer_products(model)
