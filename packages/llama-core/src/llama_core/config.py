"""The shape of a Llama: every key of the Hugging Face Llama config, checked, immutable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from .rope_config import RopeConfig

_ROPE_KEYS = ("rope_theta", "rope_scaling", "rope_parameters")


@dataclass(frozen=True)
class LlamaConfig:
    """Configuration of a Llama model; names, meanings and defaults are those of Hugging Face's `LlamaConfig`.

    Raises:
        ValueError: a value out of range or a setting this model does not have; the message names value and range.
    """

    vocab_size: int = 32000
    hidden_size: int = 4096
    intermediate_size: int = 11008
    num_hidden_layers: int = 32
    num_attention_heads: int = 32
    num_key_value_heads: int | None = None
    """Heads of keys and values (grouped-query attention); `None` means as many as query heads."""
    head_dim: int | None = None
    """Width of a head; `None` means hidden_size / num_attention_heads."""
    hidden_act: str = "silu"
    max_position_embeddings: int = 2048
    initializer_range: float = 0.02
    """Standard deviation of freshly drawn weights."""
    rms_norm_eps: float = 1e-6
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    attention_dropout: float = 0.0
    use_cache: bool = True
    pretraining_tp: int | None = 1
    bos_token_id: int | None = 1
    eos_token_id: int | tuple[int, ...] | None = 2
    pad_token_id: int | None = None
    rope: RopeConfig = field(default_factory=RopeConfig)
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of config.json that this class does not know; `to_hf` writes them back unchanged."""

    def __post_init__(self) -> None:
        if self.num_key_value_heads is None:
            object.__setattr__(self, "num_key_value_heads", self.num_attention_heads)
        for name in _BOOLEAN:
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be true or false")
        for name in _NUMBERS:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e308:
                raise ValueError(f"{name} is {value!r}; it must be a number")  # JSON's may be beyond every float
        for name in _POSITIVE:
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                raise ValueError(f"{name} is {value!r}; it must be a whole number of at least 1 and below 2^63")
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size {self.hidden_size} is not a multiple of num_attention_heads "
                    f"{self.num_attention_heads}; give head_dim"
                )
            object.__setattr__(self, "head_dim", self.hidden_size // self.num_attention_heads)
        width: object = self.head_dim
        if isinstance(width, bool) or not isinstance(width, int) or width < 2 or width % 2:
            raise ValueError(f"head_dim is {self.head_dim!r}; rotary positions need an even number of at least 2")
        assert self.num_key_value_heads is not None
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads {self.num_attention_heads} is not a multiple of num_key_value_heads "
                f"{self.num_key_value_heads}"
            )
        if self.hidden_act != "silu":
            raise ValueError(f"hidden_act is {self.hidden_act!r}; a Llama uses 'silu'")
        if self.attention_dropout != 0:
            raise ValueError(f"attention_dropout is {self.attention_dropout}; only 0 is supported")
        if not 0 < self.rms_norm_eps < 1:
            raise ValueError(f"rms_norm_eps is {self.rms_norm_eps}; the range is above 0 to below 1")
        if not 0 <= self.initializer_range < float("inf"):
            raise ValueError(f"initializer_range is {self.initializer_range}; it must be 0 or more")
        if not isinstance(self.rope, RopeConfig):
            raise ValueError(f"rope is {self.rope!r}; it must be a RopeConfig")
        eos: object = self.eos_token_id
        if isinstance(eos, list | tuple):  # a list, as JSON gives it, would make the configuration unhashable
            object.__setattr__(self, "eos_token_id", tuple(eos))
        given = {name: (getattr(self, name),) for name in _IDS if getattr(self, name) is not None}
        for name, ids in {"eos_token_id": self.eos_token_ids, **given}.items():  # null stands alone, not in a list
            if any(isinstance(i, bool) or not isinstance(i, int) for i in ids):
                raise ValueError(f"{name} is {getattr(self, name)!r}; it must be a token id (a whole number) or null")

    @property
    def kv_heads(self) -> int:
        """Heads of keys and values, never `None`."""
        assert self.num_key_value_heads is not None
        return self.num_key_value_heads

    @property
    def head_width(self) -> int:
        """Width of a head, never `None`."""
        assert self.head_dim is not None
        return self.head_dim

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """All end-of-sequence ids, possibly none."""
        eos = self.eos_token_id
        return () if eos is None else eos if isinstance(eos, tuple) else (eos,)

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> LlamaConfig:
        """Read a Hugging Face config dictionary, v4 or v5 spelling; unknown keys go to `extra`."""
        model_type = config.get("model_type", "llama")
        if model_type != "llama":
            raise ValueError(f"model_type is {model_type!r}; this library reads 'llama'")
        names = {f.name for f in fields(cls)} - {"rope", "extra"}
        known = {key: value for key, value in config.items() if key in names}
        for key in [key for key, value in known.items() if value is None and key not in _NULLABLE]:
            del known[key]  # null means: the default
        extra = {key: value for key, value in config.items() if key not in names and key not in _ROPE_KEYS}
        return cls(**known, rope=RopeConfig.from_hf(config), extra=extra)

    def to_hf(self) -> dict[str, Any]:
        """The config.json dictionary. Rotary keys stand in v5 spelling and in v4's, so that every reader finds them."""
        values = {f.name: getattr(self, f.name) for f in fields(self) if f.name not in ("rope", "extra")}
        if isinstance(self.eos_token_id, tuple):
            values["eos_token_id"] = list(self.eos_token_id)
        block = self.rope.to_hf()
        scaling = {key: value for key, value in block.items() if key != "rope_theta"}
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            **values,
            "rope_parameters": block,
            "rope_theta": self.rope.rope_theta,
            "rope_scaling": None if self.rope.rope_type == "default" else scaling,
            **self.extra,
        }

    @classmethod
    def from_file(cls, path: str | Path) -> LlamaConfig:
        """Read `config.json`, or the folder that holds it."""
        path = Path(path)
        path = path / "config.json" if path.is_dir() else path
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise ValueError(f"{path} does not exist") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise ValueError(f"{path} is not valid JSON: {error}") from None
        if not isinstance(data, dict):
            raise ValueError(f"{path} holds {type(data).__name__}; it must be a JSON object")
        try:
            return cls.from_hf(data)
        except (ValueError, TypeError) as error:
            raise ValueError(f"{path}: {error}") from None

    def replace(self, **changes: Any) -> LlamaConfig:
        """A copy with some keys changed and checked anew.

        A head width of hidden_size / num_attention_heads and a number of key/value heads equal to that of query
        heads are taken as derived: they follow, unless `changes` names them.
        """
        derived = self.hidden_size // self.num_attention_heads
        if (
            "head_dim" not in changes
            and self.head_dim == derived
            and {"hidden_size", "num_attention_heads"} & set(changes)
        ):
            changes["head_dim"] = None
        if self.num_key_value_heads == self.num_attention_heads and "num_attention_heads" in changes:
            changes.setdefault("num_key_value_heads", None)
        return replace(self, **changes)


_POSITIVE = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "max_position_embeddings",
)
_NULLABLE = ("bos_token_id", "eos_token_id", "pad_token_id", "pretraining_tp")
_BOOLEAN = tuple(f.name for f in fields(LlamaConfig) if isinstance(f.default, bool))
_NUMBERS = ("initializer_range", "rms_norm_eps", "attention_dropout")
_IDS = ("bos_token_id", "pad_token_id")
