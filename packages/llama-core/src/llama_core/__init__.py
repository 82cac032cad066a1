"""The Llama model and everything about its files: checkpoints, tokenizers, chat templates."""

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
from .generation_config import GenerationConfig as GenerationConfig
from .generation_config import load_generation_config as load_generation_config
from .init import init_weights as init_weights
from .load import load_model as load_model
from .model import Llama as Llama
from .ops import Ops as Ops
from .packing import pack_projections as pack_projections
from .presets import PRESETS as PRESETS
from .presets import preset as preset
from .recompute import set_activation_checkpointing as set_activation_checkpointing
from .rope_config import RopeConfig as RopeConfig
from .tokenizer import Tokenizer as Tokenizer
from .tokenizer import load_tokenizer as load_tokenizer
