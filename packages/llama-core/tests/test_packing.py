"""pack_projections: one product instead of three, the same numbers, the same names, one memory."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, pack_projections
from llama_core.packing import Packable

Make = Callable[..., Llama]
TOKENS = torch.arange(14).view(2, 7)


def packed(make_t0: Make, **changes: object) -> tuple[Llama, Llama]:
    plain, model = make_t0(**changes), make_t0(**changes)
    pack_projections(model)
    return plain, model


def assert_views(model: Llama) -> None:
    """Neighbouring projections lie behind each other in one storage, which is the joined matrix's."""
    joined = [module for module in model.modules() if isinstance(module, Packable)]
    assert len(joined) == 4
    for module in joined:
        assert module._packed is not None
        layers = [getattr(module, name) for name in module.packs]
        for name, whole in zip(("weight", "bias"), module._packed, strict=True):
            if whole is None:
                continue
            parts: list[Tensor] = [getattr(layer, name) for layer in layers]
            assert parts[0].data_ptr() == whole.data_ptr()
            for a, b in pairwise(parts):
                assert b.data_ptr() == a.data_ptr() + a.nbytes
            assert sum(part.numel() for part in parts) == whole.numel()


def same_logits(model: Llama, plain: Llama, atol: float = 1e-6) -> None:
    """Equal up to the order of summation, which the matrix product may choose by the number of columns."""
    got, expected = model.logits(model(TOKENS)), plain.logits(plain(TOKENS))
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0, atol=atol)


class Products(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.count += func.name().split(".")[0] in ("aten::mm", "aten::addmm")
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "changes", [{}, {"attention_bias": True, "mlp_bias": True}, {"num_key_value_heads": 4}], ids=str
)
def test_same_logits_names_and_values_in_fewer_products(make_t0: Make, changes: dict[str, object]) -> None:
    plain, model = packed(make_t0, **changes)
    same_logits(model, plain)
    assert_views(model)
    before, after = plain.state_dict(), model.state_dict()
    assert list(before) == list(after)
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert model.num_parameters() == plain.num_parameters()
    with torch.no_grad(), Products() as separate:
        plain(TOKENS)
    with torch.no_grad(), Products() as joined:
        model(TOKENS)
    assert (separate.count, joined.count) == (2 * 7, 2 * 4)


def test_memory_is_that_of_the_parameters(make_t0: Make) -> None:
    _, model = packed(make_t0)
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()}
    assert sum(storages.values()) == 4 * model.num_parameters()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_survives_a_cast(make_t0: Make, dtype: torch.dtype) -> None:
    plain, model = packed(make_t0)
    same_logits(model.to(dtype), plain.to(dtype), atol=2e-3 if dtype == torch.bfloat16 else 1e-12)
    assert_views(model)


def test_survives_a_deepcopy_and_a_pickle(make_t0: Make) -> None:
    plain, model = packed(make_t0)
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(model), torch.load(buffer, weights_only=False)):
        assert_views(other)
        same_logits(other, plain)
        with torch.no_grad():
            other.model.layers[0].self_attn.q_proj.weight.zero_()
        assert (other(TOKENS) - plain(TOKENS)).abs().max() > 1e-3  # the copy reads its own weights …
    same_logits(model, plain)  # … and the original is untouched


def test_loading_writes_through(make_t0: Make) -> None:
    _, model = packed(make_t0)
    other = make_t0(std=0.3)
    model.load_state_dict(other.state_dict())
    assert_views(model)
    same_logits(model, other)


def test_assigned_or_replaced_weights_are_used(make_t0: Make) -> None:
    _, model = packed(make_t0)
    other = make_t0(std=0.3)
    model.load_state_dict(other.state_dict(), assign=True)
    same_logits(model, other)
    pack_projections(model)
    assert_views(model)
    for changed in (model, other):
        torch.manual_seed(0)
        changed.model.layers[1].mlp.up_proj = nn.Linear(32, 64, bias=False)
    same_logits(model, other)


def test_meta_and_to_empty(make_t0: Make) -> None:
    plain = make_t0()
    with torch.device("meta"):
        model = Llama(plain.config)
    pack_projections(model)
    model = model.to_empty(device="cpu")
    model.load_state_dict(plain.state_dict())
    assert_views(model)
    same_logits(model, plain)


def test_twice_is_once(make_t0: Make) -> None:
    plain, model = packed(make_t0)
    pack_projections(model)
    assert_views(model)
    same_logits(model, plain)


def test_a_layer_of_another_kind_is_an_error(make_t0: Make) -> None:
    class Adapted(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return 2 * super().forward(input)

    model = make_t0()
    model.model.layers[0].self_attn.k_proj = Adapted(32, 16, bias=False)
    with pytest.raises(ValueError, match="k_proj is a Adapted; only ordinary linear layers"):
        pack_projections(model)
    model.model.layers[0].self_attn.k_proj = nn.Identity()
    with pytest.raises(ValueError, match="k_proj is a Identity"):
        pack_projections(model)
