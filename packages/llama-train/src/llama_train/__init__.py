"""Training Llama models, from one CPU to many hosts."""

from typing import TYPE_CHECKING

from .config import TrainConfig as TrainConfig
from .config_file import load_config as load_config

if TYPE_CHECKING:
    from .loop import TrainResult as TrainResult
    from .loop import train as train


def __getattr__(name: str) -> object:
    # `train` needs torch, which takes seconds to import; the command line's help must not wait for it.
    if name in ("train", "TrainResult"):
        from . import loop

        return getattr(loop, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
