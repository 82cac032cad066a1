"""For each parameter of the configuration: which dimension it lets one split, over what, and how many ways."""

from __future__ import annotations

from dataclasses import dataclass

from llama_core import LlamaConfig

MOST = 64
"""Processes of the largest split listed."""


@dataclass(frozen=True)
class Split:
    """What a parameter means for a parallel layout."""

    parameter: str
    value: str
    dimension: str
    over: str
    """The mesh dimension, or a dash for none."""
    ways: str
    """The numbers of processes that it allows, up to MOST."""
    why: str


def splits(config: LlamaConfig) -> tuple[Split, ...]:
    """One line for each parameter that shapes the model, and for the batch, which the layout adds to them.

    The rules are those of `llama_parallel.check_layout`.
    """
    heads, kv_heads, inner = config.num_attention_heads, config.kv_heads, config.intermediate_size
    if config.tie_word_embeddings:
        tied = "tied: the first and the last pipeline stage both need the table, and add its gradients"
    else:
        tied = "not tied: the first and the last pipeline stage each hold a table of their own"
    return (
        Split(
            "num_attention_heads",
            str(heads),
            "heads: rows of q_proj, columns of o_proj",
            "tp",
            _list(_divisors(heads)),
            "heads never look at each other; their sum after o_proj is one reduction",
        ),
        Split(
            "num_key_value_heads",
            str(kv_heads),
            "heads: rows of k_proj and v_proj, and the cache",
            "tp",
            f"{_list(_divisors(kv_heads))}, multiples of {kv_heads}",
            f"beyond {kv_heads}, ranks hold copies of the same heads: that saves no more memory",
        ),
        Split(
            "intermediate_size",
            str(inner),
            "channels: rows of gate_proj and up_proj, columns of down_proj",
            "tp",
            _list(_divisors(inner)),
            "SwiGLU works channel by channel; the sum after down_proj is one reduction",
        ),
        Split(
            "vocab_size",
            str(config.vocab_size),
            "rows of embed_tokens and lm_head",
            "tp",
            f"1 to {min(MOST, config.vocab_size)}",
            "shares may be unequal; the loss joins a maximum, a sum and one score of each row, not the logits",
        ),
        Split(
            "heads and channels together",
            "",
            "every matrix of a layer",
            "tp",
            _list([n for n in _divisors(heads) if inner % n == 0 and _shares_kv(n, kv_heads)]),
            "what the lines above allow at once",
        ),
        Split(
            "num_hidden_layers",
            str(config.num_hidden_layers),
            "layers, in order",
            "pp",
            f"1 to {min(MOST, config.num_hidden_layers)}",
            "a stage hands the residual stream to the next; stages need not be equal",
        ),
        Split(
            "max_position_embeddings",
            str(config.max_position_embeddings),
            "tokens of a sequence",
            "cp",
            "2·cp divides the sequence",
            "only attention looks from token to token: keys and values travel in a ring; two pieces for each rank make "
            "causal work equal",
        ),
        Split(
            "hidden_size",
            str(config.hidden_size),
            "none in motion; the rows of every parameter at rest",
            "dp_shard",
            "any",
            "every product sums over it and norms need all of it, so FSDP gathers a layer before it works",
        ),
        Split(
            "batch of a step",
            "",
            "rows of the batch",
            "dp",
            "dp divides it",
            "rows never look at each other; gradients are averaged once a step",
        ),
        Split("head_dim", str(config.head_dim), "none", "—", "1", "a score q·k is one sum over it"),
        Split("tie_word_embeddings", str(config.tie_word_embeddings).lower(), "none", "—", "—", tied),
        Split(
            "rope_theta, rope_type",
            f"{config.rope.rope_theta:,g}, {config.rope.rope_type}",
            "none",
            "—",
            "—",
            "angles follow from positions: each rank computes those of its own tokens",
        ),
        Split(
            "rms_norm_eps",
            f"{config.rms_norm_eps:g}",
            "none",
            "—",
            "—",
            "norm weights are small: every tp rank holds them whole",
        ),
    )


def _shares_kv(ways: int, kv_heads: int) -> bool:
    return kv_heads % ways == 0 or ways % kv_heads == 0


def _divisors(n: int) -> list[int]:
    return [d for d in range(1, min(n, MOST) + 1) if n % d == 0]


def _list(ways: list[int]) -> str:
    return ", ".join(map(str, ways))
