"""Names and shapes of every stored parameter of a Llama, from its configuration alone.

Checkpoints are checked against this before anything is built, so that a damaged config.json (a billion layers)
costs nothing. A test holds it equal to the parameters of `Llama`.
"""

from __future__ import annotations

from .config import LlamaConfig

Shape = tuple[int, ...]


def layer_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Parameters of one decoder layer, named from the layer on, in the order of the model."""
    hidden, inner = config.hidden_size, config.intermediate_size
    query, key = config.num_attention_heads * config.head_width, config.kv_heads * config.head_width
    attention = {
        "q_proj": (query, hidden),
        "k_proj": (key, hidden),
        "v_proj": (key, hidden),
        "o_proj": (hidden, query),
    }
    mlp = {"gate_proj": (inner, hidden), "up_proj": (inner, hidden), "down_proj": (hidden, inner)}
    shapes: dict[str, Shape] = {"input_layernorm.weight": (hidden,)}
    for prefix, linears, bias in (("self_attn", attention, config.attention_bias), ("mlp", mlp, config.mlp_bias)):
        if prefix == "mlp":
            shapes["post_attention_layernorm.weight"] = (hidden,)
        for name, shape in linears.items():
            shapes[f"{prefix}.{name}.weight"] = shape
            if bias:
                shapes[f"{prefix}.{name}.bias"] = shape[:1]
    return shapes


def parameter_shapes(config: LlamaConfig) -> dict[str, Shape]:
    """Hugging Face name → shape of every parameter. A tied head is the embedding and is not listed."""
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (config.vocab_size, config.hidden_size)}
    layer = layer_shapes(config)
    for index in range(config.num_hidden_layers):
        shapes.update({f"model.layers.{index}.{name}": shape for name, shape in layer.items()})
    shapes["model.norm.weight"] = (config.hidden_size,)
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, config.hidden_size)
    return shapes
