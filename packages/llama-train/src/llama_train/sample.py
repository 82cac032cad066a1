"""A text sample from the model as it stands."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llama_core import Tokenizer, generate_naive

from .config import EvaluationConfig


@torch.no_grad()
def sample_text(
    logits: Callable[[Tensor], Tensor],
    tokenizer: Tokenizer,
    config: EvaluationConfig,
    seed: int,
    device: torch.device | str = "cpu",
) -> str:
    """The prompt and its continuation; the same for the same weights and seed.

    Args:
        logits: tokens (1, S) to logits (1, S, V); with several processes all make this call.
        tokenizer, config: of the run.
        seed: of the draws.
        device: where `logits` wants its tokens.
    """
    if config.sample_chat:
        prompt = tokenizer.encode_chat([{"role": "user", "content": config.sample_prompt}])
    else:
        prompt = tokenizer.encode(config.sample_prompt, add_bos=True)
    new = generate_naive(
        logits,
        prompt,
        max_new_tokens=config.sample_tokens,
        temperature=config.sample_temperature,
        eos_ids=tokenizer.eos_ids,
        seed=seed,
        device=device,
    )
    return tokenizer.decode([*prompt, *new])
