"""`look`: one prompt through one model, with everything the report shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from llama_core import Llama, LlamaConfig, Tokenizer
from llama_core.rope import inverse_frequencies

from .recorder import Operation, Recorder
from .stored import Stored

PASSES = 5
"""Timed passes. Times are the best of them: whatever else a machine does only ever adds."""
MOST_TOKENS = 40
"""Tokens whose attention is shown, the last ones: of more the cells would be too small to see."""
TOP = 5
"""Tokens of each line of the logit lens."""


@dataclass(frozen=True)
class Guess:
    """A next token and its probability."""

    token: str
    probability: float


@dataclass(frozen=True)
class HeadScores:
    """One head's attention among the last tokens, (R, R) each with R = min(S, MOST_TOKENS): who looks, at whom."""

    head: int
    kv_head: int
    raw: Tensor
    """q·k / √D."""
    masked: Tensor
    """The same, with minus infinity where a token would see the future."""
    shares: Tensor
    """Softmax of the rows, over all S tokens."""


@dataclass(frozen=True)
class Look:
    """Everything seen. `layer` is the one whose heads are shown."""

    name: str
    config: LlamaConfig
    dtype: str
    device: str
    prompt: str
    ids: tuple[int, ...]
    texts: tuple[str, ...]
    """What each token says by itself."""
    stored: tuple[Stored, ...]
    frequencies: tuple[float, ...]
    """Radians that each of the D/2 channel pairs turns from one token to the next."""
    layer: int
    heads: tuple[HeadScores, ...]
    operations: tuple[Operation, ...]
    layer_seconds: tuple[float, ...]
    lens: tuple[tuple[Guess, ...], ...]
    """Most probable next tokens of the last position, if the model ended after this layer."""


@torch.no_grad()
def look(
    model: Llama,
    recorder: Recorder,
    tokenizer: Tokenizer,
    prompt: str,
    *,
    name: str = "model",
    stored: Sequence[Stored] = (),
    heads: Sequence[int] = (0,),
) -> Look:
    """Run a prompt and record it.

    Args:
        model: built with `recorder.ops`.
        recorder: whose `keep` names the layer to show.
        tokenizer: the model's.
        prompt: the text.
        name: of the model, for titles.
        stored: the tensors of its file.
        heads: query heads to show.

    Raises:
        ValueError: an empty prompt, one longer than the model's context, or one with ids that the model lacks; a layer
            or head that is not there.
    """
    config = model.config
    for head in heads:
        if not 0 <= head < config.num_attention_heads:
            raise ValueError(f"head is {head}; the model's are 0 to {config.num_attention_heads - 1}")
    ids = tokenizer.encode(prompt)
    if not ids:
        raise ValueError("the prompt is empty; there is nothing to look at")
    if len(ids) > config.max_position_embeddings:
        raise ValueError(f"the prompt is {len(ids)} tokens; the model's context is {config.max_position_embeddings}")
    if max(ids) >= config.vocab_size:
        raise ValueError(f"token id {max(ids)} of the prompt is outside the model's vocabulary of {config.vocab_size}")
    weight = next(model.parameters())
    tokens = torch.tensor([ids], device=weight.device)
    passes = []
    for number in range(PASSES + 1):
        with recorder.recording(model):
            model.logits(model(tokens, attend=recorder.attend)[:, -1:])
        if number:  # the first one fills caches and starts threads
            passes.append((recorder.operations, recorder.layer_seconds))
    assert recorder.kept is not None
    q, k, _ = recorder.kept
    return Look(
        name=name,
        config=config,
        dtype=str(weight.dtype).removeprefix("torch."),
        device=str(weight.device),
        prompt=prompt,
        ids=tuple(ids),
        texts=tuple(_text(tokenizer, i) for i in ids),
        stored=tuple(stored),
        frequencies=tuple(inverse_frequencies(config)),
        layer=recorder.keep,
        heads=tuple(head_scores(q[0], k[0], head) for head in heads),
        operations=tuple(
            dataclasses.replace(same[0], seconds=min(operation.seconds for operation in same))
            for same in zip(*(operations for operations, _ in passes), strict=True)
        ),
        layer_seconds=tuple(min(same) for same in zip(*(seconds for _, seconds in passes), strict=True)),
        lens=tuple(_guesses(model, tokenizer, hidden[0, -1]) for hidden in recorder.hidden),
    )


def head_scores(q_SHD: Tensor, k_SKD: Tensor, head: int) -> HeadScores:
    """One query head's attention as the formula says it (Vaswani et al. 2017, eq. 1), in float32."""
    length, heads, width = q_SHD.shape
    kv_head = head // (heads // k_SKD.shape[1])
    last = slice(-MOST_TOKENS, None)  # all S² scores of a long prompt would fill the memory
    raw_RS = (q_SHD[last, head].float() @ k_SKD[:, kv_head].float().T / math.sqrt(width)).cpu()
    future = torch.ones_like(raw_RS, dtype=torch.bool).triu(1 + length - len(raw_RS))
    masked_RS = raw_RS.masked_fill(future, -math.inf)
    return HeadScores(head, kv_head, raw_RS[:, last], masked_RS[:, last], masked_RS.softmax(-1)[:, last])


def _text(tokenizer: Tokenizer, token: int) -> str:
    """What a token says by itself; models may have more rows than their tokenizer has tokens."""
    return tokenizer.decode([token], skip_special=False) if token < tokenizer.vocab_size else f"(row {token})"


def _guesses(model: Llama, tokenizer: Tokenizer, hidden_E: Tensor) -> tuple[Guess, ...]:
    """The logit lens (nostalgebraist 2020): final norm and head on the residual stream after some layer."""
    norm = model.model.norm
    assert norm is not None
    logits = model.logits(norm(hidden_E)).float()
    best = logits.softmax(-1).topk(min(TOP, len(logits)))
    return tuple(
        Guess(_text(tokenizer, token), probability)
        for probability, token in zip(best.values.tolist(), best.indices.tolist(), strict=True)
    )
