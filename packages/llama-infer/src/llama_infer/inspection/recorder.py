"""A pass of the model taken apart: each operation's shapes, arithmetic, bytes and time, and each layer's output.

Nothing of the model is changed for it. Its own seams carry the recorder: the operations (`Ops`) it is built with, the
product of its linear layers, the attention of a call, and hooks on its layers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from llama_core import Llama, Ops, causal_attend, set_linear_product

# Shape legend: B batch, S sequence, H query heads, K key/value heads, D head width, E hidden, F feed-forward,
# V vocabulary

T = TypeVar("T", Tensor, tuple[Tensor, Tensor])


@dataclass(frozen=True)
class Operation:
    """One operation of one pass."""

    name: str
    layer: int | None
    """None before the first layer and after the last."""
    inputs: tuple[tuple[int, ...], ...]
    output: tuple[int, ...]
    flops: int
    """Additions and multiplications, a product and its sum counted as two."""
    read: int
    """Bytes of inputs and weights; what a cache keeps is not known, and not subtracted."""
    written: int
    seconds: float


@dataclass
class Recorder:
    """Collects a pass. Build the model with `ops`, then call it inside `recording`.

    Args:
        keep: the layer whose queries, keys and values are kept.
    """

    keep: int = 0
    operations: list[Operation] = field(default_factory=list)
    hidden: list[Tensor] = field(default_factory=list)
    """The residual stream (B, S, E) after each layer."""
    layer_seconds: list[float] = field(default_factory=list)
    kept: tuple[Tensor, Tensor, Tensor] | None = None
    """Of layer `keep`: q (B, S, H, D), k and v (B, S, K, D), rotary positions applied."""
    _layer: int | None = None
    _plain: Ops = field(default_factory=Ops)

    @property
    def ops(self) -> Ops:
        """The plain operations, recorded."""
        return Ops(
            rms_norm=self._rms_norm,
            add_rms_norm=self._add_rms_norm,
            rope=self._rope,
            swiglu=self._swiglu,
            linear_cross_entropy=self._plain.linear_cross_entropy,
        )

    @contextmanager
    def recording(self, model: Llama) -> Iterator[None]:
        """Record the passes of `model`; whatever was recorded before is forgotten.

        Raises:
            ValueError: the model has not been built with this recorder's `ops`, or has no layer `keep`.
        """
        if model.ops.rms_norm != self._rms_norm:
            raise ValueError("the model computes with other operations; build it with this recorder's `ops`")
        if not 0 <= self.keep < len(model.model.layers):
            raise ValueError(f"layer is {self.keep}; the model's are 0 to {len(model.model.layers) - 1}")
        self.operations, self.hidden, self.layer_seconds, self.kept = [], [], [], None
        names = {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Linear | nn.Embedding)}
        # The embedding may share its weight with the head; only the head is a product.
        names |= {id(m.weight): name for name, m in model.named_modules() if isinstance(m, nn.Linear)}

        def product(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            rows, flops = x.numel() // x.shape[-1], 2 * weight.numel()
            flops = rows * (flops + (0 if bias is None else len(bias)))
            name = names.get(id(weight), "linear").rpartition(".")[2]
            inputs = (x, weight) if bias is None else (x, weight, bias)
            return self._timed(name, flops, inputs, lambda: F.linear(x, weight, bias))

        started: list[float] = []
        hooks = []
        for index, layer in enumerate(model.model.layers):

            def before(module: nn.Module, inputs: Any, index: int = index) -> None:
                self._layer = index
                started.append(time.perf_counter())

            def after(module: nn.Module, inputs: Any, output: Tensor) -> None:
                _wait(output)
                self.layer_seconds.append(time.perf_counter() - started.pop())
                self._layer = None
                self.hidden.append(output)

            hooks += [layer.register_forward_pre_hook(before), layer.register_forward_hook(after)]
        embedding = model.model.embed_tokens
        assert embedding is not None
        hooks.append(embedding.register_forward_pre_hook(lambda module, inputs: started.append(time.perf_counter())))
        hooks.append(embedding.register_forward_hook(lambda module, inputs, x: self._embedded(inputs[0], x, started)))
        set_linear_product(model, product)
        try:
            yield
        finally:
            set_linear_product(model, F.linear)
            for hook in hooks:
                hook.remove()

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Causal attention, recorded: `model(tokens, attend=recorder.attend)`."""
        if layer == self.keep:
            self.kept = (q, k, v)
        batch, length, heads, width = q.shape
        pairs = batch * heads * length * (length + 1) // 2  # a query sees itself and what stands before it
        # q·k and shares·v; then scale, maximum, subtraction, exponential, sum and division of softmax.
        flops = pairs * (4 * width + 6)
        return self._timed("attend", flops, (q, k, v), lambda: causal_attend(layer, q, k, v))

    def _embedded(self, tokens: Tensor, x: Tensor, started: list[float]) -> None:
        seconds = time.perf_counter() - started.pop()
        rows = x.numel() * x.element_size()  # read from the table, and written again
        shapes = (tuple(tokens.shape),)
        self.operations.append(
            Operation("embed_tokens", None, shapes, tuple(x.shape), 0, rows + tokens.nbytes, rows, seconds)
        )

    def _rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        name = "input_layernorm" if self._layer is not None else "norm"
        # square, sum, scale, weight
        return self._timed(name, 4 * x.numel(), (x, weight), lambda: self._plain.rms_norm(x, weight, eps))

    def _add_rms_norm(self, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        def run() -> tuple[Tensor, Tensor]:
            return self._plain.add_rms_norm(x, residual, weight, eps)

        return self._timed("post_attention_layernorm", 5 * x.numel(), (x, residual, weight), run)

    def _rope(self, q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
        # two products and a sum for each channel
        return self._timed(
            "rope", 3 * (q.numel() + k.numel()), (q, k, cos, sin), lambda: self._plain.rope(q, k, cos, sin)
        )

    def _swiglu(self, gate: Tensor, up: Tensor) -> Tensor:
        # negation, exponential, sum, division, product
        return self._timed("swiglu", 5 * gate.numel(), (gate, up), lambda: self._plain.swiglu(gate, up))

    def _timed(self, name: str, flops: int, inputs: tuple[Tensor, ...], run: Callable[[], T]) -> T:
        _wait(inputs[0])
        start = time.perf_counter()
        result = run()
        outputs: tuple[Tensor, ...] = (result,) if isinstance(result, Tensor) else result
        _wait(outputs[0])
        seconds = time.perf_counter() - start
        shapes = tuple(tuple(x.shape) for x in inputs)
        read, written = sum(x.nbytes for x in inputs), sum(x.nbytes for x in outputs)
        self.operations.append(
            Operation(name, self._layer, shapes, tuple(outputs[0].shape), flops, read, written, seconds)
        )
        return result


def _wait(x: Tensor) -> None:
    """A GPU works on its own; a clock read before it is done shows the launch alone."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)
