"""Meta's format: against a forward pass written the way Meta's code does it, whole and in shards."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from llama_core import CheckpointError, Llama, LlamaConfig, RopeConfig, load_model, preset, save_model
from llama_core.meta_config import config_from_params, feed_forward_width, params_from_config
from llama_core.parameter_shapes import parameter_shapes

Make = Callable[..., Llama]
PARAMS: dict[str, Any] = {
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "n_kv_heads": 2,
    "vocab_size": 128,
    "multiple_of": 32,
    "norm_eps": 1e-5,
    "rope_theta": 500000.0,
}
TOKENS = torch.tensor([[0, 63, 64, 127]])


def whole_weights() -> dict[str, Tensor]:
    """B04's whole model under Meta's names."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(0, 0.2, generator=generator)

    weights = {"tok_embeddings.weight": draw(128, 64), "norm.weight": draw(64), "output.weight": draw(128, 64)}
    for layer in range(2):
        shapes = {
            "attention.wq": (64, 64), "attention.wk": (32, 64), "attention.wv": (32, 64), "attention.wo": (64, 64),
            "feed_forward.w1": (192, 64), "feed_forward.w2": (64, 192), "feed_forward.w3": (192, 64),
            "attention_norm": (64,), "ffn_norm": (64,),
        }  # fmt: skip
        weights |= {f"layers.{layer}.{name}.weight": draw(*shape) for name, shape in shapes.items()}
    return weights


def write(folder: Path, shards: list[dict[str, Tensor]], **params: Any) -> Path:
    folder.mkdir()
    (folder / "params.json").write_text(json.dumps({**PARAMS, **params}))
    for index, shard in enumerate(shards):
        torch.save(shard, folder / f"consolidated.{index:02d}.pth")
    return folder


def cut(weights: dict[str, Tensor], count: int, embedding_dim: int) -> list[dict[str, Tensor]]:
    """Shards as Meta cuts them, each dimension spelled out."""
    dims = {"wq": 0, "wk": 0, "wv": 0, "wo": 1, "w1": 0, "w2": 1, "w3": 0, "output": 0, "tok_embeddings": embedding_dim}

    def part(name: str, weight: Tensor, index: int) -> Tensor:
        dim = dims.get(name.removesuffix(".weight").split(".")[-1])
        return weight.clone() if dim is None else weight.chunk(count, dim)[index].clone()

    return [{name: part(name, weight, index) for name, weight in weights.items()} for index in range(count)]


def meta_logits(weights: dict[str, Tensor], tokens: Tensor) -> Tensor:
    """Meta's forward pass: rotary positions as complex products of neighbouring channels."""
    heads, kv_heads, width, length = 4, 2, 16, tokens.shape[1]
    turns = torch.outer(torch.arange(length).double(), 500000.0 ** (-torch.arange(0, width, 2).double() / width))
    turns_complex = torch.polar(torch.ones_like(turns), turns)[None, :, None]

    def norm(x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5) * weights[name].double()

    def linear(x: Tensor, name: str) -> Tensor:
        return x @ weights[name].double().T

    def rotate(x: Tensor) -> Tensor:
        pairs = torch.view_as_complex(x.unflatten(-1, (-1, 2)))
        return torch.view_as_real(pairs * turns_complex).flatten(-2)

    x = weights["tok_embeddings.weight"].double()[tokens]
    for layer in range(2):
        at = f"layers.{layer}."
        h = norm(x, at + "attention_norm.weight")
        q, k, v = (linear(h, f"{at}attention.{n}.weight").unflatten(-1, (-1, width)) for n in ("wq", "wk", "wv"))
        q, k = rotate(q), rotate(k)
        k, v = (t.repeat_interleave(heads // kv_heads, dim=2) for t in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) / width**0.5
        scores = scores.masked_fill(torch.ones(length, length).triu(1).bool(), float("-inf"))
        out = torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), v).flatten(-2)
        x = x + linear(out, at + "attention.wo.weight")
        h = norm(x, at + "ffn_norm.weight")
        gate, up = (linear(h, f"{at}feed_forward.{n}.weight") for n in ("w1", "w3"))
        x = x + linear(F.silu(gate) * up, at + "feed_forward.w2.weight")
    return linear(norm(x, "norm.weight"), "output.weight")


