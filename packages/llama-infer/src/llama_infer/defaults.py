"""Sampling defaults that come with a model, so that they can be shown, overridden and switched off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from llama_core import CheckpointError, load_generation_config

from . import embedded

_ONE_TO_ONE = {"temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_ONE_TO_ONE |= {"max_new_tokens": "max_tokens"}


def model_sampling(path: Path) -> tuple[dict[str, Any], list[str]]:
    """The sampling settings that the model at `path` wants, by names of SamplingParams, and notices for the user.

    They come from generation_config.json, with `do_sample: false` as temperature 0. A broken file (Llama 3.2 was
    published with one) is a notice and not an error: the model works without it.
    """
    if path == embedded.find_embedded():
        return dict(embedded.SAMPLING), [_shown(embedded.SAMPLING, f"the model card of {embedded.NAME}")]
    if not path.is_dir():
        return {}, []
    try:
        config = load_generation_config(path)
    except CheckpointError as error:
        return {}, [f"going on without generation_config.json: {error}"]
    settings = {ours: value for theirs, ours in _ONE_TO_ONE.items() if (value := getattr(config, theirs)) is not None}
    if config.do_sample is False:
        settings = {key: value for key, value in settings.items() if key == "max_tokens"} | {"temperature": 0.0}
    notices = [_shown(settings, "generation_config.json")] if settings else []
    if config.repetition_penalty not in (None, 1.0):
        notices.append(
            f"generation_config.json wants repetition_penalty {config.repetition_penalty}: not supported yet"
        )
    return settings, notices


def _shown(settings: dict[str, Any], source: str) -> str:
    pairs = ", ".join(f"{key} {value}" for key, value in settings.items())
    return f"sampling defaults from {source}: {pairs} (--generation-config off ignores them)"
