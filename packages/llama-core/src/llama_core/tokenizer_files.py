"""Where a tokenizer's parts lie on disk: finding and reading them."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import tokenizers

from .backend import package_errors
from .errors import CheckpointError
from .generation_config import load_generation_config, read_json_object, token_ids
from .tokenizer import NAMED_TOKENS, Tokenizer

# settings that mean nothing here, but must outlive a load and a save
_KEPT = ("model_max_length", "padding_side", "truncation_side", "additional_special_tokens", "extra_special_tokens")
_LOOKED_FOR = "tokenizer.json, tokenizer.model, or a .gguf file"


def find_tokenizer(path: Path) -> Tokenizer:
    """`load_tokenizer` for a path; see there."""
    if path.is_file():
        with path.open("rb") as file:
            magic = file.read(4)
        if magic == b"GGUF" or path.suffix == ".gguf":
            return _from_gguf(path)
        if path.suffix == ".model":
            return _from_model_file(path)
        if path.suffix != ".json" and not magic.lstrip().startswith(b"{"):
            raise CheckpointError(
                f"{path} is no tokenizer and no GGUF file; give a folder or a file with {_LOOKED_FOR}"
            )
        return _with_companions(read_backend(path), path)
    if not path.is_dir():
        raise CheckpointError(f"{path} does not exist; a tokenizer is a folder or file with {_LOOKED_FOR}")
    if (path / "tokenizer.json").is_file():
        return _with_companions(read_backend(path / "tokenizer.json"), path / "tokenizer.json")
    for folder in (path, path.parent):
        # Llama 1 and 2 come as folders of weights with one tokenizer.model above them
        if (folder / "tokenizer.model").is_file() and (folder == path or (path / "params.json").is_file()):
            return _from_model_file(folder / "tokenizer.model")
    ggufs = sorted(path.glob("*.gguf"))
    if len(ggufs) == 1:
        return _from_gguf(ggufs[0])
    also = f"; it holds {len(ggufs)} .gguf files, name one of them" if ggufs else ""
    if inside := sorted(path.glob("*/tokenizer.json")):  # the folder of a training run, say, instead of its model
        also += f"; did you mean {inside[0].parent}?"
    raise CheckpointError(f"{path}: no tokenizer found; looked for {_LOOKED_FOR}{also}")


def _from_gguf(path: Path) -> Tokenizer:
    from .gguf_metadata import read_gguf_metadata
    from .gguf_tokenizer import tokenizer_from_gguf

    try:
        return tokenizer_from_gguf(read_gguf_metadata(path))
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{path}: {error}") from None


def read_backend(path: Path) -> tokenizers.Tokenizer:
    """The tokenizers object in a tokenizer.json.

    Raises:
        CheckpointError: not a valid one; the message carries the package's own reason.
    """
    model = read_json_object(path).get("model")
    if isinstance(model, dict) and model.get("continuing_subword_prefix") and model.get("merges"):
        # no Llama tokenizer has one, and where the merges lack it the package ends the process (0.23: cut characters)
        raise CheckpointError(f"{path}: a BPE model with continuing_subword_prefix is not read")
    try:
        with package_errors(f"{path}: not a tokenizer.json of the tokenizers package"):
            return tokenizers.Tokenizer.from_file(str(path))
    except ValueError as error:
        raise CheckpointError(str(error)) from None


def _with_companions(
    backend: tokenizers.Tokenizer, path: Path, add_bos: bool | None = None, defaults: dict[str, str] | None = None
) -> Tokenizer:
    """A tokenizer with what the Hugging Face files beside `path` say about it."""
    folder = path.parent
    config_path = folder / "tokenizer_config.json"
    config = json_or_empty(config_path)
    _add_missing_tokens(backend, config.get("added_tokens_decoder"), config_path)
    named = {**(defaults or {}), **named_tokens(config, json_or_empty(folder / "special_tokens_map.json"), config_path)}
    for name, text in list(named.items()):
        if backend.token_to_id(text) is None:
            if name in ("bos_token", "eos_token"):
                raise CheckpointError(f"{folder}: {name} is {text!r}, which {path.name} does not hold")
            del named[name]  # padding and unknown tokens that were never added are never met either
    add_bos = config.get("add_bos_token", add_bos)
    if add_bos is not None and not isinstance(add_bos, bool):
        raise CheckpointError(f"{config_path}: add_bos_token must be true or false, got {add_bos!r}")
    try:
        return Tokenizer(
            backend,
            named=named,
            eos_ids=end_ids(folder),
            add_bos=add_bos,
            chat_templates=chat_templates(folder, config),
            extra_settings={key: config[key] for key in _KEPT if key in config},
        )
    except CheckpointError:
        raise
    except ValueError as error:
        raise CheckpointError(f"{folder}: {error}") from None


def _from_model_file(path: Path) -> Tokenizer:
    from .meta_tokenizer import meta_tokenizer, read_model_file

    if not (path.parent / "tokenizer_config.json").is_file():
        return meta_tokenizer(path)
    backend, kind = read_model_file(path)  # a Hugging Face folder from before tokenizer.json
    llama2 = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return _with_companions(backend, path, add_bos=True, defaults=llama2 if kind == "llama2" else None)


def json_or_empty(path: Path) -> dict[str, Any]:
    return read_json_object(path) if path.is_file() else {}


def named_tokens(config: dict[str, Any], special_map: dict[str, Any], where: Path) -> dict[str, str]:
    """The texts of the named tokens, each written as a text or as an added token's dict.

    Raises:
        CheckpointError: written in another way.
    """
    named = {}
    for name in NAMED_TOKENS:
        value = config.get(name)
        if value is None:
            value = special_map.get(name)
        text = value.get("content") if isinstance(value, dict) else value
        if text is not None and not isinstance(text, str):
            raise CheckpointError(f"{where}: {name} must be a text or an added token, got {value!r}")
        if text:
            named[name] = text
    return named


def _add_missing_tokens(backend: tokenizers.Tokenizer, decoder: Any, where: Path) -> None:
    """Tokens that stand only in tokenizer_config.json's `added_tokens_decoder`, as older exports wrote them."""
    if not isinstance(decoder, dict):
        return
    for key, flags in sorted(decoder.items(), key=lambda item: int(item[0]) if str(item[0]).isdigit() else -1):
        content = flags.get("content") if isinstance(flags, dict) else None
        if not str(key).isdigit() or not isinstance(content, str):
            raise CheckpointError(f"{where}: added_tokens_decoder maps ids to added tokens, got {key!r}: {flags!r}")
        if backend.token_to_id(content) is None:
            names = ("single_word", "lstrip", "rstrip", "normalized", "special")
            token = tokenizers.AddedToken(content, **{n: bool(flags[n]) for n in names if n in flags})
            backend.add_tokens([token])
        if backend.token_to_id(content) != int(key):
            raise CheckpointError(
                f"{where}: added token {content!r} should have id {key}, but tokenizer.json gives it "
                f"{backend.token_to_id(content)}"
            )


