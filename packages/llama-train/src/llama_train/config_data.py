"""Keys of [data]: text, tokenizer, and the shape of a batch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from .config_checks import finite_and as _finite_and
from .config_checks import is_text as _is_text
from .config_checks import require


@dataclass(frozen=True)
class DataConfig:
    """Text, tokenizer and the shape of a batch."""

    source: str = "stdlib"
    """"stdlib" (source text of this Python's own standard library), a text file, or a folder of text files."""
    sources: tuple[str, ...] = ()
    """Folders of `llama-train prepare`, in place of source."""
    weights: tuple[float, ...] = ()
    """Parts of the rows that come from each of the sources, in any unit; unset means as many from each."""
    held_out: str | None = None
    """Folder of `llama-train prepare` that measures the model; unset means held_out_fraction of the documents."""
    packing: Literal["cut", "best-fit"] = "cut"
    """With sources: cut takes all documents as one text, cut into rows; best-fit keeps those that fit whole."""
    mask_documents: bool = True
    """With sources: whether attention and positions stay inside a document."""
    suffixes: tuple[str, ...] = (".txt", ".md", ".py")
    """Which files of a folder are read."""
    held_out_fraction: float = 0.05
    """Part of the text, by whole files, that is never trained on and measures the model."""
    tokenizer: str | None = None
    """Folder or tokenizer.json of an existing tokenizer; unset means a byte-level BPE trained on the training part."""
    vocab_size: int = 2048
    """Vocabulary of the tokenizer that is trained."""
    sequence_length: int = 128
    """Tokens in a row of the batch."""
    micro_batch_size: int = 16
    """Rows that pass through the model at once."""
    gradient_accumulation_steps: int = 1
    """Micro-batches whose gradients make one step."""

    def __post_init__(self) -> None:
        require(bool(self.source), "data.source", self.source, '"stdlib" or the path of a file or folder')
        require(
            all(suffix.startswith(".") for suffix in self.suffixes) and bool(self.suffixes),
            "data.suffixes",
            self.suffixes,
            'a list of endings such as ".txt"',
        )
        for name in self.sources:
            require(bool(name) and _is_text(name), "data.sources", name, "the path of a folder")
        wanted = "nothing, or a number above 0 for each of data.sources"
        fit = len(self.weights) in (0, len(self.sources)) and all(_finite_and(w, w > 0) for w in self.weights)
        require(fit, "data.weights", self.weights, wanted)
        if not self.sources and (self.held_out is not None or self.packing != "cut"):
            raise ValueError("data.held_out and data.packing are for data.sources, which is not given")
        fraction = self.held_out_fraction
        require(0 < fraction < 1, "data.held_out_fraction", fraction, "above 0 and below 1")
        # 256 bytes and two special tokens have an id each whatever the text.
        # The trainer of the tokenizers package reserves memory for all of them at once, and aborts where there is none.
        require(258 <= self.vocab_size <= 2**20, "data.vocab_size", self.vocab_size, "258 to 1048576")
        require(self.sequence_length >= 2, "data.sequence_length", self.sequence_length, "at least 2")
        for name in ("micro_batch_size", "gradient_accumulation_steps"):
            value = getattr(self, name)  # beyond this numpy refuses, or the first step never ends
            require(1 <= value <= 2**20, f"data.{name}", value, "1 to 1048576")

    @property
    def masks_documents(self) -> bool:
        """Whether batches say where documents begin; text that the run itself reads is one row of tokens."""
        return self.mask_documents and bool(self.sources)

    @property
    def rows_per_step(self) -> int:
        """Sequences that one data-parallel rank gives to an optimizer step."""
        return self.micro_batch_size * self.gradient_accumulation_steps
