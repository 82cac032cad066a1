"""What tensor parallelism makes of a model: where parameters rest, what is sent, logits, and what it refuses."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

import llama_kernels
from llama_core import Llama, LlamaConfig, set_linear_product
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, parallelize
from llama_parallel.tensor_parallel import apply_tensor_parallel
from llama_parallel.testing import RankError, run_ranks

T0 = LlamaConfig(
    vocab_size=131, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip
TOKENS = torch.arange(16).view(2, 8)


class Sent(TorchDispatchMode):
    """Collectives that ran."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        library, name = func.name().split(".")[0].split("::")
        if library == "_c10d_functional" and name != "wait_tensor":
            self.names[name] += 1
        return func(*args, **(kwargs or {}))


def on_ranks(size: int, work: Any, *args: Any) -> list[Any]:
    return run_ranks(lambda rank: work(build_mesh(ParallelConfig(tp=size)), *args), size)


def test_parameters_rest_in_shards_under_their_own_names() -> None:
    def work(mesh: Any) -> dict[str, tuple[Any, ...]]:
        with torch.device("meta"):
            model = Llama(T0.replace(attention_bias=True))
        apply_tensor_parallel(model, mesh)
        found = {}
        for name, p in model.named_parameters():
            assert isinstance(p, DTensor)
            assert p.device.type == "meta"
            found[name] = tuple(p.shape), str(p.placements[0]), tuple(p.to_local().shape)
        return found

    first, *_, last = on_ranks(4, work)
    with torch.device("meta"):
        plain = Llama(T0.replace(attention_bias=True))
    assert {name: tuple(p.shape) for name, p in plain.named_parameters()} == {n: f[0] for n, f in first.items()}
    layer = "model.layers.1."
    assert first["model.embed_tokens.weight"][2] == (33, 32)
    assert last["lm_head.weight"][2] == (32, 32)  # 131 = 33 + 33 + 33 + 32
    assert first[layer + "self_attn.q_proj.weight"][1:] == ("S(0)", (8, 32))
    assert first[layer + "self_attn.q_proj.bias"][1:] == ("S(0)", (8,))
    assert first[layer + "self_attn.k_proj.weight"][1:] == ("R", (16, 32))  # two heads for four ranks
    assert first[layer + "self_attn.o_proj.weight"][1:] == ("S(1)", (32, 8))
    assert first[layer + "self_attn.o_proj.bias"][1:] == ("R", (32,))
    assert first[layer + "mlp.down_proj.weight"][1:] == ("S(1)", (32, 16))
    assert first[layer + "input_layernorm.weight"][1:] == ("R", (32,))


@pytest.mark.parametrize("sequence_parallel", [True, False])
@pytest.mark.parametrize("size", [2, 4])
def test_a_model_with_weights_keeps_them(size: int, sequence_parallel: bool) -> None:
    """Each rank takes its part; hidden states, logits and the gradient through logits equal the plain model's."""
    wanted = Llama(T0).double()
    logits = wanted.logits(wanted(TOKENS))
    logits.square().mean().backward()
    right = {name: p.grad for name, p in wanted.named_parameters()}

    def work(mesh: Any) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
        model = Llama(T0).double()
        apply_tensor_parallel(model, mesh, sequence_parallel)
        hidden = model(TOKENS)
        logits = model.logits(hidden)
        logits.square().mean().backward()
        grads = {n: p.grad.full_tensor() for n, p in model.named_parameters() if isinstance(p.grad, DTensor)}
        return hidden.detach(), logits.detach(), grads

    for rank, (hidden, found, grads) in enumerate(on_ranks(size, work)):
        whole = wanted(TOKENS).detach()
        if sequence_parallel:  # a stretch of all tokens, laid end to end
            whole = whole.flatten(0, 1).chunk(size)[rank].unflatten(0, (len(whole), -1))
        torch.testing.assert_close(hidden, whole)
        torch.testing.assert_close(found, logits.detach())
        assert grads.keys() == right.keys()
        for name, grad in grads.items():
            torch.testing.assert_close(grad, right[name], rtol=1e-9, atol=1e-12)


def test_one_token_at_a_time_without_sequence_parallelism() -> None:
    def work(mesh: Any) -> Tensor:
        model = Llama(T0)
        apply_tensor_parallel(model, mesh, sequence_parallel=False)
        with torch.no_grad():
            return model.logits(model(TOKENS[:, :1]))

    plain = Llama(T0)
    with torch.no_grad():
        wanted = plain.logits(plain(TOKENS[:, :1]))
    for found in on_ranks(2, work):
        torch.testing.assert_close(found, wanted)


