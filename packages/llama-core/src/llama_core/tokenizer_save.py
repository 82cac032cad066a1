"""Writing a tokenizer as a folder that `load_tokenizer` and transformers' AutoTokenizer read alike."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .generation_config import FILE as GENERATION_FILE
from .generation_config import token_ids
from .tokenizer import Tokenizer
from .tokenizer_files import end_ids, json_or_empty


def _bos_template(tokenizer: Tokenizer) -> dict[str, Any]:
    """A post-processor in tokenizer.json's own form that puts BOS in front of each text."""
    token_id = tokenizer.bos_id
    assert token_id is not None
    text = tokenizer.id_to_token(token_id)
    bos, first, second = {"id": text, "type_id": 0}, {"id": "A", "type_id": 0}, {"id": "B", "type_id": 1}
    single = [{"SpecialToken": bos}, {"Sequence": first}]
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": [*single, {"SpecialToken": {**bos, "type_id": 1}}, {"Sequence": second}],
        "special_tokens": {text: {"id": text, "ids": [token_id], "tokens": [text]}},
    }


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """`Tokenizer.save`; see there."""
    folder.mkdir(parents=True, exist_ok=True)
    settings = json.loads(tokenizer.to_json())
    if tokenizer.post_processor_adds_bos != tokenizer.adds_bos:
        settings["post_processor"] = _bos_template(tokenizer) if tokenizer.adds_bos else None
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "add_bos_token": tokenizer.adds_bos,
        **tokenizer.extra_settings,
        **tokenizer.named,
    }
    # On one line: json's indenting encoder is Python, and takes seconds for a vocabulary.
    _write_json(folder / "tokenizer.json", settings, indent=None)
    _write_json(folder / "tokenizer_config.json", config)
    for name, source in tokenizer.chat_templates.items():
        path = folder / "chat_template.jinja"
        if name != "default":
            path = folder / "additional_chat_templates" / f"{name}.jinja"
            path.parent.mkdir(exist_ok=True)
        path.write_bytes(source.encode("utf-8"))
    _save_end_ids(tokenizer, folder)


def _save_end_ids(tokenizer: Tokenizer, folder: Path) -> None:
    """End ids beyond the named one have their place in generation_config.json. What stands there already stays."""
    there = end_ids(folder)
    missing = [
        i for i in tokenizer.eos_ids if i not in there and tokenizer.id_to_token(i) != tokenizer.named.get("eos_token")
    ]
    if missing:
        path = folder / GENERATION_FILE
        config = json_or_empty(path)
        config["eos_token_id"] = [*token_ids(config.get("eos_token_id"), str(path)), *missing]
        _write_json(path, config)


def _write_json(path: Path, value: dict[str, Any], indent: int | None = 2) -> None:
    path.write_text(json.dumps(value, indent=indent, ensure_ascii=False) + "\n", "utf-8")
