"""What ring attention sends, and when; its values are tested in test_context_parallel.py."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from llama_core import Llama, LlamaConfig, init_weights
from llama_core.model import DecoderLayer
from llama_kernels import merge_attention
from llama_parallel import ParallelConfig, ParallelPlan, build_mesh, parallelize
from llama_parallel.collectives import Axis, finish, start_shift
from llama_parallel.ring_attention import FUNCTIONS, RingAttend, join_
from llama_parallel.testing import RankError, run_ranks

T0 = LlamaConfig(
    vocab_size=128, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
    num_key_value_heads=2, head_dim=8, max_position_embeddings=64, initializer_range=0.2,
)  # fmt: skip


class Seen(TorchDispatchMode):
    """What ran, in order, also within the ring's operators; what was sent, in bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        library, name = func.name().split(".")[0].split("::")
        if func in FUNCTIONS:
            with self:
                return FUNCTIONS[func](*args)
        if library in ("_c10d_functional", "llama_kernels"):
            self.names.append({"all_to_all_single": "send", "wait_tensor": "wait"}.get(name, name))
        if name == "all_to_all_single":
            self.bytes += args[0].numel() * args[0].element_size()
        return func(*args, **(kwargs or {}))


def test_shift() -> None:
    def work(rank: int) -> Tensor:
        axis = Axis.of(build_mesh(ParallelConfig(cp=3)), "cp")
        return finish(start_shift(torch.full((2, 3), rank), axis))

    assert [found.unique().tolist() for found in run_ranks(work, 3)] == [[2], [0], [1]]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_joining_in_place_equals_merge_attention(dtype: torch.dtype) -> None:
    """Also where one part, the other, or both have no key, and where logarithms are far apart."""
    torch.manual_seed(0)
    wide = torch.promote_types(dtype, torch.float32)
    out, part = torch.randn(2, 6, 3, 8, dtype=wide), torch.randn(2, 6, 3, 8, dtype=dtype)
    lse, part_lse = (torch.randn(2, 3, 6, dtype=wide) * 3 for _ in range(2))
    none = float("-inf")
    lse[:, 0, 0], part_lse[:, 0, 0], lse[:, 1, 1], part_lse[:, 2, 2] = none, none, none, none
    lse[:, 0, 3], part_lse[:, 0, 3], lse[:, 0, 4] = 300.0, -300.0, -1e4
    for empty, rows in ((lse, out), (part_lse, part)):  # such rows come as zeros
        rows.masked_fill_(empty.isneginf().transpose(1, 2).unsqueeze(-1), 0.0)
    wanted = merge_attention(out, lse, part, part_lse)
    join_(out, lse, part, part_lse)
    for found, right in zip((out, lse), wanted, strict=True):
        torch.testing.assert_close(found, right, rtol=8 * torch.finfo(wide).eps, atol=8 * torch.finfo(wide).eps)


@pytest.mark.parametrize("size", [2, 4])
def test_transfers_and_their_order(size: int) -> None:
    """Each transfer starts before the arithmetic that hides it, and is waited for after that."""
    rows, length, heads, kv_heads, width = 2, 4, 6, 2, 8

    def work(rank: int) -> tuple[list[str], int, list[str], int]:
        attend = RingAttend(Axis.of(build_mesh(ParallelConfig(cp=size)), "cp"))
        shapes = ((rows, length, h, width) for h in (heads, kv_heads, kv_heads))
        q, k, v = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
        with Seen() as forward:
            out = attend(0, q, k, v)
        with Seen() as backward:
            out.sum().backward()
        return forward.names, forward.bytes, backward.names, backward.bytes

    kv = 2 * rows * length * kv_heads * width  # elements: K and V of a rank, as few heads as there are
    for forward, forward_bytes, backward, backward_bytes in run_ranks(work, size):
        assert forward == ["send", "attention_forward", "wait"] * (size - 1) + ["attention_forward"]
        assert forward_bytes == (size - 1) * kv * 2  # bfloat16
        first = ["send", "attention_backward", "send", "wait"]  # K, V; what they contribute; dK, dV; K, V are there
        middle = ["send", "attention_backward", "wait", "send", "wait"]
        last = ["attention_backward", "wait", "send", "wait"]
        assert backward == first + middle * (size - 2) + last
        assert backward_bytes == (size - 1) * kv * 2 + size * kv * 4  # dK and dV in float32


@pytest.mark.parametrize(("mode", "repeated"), [("none", 0), ("selective", 0), ("full", 1)])
def test_activation_checkpointing_repeats_transfers_only_if_full(mode: str, repeated: int) -> None:
    def work(rank: int) -> tuple[int, int]:
        plan = ParallelPlan(activation_checkpointing=mode)
        parallel = parallelize(Llama(T0), build_mesh(ParallelConfig(cp=2)), plan)
        tokens = torch.arange(8).view(1, 8)
        with Seen() as forward:
            hidden = parallel.forward(tokens)
        with Seen() as backward:
            hidden.sum().backward()
        return forward.names.count("send"), backward.names.count("send")

    layers = T0.num_hidden_layers
    assert run_ranks(work, 2) == [(layers, layers * (1 + 2 + repeated))] * 2


# torch 2.15's own tracer looks at .grad of every tensor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_one_graph_serves_every_number_of_documents() -> None:
    """Compiled layers see the ring as one operator; other documents do not compile them again and again."""

    def work(rank: int) -> tuple[int, float]:
        graphs = 0

        def count(graph: Any, inputs: Any) -> Any:
            nonlocal graphs
            graphs += 1
            return graph

        model = Llama(T0.replace(num_hidden_layers=1))
        init_weights(model, 0)
        parallel = parallelize(model, build_mesh(ParallelConfig(cp=2)), ParallelPlan())
        tokens, worst = torch.arange(16).view(2, 8), 0.0
        layer = model.model.layers[0]
        assert isinstance(layer, DecoderLayer)
        for number in range(2, 7):
            documents = (torch.arange(8) // number).expand(2, 8) + 10 * rank
            plain = parallel.forward(tokens, None, documents)
            layer.compile(fullgraph=True, backend=count)
            worst = max(worst, float((parallel.forward(tokens, None, documents) - plain).detach().abs().max()))
            layer._compiled_call_impl = None
        return graphs, worst

    for graphs, worst in run_ranks(work, 2):
        assert graphs <= 2  # the second is for any number
        assert worst < 1e-5


def test_what_the_ring_refuses() -> None:
    def odd(rank: int) -> None:
        q = torch.randn(1, 3, 2, 8)
        RingAttend(Axis.of(build_mesh(ParallelConfig(cp=2)), "cp"))(0, q, q, q)

    with pytest.raises(RankError, match="3 queries and 3 keys: ring attention wants as many, in two halves"):
        run_ranks(odd, 2)
    with pytest.raises(ValueError, match="'sdpa' returns no log-sum-exp"):
        RingAttend(Axis("", 2, 0), backend="sdpa")
