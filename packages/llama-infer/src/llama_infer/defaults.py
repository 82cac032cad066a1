"""Sampling defaults that come with a model, so that they can be shown, overridden and switched off."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from llama_core import CheckpointError, load_generation_config

from . import embedded

_NAMES = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_NAMES |= {"max_new_tokens": "max_tokens", "repetition_penalty": "repetition_penalty"}


@dataclass(frozen=True)
class ModelSampling:
    """How a model wants to be sampled."""

    settings: Mapping[str, Any] = field(default_factory=dict)
    """By names of SamplingParams."""
    source: str = ""
    """Where they come from."""
    remarks: tuple[str, ...] = ()
    """What the user should know about the source."""

    def notices(self, explicit: Mapping[str, Any] | None = None) -> list[str]:
        """Sentences that tell the user which defaults apply beside the settings that are explicit."""
        idle = set(explicit or ())
        if explicit and explicit.get("temperature") == 0:
            idle |= {"top_k", "top_p", "min_p"}  # nothing is drawn
        applied = [f"{name} {value}" for name, value in self.settings.items() if name not in idle]
        told = [f"sampling defaults from {self.source}: {', '.join(applied)}"] if applied else []
        return [*told, *self.remarks]


def model_sampling(path: Path) -> ModelSampling:
    """The sampling defaults of the model at `path`.

    They come from generation_config.json, with `do_sample: false` as temperature 0. A broken file (Llama 3.2 was
    published with one) is a remark and not an error: the model works without it.
    """
    if path == embedded.find_embedded():
        return ModelSampling(embedded.SAMPLING, f"the model card of {embedded.NAME}")
    if not path.is_dir():
        return ModelSampling()
    try:
        config = load_generation_config(path)
    except CheckpointError as error:
        return ModelSampling(remarks=(f"going on without generation_config.json: {error}",))
    settings = {ours: value for theirs, ours in _NAMES.items() if (value := getattr(config, theirs)) is not None}
    if config.do_sample is False:
        settings = {name: value for name, value in settings.items() if name in ("max_tokens", "repetition_penalty")} | {
            "temperature": 0.0
        }
    return ModelSampling(settings, "generation_config.json")
