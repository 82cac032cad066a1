"""The whole forward pass of a Llama without a module: head by head, one matrix product at a time.

    python examples/from_scratch.py

Runs on the embedded SmolLM2-135M-Instruct. Every value of the first layer and its first head is printed, with its shape
and what it is for; the other heads and layers do the same again. At the end stand the most probable next tokens, and
whether the logits equal those of `llama_core.Llama`.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from llama_core import LlamaConfig, load_model, load_tokenizer
from llama_infer.embedded import embedded_model

# In the comments: S tokens of the prompt, E hidden size, D width of a head, F feed-forward size, V vocabulary.

Show = Callable[[str, Tensor, str], None]


def forward(weights: Mapping[str, Tensor], config: LlamaConfig, ids: Sequence[int], show: Show) -> Tensor:
    """Scores of the next token after each token of the prompt.

    Args:
        weights: tensors by Hugging Face's names, all of one dtype.
        config: the shape of the model, with plain rotary positions.
        ids: S token ids.
        show: called with the name of a value, the value, and what it is.

    Returns:
        (S, V).
    """
    heads, kv_heads, width = config.num_attention_heads, config.kv_heads, config.head_width
    length = len(ids)
    if config.rope.rope_type != "default":
        raise ValueError(f"rope_type is {config.rope.rope_type!r}; this example turns plain rotary positions only")

    # --- words to vectors --------------------------------------------------------------------------------------------
    tokens = torch.tensor(ids)  # (S)
    show("tokens", tokens, "the prompt as numbers: rows of the embedding table")
    x = weights["model.embed_tokens.weight"][tokens]  # (S, E)
    show("x", x, "the residual stream: one vector for each token; each layer will add to it")

    # --- the angles of positions, the same for all layers and heads --------------------------------------------------
    pairs = torch.arange(width // 2, dtype=torch.float64)  # (D/2)
    frequencies = (config.rope.rope_theta ** (-2 * pairs / width)).float()  # (D/2)
    show("frequencies", frequencies, "radians that each pair of channels turns from one token to the next")
    angles = torch.outer(torch.arange(length).float(), frequencies)  # (S, D/2)
    show("angles", angles, "position times frequency: the first pair turns fastest, the last hardly at all")
    cos, sin = angles.cos(), angles.sin()  # (S, D/2) each
    show("cos, sin", cos, "of the angles; float32 whatever the weights are, or late positions would run together")

    for layer in range(config.num_hidden_layers):
        first_layer = layer == 0
        weight = {
            name: weights[f"model.layers.{layer}.{name}.weight"]
            for name in (
                *("input_layernorm", "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"),
                *("post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
            )
        }

        # --- attention: what each token takes from those before it ---------------------------------------------------
        normed = rms_norm(x, weight["input_layernorm"], config.rms_norm_eps)  # (S, E)
        if first_layer:
            show("normed", normed, "each vector divided by its root mean square, each channel times a learned weight")
        attention = torch.zeros_like(x)  # (S, E)
        for head in range(heads):
            talks = first_layer and head == 0
            kv_head = head // (heads // kv_heads)  # grouped-query attention: several heads of q share one of k and v
            rows = slice(head * width, (head + 1) * width)
            kv_rows = slice(kv_head * width, (kv_head + 1) * width)

            w_q = weight["self_attn.q_proj"][rows]  # (D, E)
            q = normed @ w_q.T  # (S, D)
            w_k = weight["self_attn.k_proj"][kv_rows]  # (D, E)
            k = normed @ w_k.T  # (S, D)
            w_v = weight["self_attn.v_proj"][kv_rows]  # (D, E)
            v = normed @ w_v.T  # (S, D)
            if talks:
                show("w_q", w_q, f"this head's {width} of the {heads * width} rows of q_proj")
                show("q", q, "queries: what each token looks for")
                show("w_k", w_k, f"the rows of k_proj that {heads // kv_heads} query heads share")
                show("k", k, "keys: what each token can be found by")
                show("w_v", w_v, "the rows of v_proj that they share")
                show("v", v, "values: what each token gives to those that look at it")

            q = rotate(q, cos, sin)  # (S, D)
            k = rotate(k, cos, sin)  # (S, D)
            if talks:
                show("q turned", q, "channels j and j + D/2 turned by the angle of the position ...")
                show("k turned", k, "... so that q·k depends on how far apart two tokens are, not on where they stand")

            scores = q @ k.T / math.sqrt(width)  # (S, S)
            if talks:
                show(
                    "scores",
                    scores,
                    "row: who looks, column: at whom; divided by √D to stay small",
                )
            future = torch.ones(length, length, dtype=torch.bool).triu(1)  # (S, S)
            masked = scores.masked_fill(future, -math.inf)  # (S, S)
            if talks:
                show("masked", masked, "minus infinity above the diagonal: no token sees the future")
            shares = torch.softmax(masked, dim=-1)  # (S, S)
            if talks:
                show("shares", shares, "each row sums to 1: how much of each token's value is taken")
            taken = shares @ v  # (S, D)
            if talks:
                show("taken", taken, "the mix of values that each token takes")

            w_o = weight["self_attn.o_proj"][:, rows]  # (E, D)
            added = taken @ w_o.T  # (S, E)
            attention = attention + added
            if talks:
                show("w_o", w_o, "this head's columns of o_proj; the sum over heads is what the whole o_proj gives")
                show("added", added, "what this head adds to the residual stream")
        x = x + attention  # (S, E)
        if first_layer:
            show("x", x, f"the residual stream after {heads} heads")

        # --- feed-forward: what each token makes of it, by itself -----------------------------------------------------
        normed = rms_norm(x, weight["post_attention_layernorm"], config.rms_norm_eps)  # (S, E)
        gate = normed @ weight["mlp.gate_proj"].T  # (S, F)
        up = normed @ weight["mlp.up_proj"].T  # (S, F)
        inner = gate * torch.sigmoid(gate) * up  # (S, F)
        down = inner @ weight["mlp.down_proj"].T  # (S, E)
        x = x + down  # (S, E)
        if first_layer:
            show("normed", normed, "normalised again, with weights of its own")
            show("gate", gate, "opens or closes each inner channel ...")
            show("up", up, "... of these values")
            show("inner", inner, "SwiGLU: gate · sigmoid(gate) · up")
            show("down", down, "back to the width of the residual stream")
            show("x", x, f"after layer 0 of {config.num_hidden_layers}; the others do the same with their own weights")

    # --- vectors to words --------------------------------------------------------------------------------------------
    hidden = rms_norm(x, weights["model.norm.weight"], config.rms_norm_eps)  # (S, E)
    show("hidden", hidden, "after all layers, normalised a last time")
    tied = config.tie_word_embeddings
    head_weight = weights["model.embed_tokens.weight" if tied else "lm_head.weight"]  # (V, E)
    show("head", head_weight, "one row for each token that could come next" + (": the embedding again" if tied else ""))
    logits = hidden @ head_weight.T  # (S, V)
    show("logits", logits, "a score for each; the last row decides how the prompt goes on")
    return logits


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """(S, E), (E) → (S, E)."""
    wide = x.float() if x.dtype in (torch.bfloat16, torch.float16) else x
    mean_square = (wide * wide).mean(dim=-1, keepdim=True)  # (S, 1)
    return (wide / torch.sqrt(mean_square + eps) * weight).to(x.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(S, D), (S, D/2), (S, D/2) → (S, D)."""
    half = x.shape[-1] // 2
    first, second = x[:, :half], x[:, half:]  # (S, D/2) each
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x.dtype)