def logits(model: Llama, tokens: Tensor = TOKENS) -> Tensor:
    with torch.no_grad():
        return model.logits(model(tokens))


def test_single_file_against_metas_forward_pass(tmp_path: Path) -> None:
    weights = whole_weights()
    weights["rope.freqs"] = torch.ones(8)
    model = load_model(write(tmp_path / "one", [weights]))
    assert model.config.intermediate_size == 192
    tokens = torch.arange(24)[None] * 5 % 128
    torch.testing.assert_close(logits(model, tokens).double(), meta_logits(weights, tokens), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("embedding_dim", [0, 1], ids=["L3", "L2"])
@pytest.mark.parametrize("count", [2, 4])
def test_b04_shards_join_to_the_whole(tmp_path: Path, embedding_dim: int, count: int) -> None:
    weights = whole_weights()
    one = load_model(write(tmp_path / "one", [weights]))
    shards = cut(weights, count, embedding_dim)
    if count == 2:
        sizes = {
            "attention.wq": [32, 64],
            "attention.wk": [16, 64],
            "attention.wo": [64, 32],
            "feed_forward.w2": [64, 96],
        }
        assert all(list(shards[1][f"layers.0.{name}.weight"].shape) == size for name, size in sizes.items())
        assert list(shards[0]["tok_embeddings.weight"].shape) == ([64, 64] if embedding_dim == 0 else [128, 32])
    if count == 4:  # more shards than key heads: neighbours hold the same head
        for index, shard in enumerate(shards):
            for name in ("layers.0.attention.wk.weight", "layers.1.attention.wk.weight"):
                shard[name] = weights[name].chunk(2)[index // 2].clone()
                value = name.replace("wk", "wv")
                shard[value] = weights[value].chunk(2)[index // 2].clone()
    joined = load_model(write(tmp_path / "many", shards))
    assert joined.model.embed_tokens.weight.shape == (128, 64)
    for name, tensor in one.state_dict().items():
        assert torch.equal(tensor, joined.state_dict()[name]), name
    torch.testing.assert_close(logits(joined), logits(one), atol=1e-6, rtol=0)


def test_b04_pieces_cross_shard_borders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = whole_weights()
    one = load_model(write(tmp_path / "one", [weights]))
    monkeypatch.setattr("llama_core.checkpoint.PIECE_BYTES", 64 * 4 * 48)  # 48 rows: 32 of a shard, 16 of the next
    joined = load_model(write(tmp_path / "two", cut(weights, 2, 0)))
    assert all(torch.equal(tensor, joined.state_dict()[name]) for name, tensor in one.state_dict().items())


@pytest.mark.parametrize(("present", "missing"), [((0,), "01"), ((1,), "00"), ((0, 1, 3), "02"), ((0, 2), "01")])
def test_b04_missing_shard_is_named(tmp_path: Path, present: tuple[int, ...], missing: str) -> None:
    count = 4 if max(present) > 1 else 2
    folder = write(tmp_path / "a", cut(whole_weights(), count, 0))
    for index in range(count):
        if index not in present:
            (folder / f"consolidated.{index:02d}.pth").unlink()
    with pytest.raises(CheckpointError, match=rf"missing .*consolidated\.{missing}\.pth"):
        load_model(folder)


def test_norms_that_differ_between_shards(tmp_path: Path) -> None:
    shards = cut(whole_weights(), 2, 0)
    shards[1]["layers.1.ffn_norm.weight"][3] += 1
    with pytest.raises(CheckpointError, match=r"layers\.1\.ffn_norm\.weight must be the same in all shards.*01\.pth"):
        load_model(write(tmp_path / "a", shards))


def test_shards_that_do_not_fit_together(tmp_path: Path) -> None:
    shards = cut(whole_weights(), 2, 0)
    del shards[1]["norm.weight"]
    with pytest.raises(CheckpointError, match=r"do not hold the same names: norm\.weight"):
        load_model(write(tmp_path / "a", shards))
    shards = cut(whole_weights(), 2, 0)
    shards[1]["output.weight"] = shards[1]["output.weight"].half()
    with pytest.raises(CheckpointError, match=r"differ in shape or type: output\.weight"):
        load_model(write(tmp_path / "b", shards))


def test_faults_are_listed_under_the_models_names(tmp_path: Path) -> None:
    weights = whole_weights()
    del weights["norm.weight"]
    weights["layers.0.attention.wv.weight"] = torch.zeros(3, 64)
    weights["adapter"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        load_model(write(tmp_path / "a", [weights]))
    for part in ("missing: model.norm.weight", "unexpected: adapter", "v_proj.weight is [3, 64], must be [32, 64]"):
        assert part in str(caught.value)


def test_tied_models(tmp_path: Path) -> None:
    weights = whole_weights()
    weights["output.weight"] = weights["tok_embeddings.weight"].clone()  # Meta writes both
    for index, shards in enumerate(([weights], cut(weights, 2, 0), cut(weights, 2, 1))):
        model = load_model(write(tmp_path / str(index), shards))
        assert model.lm_head.weight is model.model.embed_tokens.weight
    del weights["output.weight"]
    assert load_model(write(tmp_path / "absent", [weights])).config.tie_word_embeddings


# --- pickles that carry code ---


class Bomb:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


@pytest.mark.parametrize("archive", [True, False])
def test_a_pickle_with_code_is_refused_and_does_not_run(tmp_path: Path, archive: bool) -> None:
    marker = tmp_path / "it-ran"
    folder = write(tmp_path / "a", [])
    path = folder / "consolidated.00.pth"
    content = {**whole_weights(), "norm.weight": Bomb(marker)}
    if archive:
        torch.save(content, path)
    else:
        path.write_bytes(pickle.dumps(content["norm.weight"]))
    with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth"):
        load_model(folder)
    assert not marker.exists()
    # The same file does run code where code is allowed, so the assertion above can fail.
    code = "import sys, torch, pickle\n"
    code += "torch.load(sys.argv[1], weights_only=False)" if archive else "pickle.load(open(sys.argv[1], 'rb'))"
    subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True)
    assert marker.is_dir()


def test_what_is_no_dictionary_of_tensors(tmp_path: Path) -> None:
    contents: list[Any] = [[torch.ones(2)], {}, {"a": 3}, {3: torch.ones(2)}, {"a": torch.ones(2).to_sparse()}]
    contents += [{"a": torch.ones(2, device="meta")}]
    for index, content in enumerate(contents):
        folder = write(tmp_path / str(index), [])
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # sparse tensors warn when they are made
            torch.save(content, folder / "consolidated.00.pth")
        with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth.*(tensor|refused)"):
            load_model(folder)


def test_damaged_pth(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [whole_weights()])
    path = folder / "consolidated.00.pth"
    whole = path.read_bytes()
    for size in (0, 10, len(whole) // 2, len(whole) - 10):
        path.write_bytes(whole[:size])
        with pytest.raises(CheckpointError, match=r"consolidated\.00\.pth"):
            load_model(folder)


# --- params.json ---


@pytest.mark.parametrize(
    ("params", "width"),
    [
        ({"dim": 4096, "multiple_of": 256}, 11008),  # 7B
        ({"dim": 8192, "multiple_of": 4096, "ffn_dim_multiplier": 1.3}, 28672),  # Llama 2 70B
        ({"dim": 4096, "multiple_of": 1024, "ffn_dim_multiplier": 1.3}, 14336),  # Llama 3 8B
        ({"dim": 2048, "multiple_of": 256, "ffn_dim_multiplier": 1.5}, 8192),  # Llama 3.2 1B
        ({"dim": 16384, "multiple_of": 4096, "ffn_dim_multiplier": 1.2}, 53248),  # 405B
        ({"dim": 64, "multiple_of": 32}, 192),  # B04
    ],
)
def test_feed_forward_width(params: dict[str, Any], width: int) -> None:
    assert feed_forward_width(params) == width


LLAMA3_8B = {
    "dim": 4096, "n_layers": 32, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "multiple_of": 1024,
    "ffn_dim_multiplier": 1.3, "norm_eps": 1e-05, "rope_theta": 500000.0,
}  # fmt: skip
LLAMA2_7B = {"dim": 4096, "multiple_of": 256, "n_heads": 32, "n_layers": 32, "norm_eps": 1e-05, "vocab_size": -1}
LLAMA32_1B = {
    "dim": 2048, "n_layers": 16, "n_heads": 32, "n_kv_heads": 8, "vocab_size": 128256, "ffn_dim_multiplier": 1.5,
    "multiple_of": 256, "norm_eps": 1e-05, "rope_theta": 500000.0, "use_scaled_rope": True,
}  # fmt: skip


@pytest.mark.parametrize(
    ("params", "vocab_size", "tied", "factor", "name"),
    [
        (LLAMA2_7B, 32000, False, None, "llama-2-7b"),
        (LLAMA3_8B, 128256, False, None, "llama-3-8b"),
        ({**LLAMA3_8B, "use_scaled_rope": True}, 128256, False, 8.0, "llama-3.1-8b"),
        (LLAMA32_1B, 128256, True, 32.0, "llama-3.2-1b"),
    ],
)
def test_published_params_are_the_presets(
    params: dict[str, Any], vocab_size: int, tied: bool, factor: float | None, name: str
) -> None:
    config = config_from_params(params, vocab_size, tied, factor)
    expected = preset(name)
    ids = {"bos_token_id": config.bos_token_id, "eos_token_id": config.eos_token_id}
    assert config == expected.replace(**ids, pad_token_id=config.pad_token_id, extra=config.extra)


def test_the_factor_is_asked_for(tmp_path: Path) -> None:
    folder = write(tmp_path / "a", [whole_weights()], use_scaled_rope=True)
    with pytest.raises(CheckpointError, match=r"give rope_factor: 8 for Llama 3\.1 .*32 for Llama 3\.2"):
        load_model(folder)
    rope = RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192)
    assert load_model(folder, rope_factor=32).config.rope == rope
    said = write(tmp_path / "b", [whole_weights()], use_scaled_rope=True, rope_scaling_factor=32.0)
    assert load_model(said).config.rope == rope
    with pytest.raises(CheckpointError, match=r"rope_factor is 8, but params\.json says rope_scaling_factor 32"):
        load_model(said, rope_factor=8)
    with pytest.raises(CheckpointError, match="does not say use_scaled_rope"):
        load_model(write(tmp_path / "c", [whole_weights()]), rope_factor=8)
    with pytest.raises(ValueError, match="only folders in Meta's format"):
        load_model(tmp_path, rope_factor=8)


@pytest.mark.parametrize(
    ("vocab_size", "params", "theta", "context"),
    [
        (32000, {"norm_eps": 1e-6}, 10000.0, 2048),
        (32000, {"norm_eps": 1e-5}, 10000.0, 4096),
        (32016, {"norm_eps": 1e-5, "rope_theta": 1e6}, 1e6, 16384),
        (128256, {"norm_eps": 1e-5}, 500000.0, 8192),
        (128256, {"norm_eps": 1e-5, "max_seq_len": 77}, 500000.0, 77),
    ],
)
def test_theta_and_context(vocab_size: int, params: dict[str, Any], theta: float, context: int) -> None:
    config = config_from_params({"dim": 64, "n_layers": 1, "n_heads": 2, **params}, vocab_size, False)
    assert (config.rope.rope_theta, config.max_position_embeddings) == (theta, context)
    assert config.kv_heads == 2


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"dim": None}, "dim is missing"),
        ({"dim": "64"}, "dim is 64; it must be a whole number"),
        ({"dim": 10**30}, "dim is 10000"),
        ({"n_layers": 10**9}, "1000000000 layers"),
        ({"n_heads": 0}, "n_heads|num_attention_heads"),
        ({"n_kv_heads": 3}, "multiple of num_key_value_heads 3"),
        ({"multiple_of": 0}, "multiple_of is 0"),
        ({"ffn_dim_multiplier": -1}, "ffn_dim_multiplier is -1"),
        ({"vocab_size": 99}, "vocab_size is 99, the output head has 128 rows"),
        ({"norm_eps": "x"}, "norm_eps is x"),
        ({"multiple_of": 256}, r"gate_proj\.weight is \[192, 64\], must be \[256, 64\]"),
    ],
)
def test_params_faults(tmp_path: Path, params: dict[str, Any], message: str) -> None:
    folder = write(tmp_path / "a", [whole_weights()], **params)
    with pytest.raises(CheckpointError, match=message):
        load_model(folder)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000])
