"""Custom operators that eager code calls without the dispatcher.

As a custom operator a kernel survives `torch.compile`, has gradients there and is seen by tracers, but a call of one
from Python goes through several layers of torch, 10 to 200 µs by machine: a prompt of an 8B model makes 200 such calls
and ran at a third of its speed. Where nothing traces, the function itself does, behind an ordinary autograd function
where gradients are wanted.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Operator:
    """A custom operator and the function that it stands for.

    Attributes:
        definition: what torch knows.
        function: called directly with plain tensors, outside of tracing.
    """

    def __init__(self, definition: Any, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.function = function
        self.register_fake = definition.register_fake
        self._with_gradients: type[torch.autograd.Function] | None = None

    def __call__(self, *arguments: Any) -> Any:
        # A subclass of Tensor (fake, DTensor, …) has its own idea of an operator.
        if torch.compiler.is_compiling() or any(isinstance(a, Tensor) and type(a) not in _PLAIN for a in arguments):
            return self.definition(*arguments)
        if not torch.is_grad_enabled():
            return self.function(*arguments)
        if self._with_gradients is None:  # nor has the operator any: it says so itself
            return self.definition(*arguments)
        return self._with_gradients.apply(*arguments)

    def register_autograd(self, backward: Callable[..., Any], *, setup_context: Callable[..., None]) -> None:
        """As of a custom operator: `setup_context(ctx, inputs, output)`, `backward(ctx, *gradients)`."""
        self.definition.register_autograd(backward, setup_context=setup_context)
        parts = {
            "forward": staticmethod(self.function),
            "setup_context": staticmethod(setup_context),
            "backward": staticmethod(backward),
        }
        self._with_gradients = type(self.function.__name__, (torch.autograd.Function,), parts)


_PLAIN = (Tensor, torch.nn.Parameter)


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: the function as a custom operator."""

    def define(function: Callable[..., Any]) -> Operator:
        return Operator(torch.library.custom_op(name, function, mutates_args=mutates_args), function)

    return define