def print_line(name: str, value: Tensor, meaning: str) -> None:
    print(f"{name:>12}  {tuple(value.shape)!s:14}  {meaning}")


def main() -> None:
    parser = argparse.ArgumentParser(description="A Llama's forward pass, one matrix product at a time.")
    parser.add_argument("--prompt", default="The capital of France is")
    prompt = parser.parse_args().prompt

    path = embedded_model()
    tokenizer = load_tokenizer(path)
    model = load_model(path, dtype=torch.float32)
    ids = tokenizer.encode(prompt)
    print(f"{prompt!r} is {len(ids)} tokens: {', '.join(repr(tokenizer.decode([i])) for i in ids)}\n")

    with torch.no_grad():
        logits = forward(model.state_dict(), model.config, ids, print_line)
        expected = model.logits(model(torch.tensor([ids])))[0]

    print("\nNext token:")
    probabilities, best = torch.softmax(logits[-1], dim=-1).topk(5)
    for probability, token in zip(probabilities.tolist(), best.tolist(), strict=True):
        print(f"{probability:8.1%}  {tokenizer.decode([token])!r}")

    # Both sum the same products in another order: float32 rounds each of them at 6e-8 of its size.
    difference = (logits - expected).norm() / expected.norm()
    equal = bool(difference < 1e-4) and torch.equal(logits.argmax(-1), expected.argmax(-1))
    print(f"\nLogits of llama_core.Llama: {'equal' if equal else 'NOT equal'} (relative difference {difference:.1e})")
    if not equal:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
