"""Text to token ids and back, and chats to token ids."""

from __future__ import annotations

import hashlib
import json
import operator
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import tokenizers

from .backend import decoder_settings, leading_ids, package_errors, special_ids
from .chat import ChatTemplates, Message, chat_variables
from .chat_tokens import ChatEncoder
from .decoder_stages import build_stages, token_bytes
from .detokenizer import IncrementalDetokenizer
from .errors import CheckpointError
from .special_text import MarkedText, SpecialText
from .text import check_text, unused_chars

NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")


class Tokenizer:
    """A tokenizer, its chat templates, and the ids that begin and end a text. Made by `load_tokenizer`.

    Special tokens inside a text given to `encode` are text, unless `parse_special=True`: what a user typed can't end a
    turn. Threads may share one tokenizer.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        named: Mapping[str, str] | None = None,
        eos_ids: Sequence[int] = (),
        add_bos: bool | None = None,
        chat_templates: Mapping[str, str] | None = None,
        extra_settings: Mapping[str, Any] | None = None,
    ) -> None:
        """
        Args:
            backend: an object of the tokenizers package; from here on this tokenizer's own.
            named: texts of `bos_token`, `eos_token`, `unk_token`, `pad_token`; each must be in the vocabulary.
            eos_ids: further ids that end a text, most important first; the named one is added.
            add_bos: whether `encode` begins with BOS; None: if the backend's post-processor does.
            chat_templates: template sources by name; "default" is the ordinary one.
            extra_settings: entries of tokenizer_config.json that `save` should write again.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self.named = dict(named or {})
        for name, text in self.named.items():
            if backend.token_to_id(text) is None:
                raise ValueError(f"{name} is {text!r}, which the vocabulary doesn't hold")
        # as in transformers, a token with a name is special whatever the file's flag says
        special = special_ids(backend)
        backend.add_special_tokens([text for text in self.named.values() if text not in special])
        self._special_ids = frozenset(special_ids(backend).values())
        self._special = SpecialText(backend)
        self.vocab_size = self._special.size
        """One more than the largest id. A model may have more rows than that: they are padding."""
        own = self._named_id("eos_token")
        self.eos_ids = tuple(dict.fromkeys(i for i in (*eos_ids, own) if i is not None))
        """All ids that end a text, the most important first."""
        for token_id in self.eos_ids:
            if not 0 <= token_id < self.vocab_size:
                raise ValueError(f"EOS id {token_id} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        self.eos_id: int | None = own if own is not None else next(iter(self.eos_ids), None)
        """The one id to write after a document in training data."""
        prefix = leading_ids(backend)
        self.bos_id: int | None = self._named_id("bos_token")
        if self.bos_id is None and len(prefix) == 1:
            self.bos_id = prefix[0]
        self.pad_id: int | None = self._named_id("pad_token")
        self.post_processor_adds_bos = self.bos_id is not None and prefix == [self.bos_id]
        if add_bos and self.bos_id is None:
            raise ValueError("add_bos is set, but the tokenizer names no bos_token")
        self.adds_bos = self.post_processor_adds_bos if add_bos is None else add_bos
        """Whether `encode(text)` begins with BOS."""
        self._templates = ChatTemplates(chat_templates or {})
        self.extra_settings = dict(extra_settings or {})

    @property
    def special_ids(self) -> frozenset[int]:
        """Ids of the special tokens: those that are no text."""
        return self._special_ids

    # --- text to ids

    def encode(self, text: str, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """The token ids of a text.

        Args:
            add_bos: begin with BOS if this tokenizer does that (`adds_bos`). A second BOS is never added to a text that
                already begins with one (which only `parse_special` can see).
            parse_special: let the text of a special token stand for that token. For text you wrote yourself, such as a
                rendered chat.
        Raises:
            ValueError: not a text, or one that holds half of a surrogate pair.
        """
        check_text(text, "text")
        if parse_special:
            marked = self._special.mark(text)
        else:
            marked = MarkedText(text, unused_chars([text])[0])
        return self._with_bos(self._special.read(marked)[0], add_bos)

    def encode_batch(self, texts: Sequence[str], add_bos: bool = True, parse_special: bool = False) -> list[list[int]]:
        """`encode` of each text, on several threads."""
        if isinstance(texts, str):
            raise ValueError("encode_batch takes a list of texts, got one text")
        texts = list(texts)
        for index, text in enumerate(texts):
            check_text(text, f"texts[{index}]")
        if parse_special:
            return [self.encode(text, add_bos, parse_special) for text in texts]
        return [self._with_bos(ids, add_bos) for ids in self._special.read_texts(texts)]

    def _with_bos(self, ids: list[int], add_bos: bool) -> list[int]:
        bos = self.bos_id
        return [bos, *ids] if add_bos and self.adds_bos and bos is not None and ids[:1] != [bos] else ids

    # --- ids to text

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """The text of token ids. Spaces are not cleaned up: decode(encode(text)) is the text wherever the vocabulary
        allows it. Bytes that are no character become U+FFFD.

        Raises:
            ValueError: an id outside the vocabulary, or not an integer.
        """
        checked = [self._check_id(token_id) for token_id in ids]
        with package_errors("decoding failed"):
            return self._backend.decode(checked, skip_special_tokens=skip_special)

    def detokenizer(self, prompt_ids: Iterable[int] = (), skip_special: bool = True) -> IncrementalDetokenizer:
        """Decodes ids one at a time, as a continuation of `prompt_ids`."""

        def piece(token_id: int) -> str | None:
            token_id = self._check_id(token_id)
            if skip_special and token_id in self._special_ids:
                return None
            return self._backend.id_to_token(token_id)

        return IncrementalDetokenizer(piece, build_stages(decoder_settings(self._backend)), prompt_ids)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes of one token alone. A token of a SentencePiece vocabulary keeps its leading space; part of a
        character gives part of its bytes.

        Raises:
            ValueError: an id outside the vocabulary, or not an integer.
        """
        return token_bytes(self._backend.id_to_token(self._check_id(token_id)) or "", decoder_settings(self._backend))

    def token_to_id(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it, or None."""
        token_id = self._backend.token_to_id(token)
        return token_id if token_id is not None and token_id < self.vocab_size else None

    def id_to_token(self, token_id: int) -> str | None:
        """The token as the vocabulary spells it. None for an id that no token has."""
        return self._backend.id_to_token(self._check_id(token_id))

    # --- chats

    def render_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> str:
        """The chat as one text, by the model's own template, as transformers' `apply_chat_template` renders it.

        Args:
            messages: dicts with `role` and `content` (text, or a list of parts).
            add_generation_prompt: end with the header of the assistant's turn.
            tools: JSON schemas of tools, for templates that offer them.
            chat_template: a template's source or name in place of the default.
            variables: further variables of the template (`documents`, `date_string`, …).
        Raises:
            ValueError: there is no template, or it refuses the messages.
        """
        template = self._templates.choose(chat_template, tools is not None)
        data = chat_variables(messages, add_generation_prompt, tools, variables)
        return template.render({**self.named, **data})

    def encode_chat(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = True,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> list[int]:
        """The token ids of the rendered chat; arguments as for `render_chat`.

        Only special tokens that the template writes are special; in the messages their text is text. BOS is the
        template's affair, so there is never a second one. Without special tokens in the messages this equals
        `encode(render_chat(…), add_bos=False, parse_special=True)`, and `add_bos=True` changes nothing where the
        template writes BOS.
        """
        return self._chat_encoder(messages, add_generation_prompt, tools, chat_template, variables).ids()

    def encode_chat_with_mask(
        self,
        messages: Sequence[Message],
        add_generation_prompt: bool = False,
        tools: Sequence[Any] | None = None,
        chat_template: str | None = None,
        **variables: Any,
    ) -> tuple[list[int], list[bool]]:
        """The token ids of the chat, and for each whether it belongs to an assistant's turn, the end token included and
        the header excluded. For training on answers only.

        Where the template has `{% generation %}` blocks they decide; elsewhere the chat is rendered up to each turn.
        """
        encoder = self._chat_encoder(messages, add_generation_prompt, tools, chat_template, variables)
        return encoder.ids_and_mask(frozenset(filter(None, map(self._backend.id_to_token, self.eos_ids))))

    def _chat_encoder(
        self, messages: Any, add_generation_prompt: bool, tools: Any, chat_template: str | None, variables: Any
    ) -> ChatEncoder:
        template = self._templates.choose(chat_template, tools is not None)
        data = chat_variables(messages, add_generation_prompt, tools, variables)
        return ChatEncoder(template, self._special, self.named, data)

    # --- identity and files

    @property
    def chat_templates(self) -> dict[str, str]:
        """Template sources by name; empty if the model came without."""
        return dict(self._templates.sources)

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 (hex) of everything that decides ids: vocabulary, merges, splits, added tokens, BOS. Chat templates
        and end tokens don't count."""
        settings = json.loads(self.to_json())
        for key in ("version", "truncation", "padding", "post_processor", "decoder"):
            settings.pop(key, None)
        settings["bos"] = self.bos_id if self.adds_bos else None
        return hashlib.sha256(json.dumps(settings, sort_keys=True, ensure_ascii=False).encode("utf-8")).hexdigest()

    def to_json(self) -> str:
        """The text of a `tokenizer.json`."""
        return self._special.json

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes `tokenizer.json`, `tokenizer_config.json` and, if there is one, `chat_template.jinja` into a folder,
        so that `load_tokenizer` and transformers' AutoTokenizer read the same tokenizer."""
        from .tokenizer_save import save_tokenizer

        save_tokenizer(self, Path(path))

    def _named_id(self, name: str) -> int | None:
        return self._backend.token_to_id(self.named[name]) if name in self.named else None

    def _check_id(self, token_id: Any) -> int:
        try:
            number = operator.index(token_id)
        except TypeError:
            raise ValueError(f"a token id must be an integer, got {token_id!r}") from None
        if isinstance(token_id, bool) or not 0 <= number < self.vocab_size:
            raise ValueError(f"token id {token_id!r} is outside the vocabulary, 0 to {self.vocab_size - 1}")
        return number


def load_tokenizer(path: str | os.PathLike[str]) -> Tokenizer:
    """Loads the tokenizer of a model.

    Args:
        path: a Hugging Face folder (`tokenizer.json` and its companions), a `tokenizer.json`, a `tokenizer.model`, a
            `.gguf` file, or a name on the hub (`org/name`; extra `hub`).
    Raises:
        ValueError: nothing readable is there; the message says what was looked for.
    """
    from .hub import local_path
    from .tokenizer_files import find_tokenizer

    try:
        return find_tokenizer(local_path(Path(path), weights=False))
    except OSError as error:  # closed to us, a name too long, a failing disk
        raise CheckpointError(f"{error.filename or path} cannot be read: {error.strerror}") from None
