"""Custom operators that inference calls without the dispatcher.

As a custom operator a kernel survives `torch.compile` and has gradients, but a call of one from Python goes through
several layers of torch, 10 to 200 µs by machine: a prompt of an 8B model makes 200 such calls and ran at a third of its
speed. In inference mode nobody records and nobody traces, and the function itself does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


class Operator:
    """A custom operator and the function that it stands for.

    Attributes:
        definition: what torch knows (`torch.library.opcheck` takes it).
        function: called directly in inference mode, with plain tensors, outside of tracing.
    """

    def __init__(self, definition: Any, function: Callable[..., Any]) -> None:
        self.definition = definition
        self.function = function
        self.register_fake = definition.register_fake
        self.register_autograd = definition.register_autograd

    def __call__(self, *arguments: Any) -> Any:
        if not torch.compiler.is_compiling() and torch.is_inference_mode_enabled() and type(arguments[0]) is Tensor:
            return self.function(*arguments)
        return self.definition(*arguments)


def operator(name: str, mutates_args: tuple[str, ...] = ()) -> Callable[[Callable[..., Any]], Operator]:
    """Decorator: the function as a custom operator; its first argument is a tensor."""

    def define(function: Callable[..., Any]) -> Operator:
        return Operator(torch.library.custom_op(name, function, mutates_args=mutates_args), function)

    return define