def test_communication_of_a_step() -> None:
    """Per layer: two all-gathers in, two reduce-scatters out; backward the reverse, and x once more for the weights."""

    def work(mesh: Any, mode: str) -> tuple[dict[str, int], dict[str, int]]:
        model = parallelize(Llama(T0), mesh, ParallelPlan(activation_checkpointing=mode)).model
        assert model.lm_head is not None
        with Sent() as forward:
            hidden = model(TOKENS)
            loss = model.ops.linear_cross_entropy(hidden, model.lm_head.weight, TOKENS)
        with Sent() as backward:
            loss.backward()
        return dict(forward.names), dict(backward.names)

    layers, norms = T0.num_hidden_layers, 2 * T0.num_hidden_layers + 1
    for forward, backward in on_ranks(2, work, "none"):
        # beside the layers: the embedding's reduce-scatter; hidden states and the softmax's terms for the loss
        assert forward == {"all_gather_into_tensor": 2 * layers + 2, "reduce_scatter_tensor": 2 * layers + 1}
        assert backward == {
            "all_gather_into_tensor": 2 * layers + 2 * layers + 1,
            "reduce_scatter_tensor": 2 * layers + 1,
            "all_reduce": norms,
        }
    for forward, backward in on_ranks(2, work, "selective"):
        assert forward == {"all_gather_into_tensor": 2 * layers + 2, "reduce_scatter_tensor": 2 * layers + 1}
        assert backward == {
            "all_gather_into_tensor": 4 * layers + 1 + 2 * layers,  # what enters kept products is gathered once more
            "reduce_scatter_tensor": 2 * layers + 1,  # results of communication are kept
            "all_reduce": norms,
        }


@pytest.mark.parametrize(
    ("changes", "size", "message"),
    [
        ({"num_attention_heads": 9, "num_key_value_heads": 3}, 2, "9 attention heads and .* divide over tp 2"),
        ({"intermediate_size": 65}, 2, "intermediate_size 65 must both divide"),
        ({"num_attention_heads": 12, "num_key_value_heads": 2}, 3, "tp 3 is neither a divisor nor a multiple of 2"),
        ({"vocab_size": 5}, 4, "vocab_size 5 leaves a rank of tp 4 without a row"),
    ],
)
def test_what_does_not_divide_is_refused(changes: dict[str, int], size: int, message: str) -> None:
    def work(mesh: Any) -> None:
        with torch.device("meta"):
            model = Llama(T0.replace(head_dim=8, **{"intermediate_size": 24 if size == 3 else 64} | changes))
        apply_tensor_parallel(model, mesh)

    with pytest.raises(RankError, match=message):
        on_ranks(size, work)


def test_tokens_outside_the_vocabulary_and_foreign_products_are_refused() -> None:
    def out_of_range(mesh: Any) -> None:
        model = Llama(T0)
        apply_tensor_parallel(model, mesh)
        model(TOKENS + 120)

    with pytest.raises(RankError, match=r"token 131 is outside \[0, 131\)"):
        on_ranks(2, out_of_range)

    def other_product(mesh: Any) -> None:
        model = Llama(T0)
        set_linear_product(model, lambda x, w, b: x)
        apply_tensor_parallel(model, mesh)

    with pytest.raises(RankError, match="set_linear_product has no effect"):
        on_ranks(2, other_product)


def test_a_sequence_that_does_not_divide_is_refused() -> None:
    def work(mesh: Any) -> None:
        model = Llama(T0)
        apply_tensor_parallel(model, mesh)
        model(TOKENS[:, :7])

    with pytest.raises(RankError, match=r"ValueError: dimension 1 of \(2, 7, 32\) does not divide over 2 ranks"):
        on_ranks(2, work)


def test_stages_of_a_pipeline_have_parts_missing() -> None:
    """The first stage's shard of hidden states is the last one's input."""
    plain = Llama(T0).double()
    wanted = plain.logits(plain(TOKENS)).detach()

    def work(mesh: Any) -> Tensor:
        first, last = Llama(T0).double(), Llama(T0).double()
        first.model.layers[1], first.model.norm, first.lm_head = None, None, None  # type: ignore[call-overload]
        last.model.layers[0], last.model.embed_tokens = None, None  # type: ignore[call-overload]
        for stage in (first, last):
            apply_tensor_parallel(stage, mesh)
        positions = torch.arange(TOKENS.shape[1]).unsqueeze(0)
        hidden = first.model(TOKENS, positions, first.attend)
        return last.logits(last.model(hidden, positions, last.attend)).detach()

    for found in on_ranks(2, work):
        torch.testing.assert_close(found, wanted)


def test_other_operations_stay() -> None:
    """A model built with llama_kernels' operations keeps them; only the loss is replaced."""
    ops = llama_kernels.ops(torch.device("cpu"))

    def loss_of(model: Llama) -> Tensor:
        assert model.lm_head is not None
        return model.ops.linear_cross_entropy(model(TOKENS), model.lm_head.weight, TOKENS).detach()

    def work(mesh: Any) -> Tensor:
        model = Llama(T0, ops=ops).double()
        apply_tensor_parallel(model, mesh)
        assert model.ops.swiglu is ops.swiglu
        return loss_of(model)

    wanted = loss_of(Llama(T0).double())
    for found in on_ranks(2, work):
        torch.testing.assert_close(found, wanted)
