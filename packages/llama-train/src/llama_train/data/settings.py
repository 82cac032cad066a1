"""Settings of `llama-train prepare`. Nothing heavy is imported here, so that help and mistakes answer at once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

import tyro

from llama_train.config import require


@dataclass(frozen=True)
class PrepareConfig:
    """Turn text into token shards that `llama-train run` reads. The same command again goes on after a stop."""

    tokenizer: str
    """Folder, tokenizer.json, tokenizer.model or .gguf file of the tokenizer, a name on a hub, or "embedded"."""
    output: str
    """Folder for the shards; made if absent."""
    inputs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """Files, folders or globs: text, .jsonl, .parquet, also with .gz or .zst behind; - is standard input."""
    dataset: str | None = None
    """A data set of the Hugging Face hub, or a folder `datasets` can load, instead of inputs."""
    subset: str | None = None
    """Which configuration of the data set."""
    split: str = "train"
    """Which split of the data set."""
    limit: int | None = None
    """At most so many documents."""
    format: Literal["auto", "text", "jsonl", "parquet"] = "auto"
    """What the inputs hold; auto goes by their names."""
    record: Literal["auto", "text", "prompt", "chat"] = "auto"
    """What a JSON line or a row holds; auto takes messages, else prompt and completion, else the text key."""
    text_key: str = "text"
    """Key of the text in a JSON line or row; a.b looks for b inside a."""
    document: Literal["file", "line", "paragraph"] = "file"
    """What one document is in a text file; paragraphs are parted by blank lines."""
    separator: str | None = None
    """A line of a text file that holds just this ends a document too."""
    bos: Literal["auto", "yes", "no"] = "auto"
    """Whether the begin token opens each text; auto: if the tokenizer does that itself."""
    eos: Literal["yes", "no"] = "yes"
    """Whether the end token closes each text and completion; a chat is closed by its template."""
    on_bad_line: Literal["fail", "skip"] = "fail"
    """What to do about a line that cannot be read: stop, or report it and go on."""
    workers: int | None = None
    """Processes that tokenize; unset means one for each core."""
    shard_tokens: int = 2**26
    """A shard ends with the document that brings it to so many tokens."""
    progress: bool = True
    """Whether a terminal shows a progress bar; a file or pipe never does."""

    def __post_init__(self) -> None:
        require(bool(self.inputs) != (self.dataset is not None), "inputs", self.inputs, "files, or --dataset a name")
        require(bool(self.tokenizer), "tokenizer", self.tokenizer, "a path")
        require(bool(self.output), "output", self.output, "a path")
        require(self.limit is None or self.limit >= 1, "limit", self.limit, "at least 1")
        require(self.workers is None or self.workers >= 0, "workers", self.workers, "0 (this process alone) or more")
        require(self.shard_tokens >= 1, "shard-tokens", self.shard_tokens, "at least 1")
        require(bool(self.text_key), "text-key", self.text_key, "a key")
        no_break = self.separator is None or ("\n" not in self.separator and "\r" not in self.separator)
        require(no_break, "separator", self.separator, "a single line")
