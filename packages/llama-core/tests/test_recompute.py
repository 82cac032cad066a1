"""Activation checkpointing: the same values and gradients, less kept, and no matrix product twice when selective."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, PaddedAttend, plain_attend, set_activation_checkpointing
from llama_core.recompute import MODES

Make = Callable[..., Llama]
TOKENS = torch.arange(24).view(2, 12)


class Operations(TorchDispatchMode):
    """How often each operation ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names[func.name().split(".")[0]] += 1
        return func(*args, **(kwargs or {}))

    @property
    def products(self) -> int:
        return sum(self.names[name] for name in ("aten::mm", "aten::addmm", "aten::addmm_", "aten::bmm"))

    @property
    def attentions(self) -> int:
        """Forward attention operators; the backward ones are named so."""
        return sum(n for name, n in self.names.items() if "attention" in name and "backward" not in name)


def run(model: Llama, attend: object = None) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model(TOKENS, attend=attend)
    torch.manual_seed(0)
    (hidden * torch.randn_like(hidden)).sum().backward()
    gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert len(gradients) == len(list(model.parameters())) - 1  # all but the head
    return hidden.detach(), gradients


@pytest.mark.parametrize(
    "attend", [None, plain_attend, PaddedAttend(torch.ones(2, 12))], ids=["fused", "plain", "mask"]
)
@pytest.mark.parametrize("mode", MODES)
def test_values_and_gradients_are_equal(make_t0: Make, mode: str, attend: object) -> None:
    expected, wanted = run(make_t0(attention_bias=True), attend)
    model = make_t0(attention_bias=True)
    set_activation_checkpointing(model, mode)
    hidden, gradients = run(model, attend)
    assert torch.equal(hidden, expected)
    assert gradients.keys() == wanted.keys()
    assert all(torch.equal(gradients[name], wanted[name]) for name in wanted)


def counts(model: Llama) -> tuple[Operations, Operations]:
    with Operations() as forward:
        loss = model(TOKENS).square().sum()
    with Operations() as backward:
        loss.backward()
    return forward, backward


def test_selective_recomputes_no_product_and_no_attention(make_t0: Make) -> None:
    measured = {}
    for mode in MODES:
        model = make_t0()
        set_activation_checkpointing(model, mode)
        measured[mode] = counts(model)
    (forward, none), (_, selective), (_, full) = (measured[mode] for mode in MODES)
    assert forward.products == 2 * 7
    assert forward.attentions == 2
    assert selective.products == none.products == 2 * 2 * 7  # one for each input and one for each weight
    assert selective.attentions == none.attentions == 0
    # full runs the layers again, up to the last value that the backward pass asks for: down_proj's result is not
    assert full.products == none.products + 2 * 6
    assert full.attentions == 2
    assert selective.names["aten::silu"] == full.names["aten::silu"] == 2 + none.names["aten::silu"]


class Allocations(TorchDispatchMode):
    """Weak references to the storages of all results; those not expired later are what somebody kept."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, Tensor):
                reference = StorageWeakRef(x.untyped_storage())
                self.storages[reference.cdata] = reference, x.untyped_storage().nbytes()
        return out


def bytes_kept(model: Llama) -> int:
    """Bytes, other than parameters, that stay alive between the forward and the backward pass."""
    with Allocations() as allocations:
        hidden = model(TOKENS)
    parameters = {StorageWeakRef(p.untyped_storage()).cdata for p in model.parameters()}
    alive = [size for ref, size in allocations.storages.values() if not ref.expired() and ref.cdata not in parameters]
    hidden.sum().backward()  # so that the graph, and what it keeps, lived until here
    return sum(alive)


def test_full_keeps_less_than_selective_than_none(make_t0: Make) -> None:
    measured = {}
    for mode in MODES:
        model = make_t0(num_hidden_layers=6)
        set_activation_checkpointing(model, mode)
        measured[mode] = bytes_kept(model)
    layer_input = TOKENS.numel() * 32 * 4
    assert 6 * layer_input <= measured["full"] < 10 * layer_input  # the inputs of 6 layers, and the two ends
    assert 2 * measured["full"] < measured["selective"] < 0.75 * measured["none"]


def test_no_recomputation_without_gradients(make_t0: Make) -> None:
    model = make_t0()
    set_activation_checkpointing(model, "full")
    with torch.no_grad(), Operations() as operations:
        hidden = model(TOKENS)
    assert operations.products == 2 * 7
    assert torch.equal(hidden, make_t0()(TOKENS))


def test_mode_can_be_changed_back(make_t0: Make) -> None:
    model = make_t0()
    names = list(model.state_dict())
    set_activation_checkpointing(model, "full")
    assert list(model.state_dict()) == names
    set_activation_checkpointing(model, "none")
    assert counts(model)[1].attentions == 0


def test_unknown_mode(make_t0: Make) -> None:
    with pytest.raises(ValueError, match="'some' is unknown; choose one of none, selective, full"):
        set_activation_checkpointing(make_t0(), "some")


def test_selective_keeps_what_it_is_told(make_t0: Make) -> None:
    def silus(keep: tuple[str, ...]) -> int:
        model = make_t0()
        set_activation_checkpointing(model, "selective", keep=keep)
        with Operations() as operations:
            run(model)
        return operations.names["aten::silu"]

    layers = make_t0().config.num_hidden_layers
    assert silus(()) == 2 * layers  # forward and again for backward
    assert silus(("aten::silu",)) == layers
