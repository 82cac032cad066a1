"""What a checkpoint says about rotary positions, in one form, whatever spelling its config.json uses.

Hugging Face has written this in three ways: `rope_theta` beside `rope_scaling: {"type": ...}` (early v4),
`rope_scaling: {"rope_type": ...}` (late v4), and one `rope_parameters` block that holds the theta too (v5).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_REQUIRED = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor",),
}


@dataclass(frozen=True)
class RopeConfig:
    """Rotary position embedding (Su et al. 2021, https://arxiv.org/abs/2104.09864) and its scaling.

    Keys keep Hugging Face's names. `None` means that the checkpoint does not say.

    Raises:
        ValueError: unknown `rope_type`, a missing key, or a value out of range; the message names both.
    """

    rope_type: str = "default"
    """One of `default`, `linear`, `llama3`, `yarn`."""
    rope_theta: float = 10000.0
    """Base of the geometric series of wavelengths."""
    factor: float | None = None
    """How many times longer the context has become (linear, llama3, yarn)."""
    low_freq_factor: float | None = None
    """llama3: wavelengths above original / low are divided by `factor` in full."""
    high_freq_factor: float | None = None
    """llama3: wavelengths below original / high are kept."""
    original_max_position_embeddings: int | None = None
    """Context length, in tokens, of the training before the extension (llama3, yarn)."""
    attention_factor: float | None = None
    """yarn: multiplies cos and sin; `None` derives it from `factor`."""
    beta_fast: float | None = None
    """yarn: rotations within the original context above which a frequency is kept (default 32)."""
    beta_slow: float | None = None
    """yarn: rotations within the original context below which a frequency is interpolated (default 1)."""
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True
    """yarn: round the borders of the ramp to whole dimensions."""
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    """Keys of the block that this class does not know; written back as they were."""

    def __post_init__(self) -> None:
        if self.rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_type {self.rope_type!r} is not supported; known: {', '.join(ROPE_TYPES)}")
        for name in _REQUIRED[self.rope_type]:
            if getattr(self, name) is None:
                raise ValueError(f"rope_type {self.rope_type!r} needs the key {name!r}")
        for name, value in vars(self).items():
            if name in ("rope_type", "extra") or value is None:
                continue
            if name == "truncate":
                if not isinstance(value, bool):
                    raise ValueError(f"rope key 'truncate' is {value!r}; it must be true or false")
            elif name == "original_max_position_embeddings":
                if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**63:
                    raise ValueError(
                        f"rope key {name!r} is {value!r}; it must be a whole number of at least 1 and below 2^63"
                    )
            elif isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) <= 1e308:
                raise ValueError(f"rope key {name!r} is {value!r}; it must be a finite number")
        if not self.rope_theta > 1:
            raise ValueError(f"rope_theta is {self.rope_theta}; it must be above 1")
        if self.factor is not None and self.factor < 1:
            raise ValueError(f"rope factor is {self.factor}; it must be at least 1")
        low, high = self.low_freq_factor, self.high_freq_factor
        if low is not None and high is not None and not 0 < low < high:
            raise ValueError(f"low_freq_factor {low} and high_freq_factor {high} must satisfy 0 < low < high")
        fast = 32.0 if self.beta_fast is None else self.beta_fast
        slow = 1.0 if self.beta_slow is None else self.beta_slow
        if not 0 < slow <= fast:
            raise ValueError(f"beta_slow {slow} and beta_fast {fast} must satisfy 0 < slow <= fast")
        if self.attention_factor is not None and self.attention_factor <= 0:
            raise ValueError(f"attention_factor is {self.attention_factor}; it must be above 0")

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> RopeConfig:
        """Read the block out of a whole HF config dictionary, in v4 or v5 spelling."""
        theta, original = config.get("rope_theta"), config.get("original_max_position_embeddings")
        if config.get("partial_rotary_factor") not in (None, 1):
            raise ValueError(f"partial_rotary_factor is {config['partial_rotary_factor']}; only 1 is supported")
        blocks = {name: config.get(name) for name in ("rope_parameters", "rope_scaling")}
        parsed = [cls._parse(name, block, theta) for name, block in blocks.items() if block is not None]
        if len(parsed) == 2 and parsed[0] != parsed[1]:
            raise ValueError(
                f"rope_parameters {blocks['rope_parameters']} and rope_scaling {blocks['rope_scaling']} "
                "of the same config contradict each other; keep one"
            )
        if parsed:
            inner = parsed[0].original_max_position_embeddings
            if original is not None and parsed[0].rope_type in ("llama3", "yarn") and original != inner:
                raise ValueError(
                    f"original_max_position_embeddings is {original} at the top and {inner} in the rope block; "
                    "keep one, in the block"
                )
            return parsed[0]
        return cls() if theta is None else cls(rope_theta=theta)

    @classmethod
    def _parse(cls, name: str, block: Any, theta: float | None) -> RopeConfig:
        if not isinstance(block, Mapping):
            raise ValueError(f"{name} is {block!r}; it must be an object with the key 'rope_type'")
        nested = [value for value in block.values() if isinstance(value, Mapping)]
        if nested:  # v5 may nest by layer type; a Llama has one kind of layer
            if len(nested) != len(block) or any(value != nested[0] for value in nested):
                raise ValueError(f"{name} differs between layer types: {dict(block)}; a Llama has one kind of layer")
            block = nested[0]
        rest = dict(block)
        old, new = rest.pop("type", None), rest.pop("rope_type", None)
        if old is not None and new is not None and old != new:
            raise ValueError(f"{name} names two kinds: type {old!r} and rope_type {new!r}")
        if rest.pop("partial_rotary_factor", None) not in (None, 1):
            raise ValueError(f"{name} has partial_rotary_factor {block['partial_rotary_factor']}; only 1 is supported")
        inner = rest.pop("rope_theta", None)
        if inner is not None and theta is not None and inner != theta:
            raise ValueError(f"rope_theta is {theta} at the top and {inner} in {name}; keep one")
        theta = inner if inner is not None else theta
        known = {key: rest.pop(key) for key in list(rest) if key in cls.__dataclass_fields__ and key != "extra"}
        known = {key: value for key, value in known.items() if value is not None}
        if theta is not None:
            known["rope_theta"] = theta
        return cls(rope_type=new or old or "default", **known, extra=rest)

    def to_hf(self) -> dict[str, Any]:
        """The block in v5 form: `rope_type`, `rope_theta`, and the keys that are set."""
        skip = ("rope_type", "rope_theta", "extra", "truncate")
        values = {key: value for key, value in vars(self).items() if key not in skip and value is not None}
        if not self.truncate:
            values["truncate"] = False
        return {"rope_type": self.rope_type, "rope_theta": self.rope_theta, **values, **self.extra}