def test_params_that_are_no_json(tmp_path: Path, text: str) -> None:
    folder = write(tmp_path / "a", [whole_weights()])
    (folder / "params.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"params\.json"):
        load_model(folder)


# --- writing ---


@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocab_size", [128, 128256])
def test_hf_to_meta_to_hf_is_bit_equal(tmp_path: Path, make_t0: Make, shards: int, tied: bool, vocab_size: int) -> None:
    model = make_t0(tie_word_embeddings=tied, vocab_size=vocab_size, rope_theta=300.0)
    save_model(model, tmp_path / "hf", max_shard_bytes=20_000 if shards > 1 else 5e9)
    save_model(load_model(tmp_path / "hf"), tmp_path / "meta", format="meta", shards=shards)
    files = [f"consolidated.{index:02d}.pth" for index in range(shards)]
    assert sorted(p.name for p in (tmp_path / "meta").iterdir()) == [*files, "params.json"]
    first = torch.load(tmp_path / "meta" / "consolidated.00.pth", weights_only=True)
    by_vocabulary = vocab_size == 128256
    rows, columns = (vocab_size // shards, 32) if by_vocabulary else (vocab_size, 32 // shards)
    assert first["tok_embeddings.weight"].shape == (rows, columns)
    assert first["layers.0.attention.wo.weight"].shape == (32, 32 // shards)
    back = load_model(tmp_path / "meta")
    save_model(back, tmp_path / "again", max_shard_bytes=20_000 if shards > 1 else 5e9)
    for old in sorted((tmp_path / "hf").glob("*.safetensors")):
        assert old.read_bytes() == (tmp_path / "again" / old.name).read_bytes()
    ids = {"bos_token_id": 1, "eos_token_id": 2}
    assert back.config.replace(**ids) == model.config.replace(**ids)


def test_files_hold_only_their_own_bytes(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    save_model(model, tmp_path / "a", format="meta", shards=2)
    for path in (tmp_path / "a").glob("*.pth"):
        assert path.stat().st_size < model.num_parameters() * 4 * 0.6 + 20_000


def test_dtype_and_scaled_rope_survive(tmp_path: Path, make_t0: Make) -> None:
    model = make_t0()
    config = model.config.replace(rope=RopeConfig("llama3", 500000.0, 32.0, 1.0, 4.0, 8192))
    scaled = Llama(config)
    scaled.load_state_dict(model.state_dict())
    save_model(scaled, tmp_path / "a", format="meta", dtype=torch.bfloat16)
    back = load_model(tmp_path / "a")
    assert back.config.rope == config.rope
    assert all(torch.equal(back.state_dict()[n], t.bfloat16()) for n, t in model.state_dict().items())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"attention_bias": True}, "no biases"),
        ({"mlp_bias": True}, "no biases"),
        ({"head_dim": 16}, "head_dim is 16; .* = 8"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "'linear'"),
        (
            {
                "rope_scaling": {
                    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 64,
                }
            },
            "original_max_position_embeddings 8192, not 1.0 and 64",
        ),
    ],
)  # fmt: skip
def test_what_the_format_cannot_say(tmp_path: Path, make_t0: Make, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        save_model(make_t0(**changes), tmp_path / "a", format="meta")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("shards", [0, 3, 4])
def test_shards_must_divide(tmp_path: Path, make_t0: Make, shards: int) -> None:
    with pytest.raises(ValueError, match=f"shards is {shards}"):
        save_model(make_t0(), tmp_path / "a", format="meta", shards=shards)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("width", [1, 7, 64, 86, 100, 171, 172, 1000, 1536])
def test_any_feed_forward_width_has_a_rule(width: int) -> None:
    config = LlamaConfig(hidden_size=64, num_attention_heads=4, intermediate_size=width)
    assert feed_forward_width(params_from_config(config)) == width


def test_every_name_is_mapped(make_t0: Make) -> None:
    from llama_core.meta_checkpoint import hf_name
    from llama_core.meta_write import meta_name

    for name in parameter_shapes(make_t0().config):
        assert hf_name(meta_name(name)) == name
