"""`LLM`: a model, its tokenizer and an engine behind one object."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as Seq
from pathlib import Path
from typing import Any, Literal

import torch

from llama_core import Llama, Tokenizer, load_model, load_tokenizer, pack_projections
from llama_core.hub import local_path

from .cpu import use_onednn
from .defaults import ModelSampling, model_sampling
from .embedded import embedded_model
from .engine import Engine
from .outputs import RequestOutput, StreamChunk
from .placement import ops_for, resolve_device, resolve_dtype
from .sampling_params import SamplingParams
from .sequence import Sequence

Prompt = str | Seq[int]
"""A text, or its token ids."""
Message = Mapping[str, Any]
"""A turn of a chat: `role` and `content`."""


class LLM:
    """Generates text with a Llama model.

    >>> llm = LLM()  # the embedded SmolLM2
    >>> llm.generate(["Once upon a time"], SamplingParams(temperature=0.0, max_tokens=32))[0].text

    Args:
        model: what `llama_core.load_model` takes: a folder in Hugging Face's or Meta's format, a .gguf file, a name on
            a hub. None for the embedded model. Or a `Llama` you hold, used as it stands (its dtype and device too).
        tokenizer: a tokenizer, or the path of one; by default the model's own. A `Llama` without one takes and gives
            token ids only.
        dtype: "auto" (float32 on a CPU, bfloat16 on a GPU), "float32", "bfloat16", "float16" or a torch dtype.
        device: "auto" (a GPU if there is one), "cpu", "cuda" or "cuda:N".
        max_model_len: the longest sequence, prompt and new tokens together; by default, and at most, the model's
            context.
        max_num_seqs: the most sequences in one batch.
        generation_config: "auto" takes sampling defaults from the model's generation_config.json, "off" doesn't.

    Attributes:
        default_params: what `generate` uses where it is given none.
        model_sampling: the sampling defaults that came with the model.

    Raises:
        ValueError: nothing usable at a path (`llama_core.CheckpointError`), or an argument outside its range.
    """

    def __init__(
        self,
        model: str | Path | Llama | None = None,
        *,
        tokenizer: str | Path | Tokenizer | None = None,
        dtype: str | torch.dtype = "auto",
        device: str | torch.device = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 32,
        generation_config: Literal["auto", "off"] = "auto",
    ) -> None:
        if generation_config not in ("auto", "off"):
            raise ValueError(f"generation_config must be 'auto' or 'off', got {generation_config!r}")
        if max_num_seqs < 1:
            raise ValueError(f"max_num_seqs must be at least 1, got {max_num_seqs}")
        self.model_sampling = ModelSampling()
        if isinstance(model, Llama):
            self.model = model
        else:
            path = embedded_model() if model is None else local_path(Path(model).expanduser())
            if tokenizer is None:
                with warnings.catch_warnings():  # a broken generation_config.json: `model_sampling` says it
                    warnings.simplefilter("ignore")
                    tokenizer = load_tokenizer(path)
            where = resolve_device(device)
            self.model = load_model(path, resolve_dtype(dtype, where), where, ops_for(where))
            pack_projections(self.model)
            use_onednn(self.model)
            if generation_config == "auto":
                self.model_sampling = model_sampling(path)
        self.tokenizer = load_tokenizer(tokenizer) if isinstance(tokenizer, str | Path) else tokenizer
        context = self.model.config.max_position_embeddings
        if max_model_len is None:
            max_model_len = context
        if not 2 <= max_model_len <= context:
            raise ValueError(f"max_model_len must be from 2 to the model's context {context}, got {max_model_len}")
        self.default_params = self.sampling_params()
        self._engine = Engine(self.model, max_model_len, max_num_seqs)

    @property
    def max_model_len(self) -> int:
        return self._engine.max_model_len

    def sampling_params(self, **settings: Any) -> SamplingParams:
        """Sampling parameters from explicit settings; the model's own defaults (`generation_config`) fill the rest."""
        names = {field.name for field in dataclasses.fields(SamplingParams)}
        for name in settings.keys() - names:
            raise ValueError(f"no sampling setting {name!r}; there are {', '.join(sorted(names))}")
        return SamplingParams(**{**self.model_sampling.settings, **settings})

    def generate(
        self, prompts: Prompt | Seq[Prompt], params: SamplingParams | Seq[SamplingParams] | None = None
    ) -> list[RequestOutput]:
        """Continue one or many prompts.

        Args:
            prompts: texts or lists of token ids, mixed at will; or a single one.
            params: for all, or one for each prompt; `default_params` by default.

        Returns:
            One output for each prompt, in their order.

        Raises:
            ValueError: before any work, naming the prompt: one that is empty, or too long to leave room for a new
                token, or with ids outside the vocabulary; as many params as prompts are wanted, or one.
        """
        if not isinstance(prompts, str | Seq):
            raise ValueError(
                f"prompts are of type {type(prompts).__name__}; a text, a list of texts or of ids is wanted"
            )
        single = isinstance(prompts, str) or (len(prompts) > 0 and isinstance(prompts[0], int))
        listed: list[Prompt] = [prompts] if single else list(prompts)  # type: ignore[list-item,arg-type]
        return self._run([self._encode(prompt, index) for index, prompt in enumerate(listed)], params)

    def chat(
        self,
        conversations: Seq[Message] | Seq[Seq[Message]],
        params: SamplingParams | Seq[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """The assistant's next turn of one or many chats, in the model's own chat format.

        Args:
            conversations: lists of messages (`role`, `content`), or a single one.
            params: as for `generate`.

        Raises:
            ValueError: as for `generate`; there is no chat template, or it refuses the messages.
        """
        single = len(conversations) > 0 and isinstance(conversations[0], Mapping)
        listed: list[Any] = [conversations] if single else list(conversations)
        return self._run([(None, self.encode_chat(messages)) for messages in listed], params)

    def stream(self, prompt: Prompt | Seq[Message], params: SamplingParams | None = None) -> Iterator[StreamChunk]:
        """Continue one prompt or chat token by token; the chunks' texts joined are the text of `generate`.

        What the prompt has in common with the one before is not computed again. Close the iterator to end early.

        Raises:
            ValueError: as for `generate`, at once and not at the first chunk.
        """
        if not isinstance(prompt, str) and len(prompt) > 0 and isinstance(prompt[0], Mapping):
            text, ids = None, self.encode_chat(prompt)  # type: ignore[arg-type]
        else:
            text, ids = self._encode(prompt, 0)  # type: ignore[arg-type]
        sequence = self._sequence(0, ids, params or self.default_params, text)
        return (chunk for step in self._engine.run([sequence]) for _, chunk in step)

    def encode_chat(self, messages: Seq[Message]) -> list[int]:
        """The token ids of a chat, up to where the assistant's turn begins."""
        return self._needs_tokenizer("a chat").encode_chat(list(messages))

    def _run(
        self, encoded: list[tuple[str | None, list[int]]], params: SamplingParams | Seq[SamplingParams] | None
    ) -> list[RequestOutput]:
        if params is None or isinstance(params, SamplingParams):
            params = [params or self.default_params] * len(encoded)
        if len(params) != len(encoded):
            raise ValueError(f"got {len(params)} params for {len(encoded)} prompts; give one, or one for each")
        sequences = [
            self._sequence(index, ids, each, text)
            for index, ((text, ids), each) in enumerate(zip(encoded, params, strict=True))
        ]
        for _ in self._engine.run(sequences):
            pass
        return [sequence.output() for sequence in sequences]

    def _encode(self, prompt: Prompt, index: int) -> tuple[str | None, list[int]]:
        if isinstance(prompt, str):
            return prompt, self._needs_tokenizer("a text prompt").encode(prompt)
        vocab_size = self.model.config.vocab_size
        if not isinstance(prompt, Iterable):
            raise ValueError(f"prompt {index} is {prompt!r}; a text or a list of token ids is wanted")
        for token_id in prompt:
            if isinstance(token_id, bool) or not isinstance(token_id, int) or not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"prompt {index} holds {token_id!r}; token ids are Python integers from 0 to {vocab_size - 1}"
                )
        return None, list(prompt)

    def _sequence(self, index: int, ids: list[int], params: SamplingParams, text: str | None) -> Sequence:
        room = self.max_model_len - len(ids)
        if not ids:
            raise ValueError(f"prompt {index} is empty; at least 1 token is needed")
        if room < 1:
            raise ValueError(
                f"prompt {index} has {len(ids)} tokens; the context is {self.max_model_len}, "
                f"so a prompt may have at most {self.max_model_len - 1}"
            )
        if params.stop:
            self._needs_tokenizer("a stop string")
        vocab_size = self.model.config.vocab_size
        if beyond := [token_id for token_id in params.stop_token_ids if token_id >= vocab_size]:
            raise ValueError(f"stop_token_ids hold {beyond[0]}; token ids are from 0 to {vocab_size - 1}")
        return Sequence(ids, params, min(params.max_tokens or room, room), self.tokenizer, text)

    def _needs_tokenizer(self, what: str) -> Tokenizer:
        if self.tokenizer is None:
            raise ValueError(f"{what} needs a tokenizer, and this LLM has none; give LLM(model, tokenizer=…)")
        return self.tokenizer
