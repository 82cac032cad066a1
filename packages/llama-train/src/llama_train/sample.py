"""A text sample from the model as it stands."""

from __future__ import annotations

import torch

from llama_core import Llama, Tokenizer, generate_naive

from .config import EvaluationConfig


@torch.no_grad()
def sample_text(model: Llama, tokenizer: Tokenizer, config: EvaluationConfig, seed: int) -> str:
    """The prompt and its continuation; the same for the same weights and seed."""
    prompt = tokenizer.encode(config.sample_prompt, add_bos=True)
    new = generate_naive(
        lambda tokens: model.logits(model(tokens)),
        prompt,
        max_new_tokens=config.sample_tokens,
        temperature=config.sample_temperature,
        eos_ids=tokenizer.eos_ids,
        seed=seed,
        device=next(model.parameters()).device,
    )
    return tokenizer.decode([*prompt, *new])
