"""The slow, obvious generator: the whole sequence through the model for every token.

It is the oracle of every faster path (caches, batches, engines, parallel layouts) and takes any callable that maps
tokens to logits, so training can sample under every layout without an engine.
"""

from collections.abc import Callable, Iterable, Sequence

import torch
from torch import Tensor

from .sampling import sample


@torch.no_grad()
def generate_naive(
    logits_fn: Callable[[Tensor], Tensor],
    prompt_ids: Sequence[int],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    eos_ids: Iterable[int] = (),
    seed: int | None = None,
    device: torch.device | str = "cpu",
) -> list[int]:
    """Continue one prompt, recomputing everything at each step.

    Args:
        logits_fn: tokens (1, S) int64 → logits (1, S, V), e.g. ``lambda tokens: model.logits(model(tokens))``.
        prompt_ids: at least one token id.
        max_new_tokens: the most tokens to add, at least 0.
        temperature, top_k, top_p, min_p: as in :func:`llama_core.sampling.sample`; temperature 0 is greedy.
        eos_ids: stop after any of these is produced (it is part of the result). Those in the prompt end nothing.
        seed: of the draw; None draws anew each time.
        device: where tokens are put for ``logits_fn``.

    Returns:
        The new token ids only.

    Raises:
        ValueError: an empty prompt, a negative ``max_new_tokens``, or a sampling setting outside its range.
    """
    if len(prompt_ids) == 0:
        raise ValueError("prompt_ids must hold at least one token id, got none")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens must be at least 0, got {max_new_tokens}")
    generator = torch.Generator()
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    ends = frozenset(eos_ids)
    ids = list(prompt_ids)
    for _ in range(max_new_tokens):
        logits = logits_fn(torch.tensor([ids], dtype=torch.int64, device=device))
        ids.append(int(sample(logits[:, -1], temperature, top_k, top_p, min_p, generator)))
        if ids[-1] in ends:
            break
    return ids[len(prompt_ids) :]
