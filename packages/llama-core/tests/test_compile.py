"""compile_layers: one graph per layer without a break, few compilations, the same numbers.

The backend is `aot_eager` (the whole of torch.compile but the code generator); the slow test uses the real one.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.testing import CompileCounterWithBackend

from llama_core import Llama, PaddedAttend, compile_layers, plain_attend, set_activation_checkpointing

# dynamo looks at every tensor's .grad and hides torch's warning about it in a way that "error" overrides
pytestmark = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")

Make = Callable[..., Llama]
TOKENS = torch.arange(24).view(2, 12)


@pytest.fixture(autouse=True)
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def run(model: Llama, attend: object = None) -> tuple[Tensor, dict[str, Tensor]]:
    hidden = model(TOKENS, attend=attend)
    torch.manual_seed(0)
    (hidden * torch.randn_like(hidden)).sum().backward()
    return hidden.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_same(got: tuple[Tensor, dict[str, Tensor]], expected: tuple[Tensor, dict[str, Tensor]], atol: float) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=0, atol=atol)
    assert got[1].keys() == expected[1].keys()
    for name in expected[1]:
        scale = max(1.0, float(expected[1][name].abs().max()))
        torch.testing.assert_close(got[1][name], expected[1][name], rtol=0, atol=atol * scale)


@pytest.mark.parametrize(
    "attend", [None, plain_attend, PaddedAttend(torch.ones(2, 12))], ids=["fused", "plain", "mask"]
)
def test_values_and_gradients(make_t0: Make, attend: object) -> None:
    model = make_t0(attention_bias=True)
    names = list(model.state_dict())
    compile_layers(model, backend="aot_eager")  # fullgraph is the default: a graph break would raise
    assert list(model.state_dict()) == names
    assert_same(run(model, attend), run(make_t0(attention_bias=True), attend), 1e-6)


@pytest.mark.parametrize("layers", [2, 12])
def test_compilations_do_not_grow_with_the_layers(make_t0: Make, layers: int) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = make_t0(num_hidden_layers=layers)
    compile_layers(model, backend=counter)
    run(model)
    assert 1 <= counter.frame_count <= 2  # the second is for `layer`, from then on any number
    run(model)
    assert counter.frame_count <= 2


def test_no_graph_break(make_t0: Make) -> None:
    model = make_t0()
    cos, sin = model.model.rotary_emb(torch.arange(12)[None])
    explained = torch._dynamo.explain(model.model.layers[0])(torch.randn(2, 12, 32), cos, sin, model.attend, 0)
    assert explained.graph_count == 1
    assert explained.graph_break_count == 0


def test_a_graph_break_is_an_error(make_t0: Make) -> None:
    def breaking(layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return plain_attend(layer, q, k, v)

    model = make_t0()
    compile_layers(model, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.Unsupported, match="graph_break"):
        model(TOKENS, attend=breaking)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_with_activation_checkpointing(make_t0: Make, mode: str) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model = make_t0(num_hidden_layers=5)
    set_activation_checkpointing(model, mode)
    compile_layers(model, backend=counter)
    assert_same(run(model), run(make_t0(num_hidden_layers=5)), 1e-6)
    assert counter.frame_count <= 2


def test_other_lengths(make_t0: Make) -> None:
    counter = CompileCounterWithBackend("aot_eager")
    model, plain = make_t0(), make_t0()
    compile_layers(model, backend=counter)
    for length in (12, 9, 5, 7, 11):
        tokens = torch.arange(2 * length).view(2, length)
        torch.testing.assert_close(model(tokens), plain(tokens), rtol=0, atol=1e-6)
    assert counter.frame_count <= 4  # the length becomes a symbol


@pytest.mark.slow  # the first use of a C++ compiler builds headers for a minute
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")  # torch 2.11's own use
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile's code generator needs a C++ compiler")
def test_the_real_code_generator(make_t0: Make) -> None:
    model = make_t0(num_hidden_layers=1)  # C++ compilers are slow: one forward and one backward graph
    compile_layers(model)
    assert_same(run(model), run(make_t0(num_hidden_layers=1)), 1e-5)  # fused sums are taken in another order