def end_ids(folder: Path) -> list[int]:
    """End-of-sequence ids of a model folder: generation_config.json's first, then config.json's.

    A generation_config.json that isn't JSON (Llama 3.2 was published with one) gives a warning, not an error: the
    tokenizer works without it.
    """
    ids: list[int] = []
    try:
        ids += load_generation_config(folder).eos_token_ids
    except CheckpointError as error:
        warnings.warn(f"going on without generation_config.json: {error}", stacklevel=2)
    config = folder / "config.json"
    if config.is_file():
        ids += token_ids(read_json_object(config).get("eos_token_id"), f"{config}: eos_token_id")
    return ids


def chat_templates(folder: Path, config: dict[str, Any]) -> dict[str, str]:
    """Chat templates by name, from `chat_template.jinja`, `additional_chat_templates/` or tokenizer_config.json. As in
    transformers, files come before the configuration."""
    found: dict[str, str] = {}
    inline = config.get("chat_template")
    if isinstance(inline, str):
        found["default"] = inline
    elif isinstance(inline, list) and all(
        isinstance(item, dict) and isinstance(item.get("name"), str) and isinstance(item.get("template"), str)
        for item in inline
    ):
        found |= {item["name"]: item["template"] for item in inline}
    elif inline is not None:
        raise CheckpointError(
            f"{folder / 'tokenizer_config.json'}: chat_template must be a text or a list of name and template, got "
            f"{type(inline).__name__}"
        )
    files = {path.stem: path for path in sorted((folder / "additional_chat_templates").glob("*.jinja"))}
    if (folder / "chat_template.jinja").is_file():
        files["default"] = folder / "chat_template.jinja"
    for name, path in files.items():
        try:
            found[name] = path.read_bytes().decode("utf-8")  # as bytes: line ends are part of the text
        except UnicodeDecodeError as error:
            raise CheckpointError(f"{path}: is not UTF-8 at byte {error.start}") from None
    return found
