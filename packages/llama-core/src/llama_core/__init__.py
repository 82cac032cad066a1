"""The Llama model and everything about its files: checkpoints, tokenizers, chat templates."""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .attention import Attend as Attend
    from .attention import PackedAttend as PackedAttend
    from .attention import PaddedAttend as PaddedAttend
    from .attention import causal_attend as causal_attend
    from .attention import plain_attend as plain_attend
    from .attention import positions_from_documents as positions_from_documents
    from .attention import positions_from_mask as positions_from_mask
    from .attention import sdpa as sdpa
    from .compile import compile_layers as compile_layers
    from .config import LlamaConfig as LlamaConfig
    from .detokenizer import IncrementalDetokenizer as IncrementalDetokenizer
    from .errors import CheckpointError as CheckpointError
    from .generate import generate_naive as generate_naive
    from .generation_config import GenerationConfig as GenerationConfig
    from .generation_config import load_generation_config as load_generation_config
    from .init import init_weights as init_weights
    from .linear import set_linear_product as set_linear_product
    from .load import load_model as load_model
    from .model import Llama as Llama
    from .ops import Ops as Ops
    from .packing import pack_projections as pack_projections
    from .presets import PRESETS as PRESETS
    from .presets import preset as preset
    from .recompute import set_activation_checkpointing as set_activation_checkpointing
    from .rope_config import RopeConfig as RopeConfig
    from .sampling import filter_logits as filter_logits
    from .sampling import sample as sample
    from .save import save_model as save_model
    from .tokenizer import Tokenizer as Tokenizer
    from .tokenizer import load_tokenizer as load_tokenizer

# Each is imported when it is first asked for: torch takes seconds, and whoever only tokenizes does not wait for it.
_LATER = {
    "Attend": "attention",
    "PackedAttend": "attention",
    "PaddedAttend": "attention",
    "causal_attend": "attention",
    "plain_attend": "attention",
    "positions_from_documents": "attention",
    "positions_from_mask": "attention",
    "sdpa": "attention",
    "compile_layers": "compile",
    "LlamaConfig": "config",
    "IncrementalDetokenizer": "detokenizer",
    "CheckpointError": "errors",
    "generate_naive": "generate",
    "GenerationConfig": "generation_config",
    "load_generation_config": "generation_config",
    "init_weights": "init",
    "set_linear_product": "linear",
    "load_model": "load",
    "Llama": "model",
    "Ops": "ops",
    "pack_projections": "packing",
    "PRESETS": "presets",
    "preset": "presets",
    "set_activation_checkpointing": "recompute",
    "RopeConfig": "rope_config",
    "filter_logits": "sampling",
    "sample": "sampling",
    "save_model": "save",
    "Tokenizer": "tokenizer",
    "load_tokenizer": "tokenizer",
}


def __getattr__(name: str) -> object:
    if name not in _LATER:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f".{_LATER[name]}", __name__), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_LATER})
