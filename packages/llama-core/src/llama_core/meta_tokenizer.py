"""Tokenizers as Meta publishes them: a `tokenizer.model`, rank file (Llama 3) or SentencePiece model (Llama 1, 2).

Special tokens and the layout of chats stand in Meta's code, not in the file, so they stand here.
"""

from __future__ import annotations

from pathlib import Path

import tokenizers

from .errors import CheckpointError
from .generation_config import read_json_object
from .sentencepiece_file import parse_sentencepiece, sentencepiece_tokenizer
from .tiktoken_file import looks_like_ranks, parse_ranks, tiktoken_bpe
from .tokenizer import Tokenizer

_LARGEST = 1 << 26  # Llama 3's file has 2 MB

# Llama 3: meta-llama/llama3, llama/tokenizer.py. Llama 3.1 and later: meta-llama/llama-models,
# models/llama3/tokenizer.py. Same ids; three reserved ones got a name and the numbers of the others moved.
_LLAMA3 = [
    "<|begin_of_text|>",
    "<|end_of_text|>",
    "<|reserved_special_token_0|>",
    "<|reserved_special_token_1|>",
    "<|reserved_special_token_2|>",
    "<|reserved_special_token_3|>",
    "<|start_header_id|>",
    "<|end_header_id|>",
    "<|reserved_special_token_4|>",
    "<|eot_id|>",
]
_NAMED_SINCE_31 = {4: "<|finetune_right_pad_id|>", 5: "<|step_id|>", 8: "<|eom_id|>", 10: "<|python_tag|>"}
_SPECIAL_TOKENS = 256
_ENDS = ("<|end_of_text|>", "<|eom_id|>", "<|eot_id|>")

LLAMA3_CHAT = """\
{%- for message in messages %}
    {%- if loop.first %}{{- bos_token }}{% endif %}
    {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' }}
    {{- message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""
"""`ChatFormat` of Meta's tokenizer.py."""

LLAMA2_CHAT = """\
{%- if messages[0]['role'] == 'system' %}
    {%- set system = '<<SYS>>\\n' + messages[0]['content'] + '\\n<</SYS>>\\n\\n' %}
    {%- set turns = messages[1:] %}
{%- else %}
    {%- set system = '' %}
    {%- set turns = messages %}
{%- endif %}
{%- for message in turns %}
    {%- if (message['role'] == 'user') != (loop.index0 % 2 == 0) or message['role'] not in ['user', 'assistant'] %}
        {{- raise_exception("after an optional system message, roles must alternate user, assistant, user, …") }}
    {%- endif %}
    {%- if message['role'] == 'user' %}
        {{- bos_token + '[INST] ' + ((system if loop.first else '') + message['content']) | trim + ' [/INST]' }}
    {%- else %}
        {{- ' ' + message['content'] | trim + ' ' + eos_token }}
    {%- endif %}
{%- endfor %}"""
"""`chat_completion` of meta-llama/llama, llama/generation.py."""


def special_tokens(llama31: bool) -> list[str]:
    """The 256 special tokens behind the ranks, in the order of their ids."""
    named = list(_LLAMA3)
    if llama31:
        for index, name in _NAMED_SINCE_31.items():
            named[index : index + 1] = [name]
    first = sum(name.startswith("<|reserved_special_token_") for name in named)
    reserved = [f"<|reserved_special_token_{first + i}|>" for i in range(_SPECIAL_TOKENS - len(named))]
    return [*named, *reserved]


def read_model_file(path: Path, llama31: bool = True) -> tuple[tokenizers.Tokenizer, str]:
    """The tokenizers object in a `tokenizer.model`, and which kind it is: "llama3" or "llama2".

    Raises:
        CheckpointError: neither kind, or damaged.
    """
    try:
        if path.stat().st_size > _LARGEST:
            raise CheckpointError(f"{path}: {path.stat().st_size} bytes are too many for a tokenizer ({_LARGEST})")
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    if looks_like_ranks(data):
        return tiktoken_bpe(parse_ranks(data, path), special_tokens(llama31)), "llama3"
    return sentencepiece_tokenizer(parse_sentencepiece(data, path), path), "llama2"


def meta_tokenizer(path: Path) -> Tokenizer:
    """The tokenizer in Meta's `tokenizer.model`, with Meta's chat layout.

    The names of Llama 3's reserved tokens changed with 3.1. A `params.json` beside the file tells which (3.1 and later
    say `use_scaled_rope`); without one, the later names are used. Ids of texts are the same either way.

    Raises:
        CheckpointError: the file is missing or damaged.
    """
    params = path.parent / "params.json"
    llama31 = bool(read_json_object(params).get("use_scaled_rope")) if params.is_file() else True
    backend, kind = read_model_file(path, llama31)
    if kind == "llama2":
        named = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
        named = {name: text for name, text in named.items() if backend.token_to_id(text) is not None}
        return Tokenizer(backend, named=named, add_bos="bos_token" in named, chat_templates={"default": LLAMA2_CHAT})
    named = {"bos_token": "<|begin_of_text|>", "eos_token": "<|end_of_text|>"}
    if llama31:
        named["pad_token"] = "<|finetune_right_pad_id|>"
    ends = [backend.token_to_id(text) for text in _ENDS]
    return Tokenizer(
        backend,
        named=named,
        eos_ids=[token_id for token_id in ends if token_id is not None],
        add_bos=True,
        chat_templates={"default": LLAMA3_CHAT},
    )
