"""What every checkpoint format offers to the loader, and the loading itself.

A format turns its files into a `Checkpoint`: a configuration and, by Hugging Face name, tensors that can be read row
by row into given memory. Everything that headers tell is checked before the first weight is read.
"""

from __future__ import annotations

import os
import re
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from .config import LlamaConfig
from .errors import CheckpointError, listed
from .file_bytes import FileBytes, Scratch
from .parameter_shapes import parameter_shapes
from .safetensors_file import SafetensorsEntry
from .stored_tensor import StoredTensor

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
"""What weights may be stored and loaded as. Eight-bit floats mean nothing without their scales."""
HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
PIECE_BYTES = 1 << 20
"""Rows are read in pieces of about this size: it bounds the memory beside the model and feeds the threads evenly.
Twice as much for a wider stored type; dequantising takes about ten times as much for intermediate values."""
STRAIGHT_PIECE_BYTES = 4 << 20
"""The same where bytes go from the page cache into their place with no memory between. Two threads in neighbouring
pieces then rarely wait for each other's page tables, each of which covers 2 MB."""
GPU_PIECE_BYTES = 8 << 20
"""The same on a GPU, where every piece is one transfer and small ones cost more in starting than in copying."""
READERS = 8
"""Threads that read, at most. One copies a few GB/s from the page cache; fast disks and GPUs take what eight give."""

Progress = Callable[[int, int], None]
"""Told from time to time how many bytes are done, of how many in all."""

_OLD_BUFFER = re.compile(r"(model\.)?(layers\.\d+\.self_attn\.)?rotary_emb\.inv_freq")


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint with its headers read and none of its weights."""

    path: Path
    config: LlamaConfig
    tensors: Mapping[str, StoredTensor]
    faults: Sequence[str] = ()
    """What the format itself found wrong; reported together with what `check` finds."""
    files: Sequence[FileBytes] = field(default=(), repr=False)

    def close(self) -> None:
        for file in self.files:
            file.close()


def check(checkpoint: Checkpoint) -> None:
    """Compare names, shapes and types with the configuration.

    Raises:
        CheckpointError: one message that lists everything missing, unexpected, misshapen or of a wrong type.
    """
    config, tensors = checkpoint.config, checkpoint.tensors
    faults = list(checkpoint.faults)
    if config.num_hidden_layers > len(tensors):  # also keeps a damaged count from making a list of a billion names
        faults.append(f"config says {config.num_hidden_layers} layers, there are only {len(tensors)} tensors")
        raise _error(checkpoint, faults)
    expected = parameter_shapes(config)
    if missing := [name for name in expected if name not in tensors]:
        hint = ""
        if HEAD in missing and EMBEDDING in tensors:
            hint = " (a head shared with the embedding needs tie_word_embeddings: true)"
        faults.append(f"{len(missing)} missing: {listed(missing)}{hint}")
    allowed = expected | ({HEAD: expected[EMBEDDING]} if config.tie_word_embeddings else {})
    unexpected = [name for name in tensors if name not in allowed and not _OLD_BUFFER.fullmatch(name)]
    if unexpected:
        biases = [name for name in unexpected if name.endswith("_proj.bias")]
        hint = " (biases need attention_bias or mlp_bias: true)" if biases else ""
        faults.append(f"{len(unexpected)} unexpected: {listed(unexpected)}{hint}")
    shared = [name for name in allowed if name in tensors]
    wrong = [name for name in shared if tuple(tensors[name].shape) != allowed[name]]
    if wrong:
        texts = [f"{name} is {list(tensors[name].shape)}, must be {list(allowed[name])}" for name in wrong]
        faults.append(f"{len(wrong)} misshapen: {listed(texts)}")
    kinds = [f"{name} is {tensors[name].dtype}" for name in shared if tensors[name].dtype not in DTYPES]
    if kinds:
        types = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        faults.append(f"{len(kinds)} of another type than {types}: {listed(kinds)}")
    if faults:
        raise _error(checkpoint, faults)


def _error(checkpoint: Checkpoint, faults: Sequence[str]) -> CheckpointError:
    return CheckpointError(f"{checkpoint.path} does not fit its configuration:\n  " + "\n  ".join(faults))


def stored_dtype(checkpoint: Checkpoint) -> torch.dtype:
    """The type most elements are stored in: a bfloat16 file with a few float32 norms is a bfloat16 file."""
    elements: Counter[torch.dtype] = Counter()
    for name, shape in parameter_shapes(checkpoint.config).items():
        elements[checkpoint.tensors[name].dtype] += torch.Size(shape).numel()
    return elements.most_common(1)[0][0]


def fill(checkpoint: Checkpoint, parameters: Mapping[str, Tensor], progress: Progress | None = None) -> None:
    """Read every parameter into its place. `check` must have passed."""
    total, done = sum(target.nbytes for target in parameters.values()), 0
    jobs = [
        (checkpoint.tensors[name], start, stop, target.detach()[start:stop])
        for name, target in parameters.items()
        for start, stop in _pieces(target, checkpoint.tensors[name])
    ]
    local = threading.local()

    def prepare() -> None:
        local.scratch = Scratch()

    def read(job: tuple[StoredTensor, int, int, Tensor]) -> None:
        stored, start, stop, out = job
        stored.read_rows(start, stop, out, local.scratch)

    with ThreadPoolExecutor(min(READERS, os.cpu_count() or 1), initializer=prepare) as readers:
        try:
            for _, (_, _, _, out) in zip(readers.map(read, jobs), jobs):
                done += out.nbytes
                if progress is not None:
                    progress(done, total)
        except BaseException:
            readers.shutdown(cancel_futures=True)
            raise


def check_tied_head(checkpoint: Checkpoint, embedding: Tensor) -> None:
    """A file may hold the head although the configuration ties it; it must then be the embedding, bit for bit.

    Raises:
        CheckpointError: the stored head differs from the embedding.
    """
    stored = checkpoint.tensors.get(HEAD)
    if stored is None:
        return
    scratch = Scratch()
    for start, stop in _pieces(embedding, stored):
        head = torch.empty_like(embedding[start:stop])
        stored.read_rows(start, stop, head, scratch)
        if not torch.equal(head, embedding.detach()[start:stop]):
            raise CheckpointError(
                f"{checkpoint.path}: {HEAD} differs from {EMBEDDING} between rows {start} and {stop}, but the "
                "configuration says tie_word_embeddings: true; set it to false, or remove the head from the file"
            )


def _pieces(target: Tensor, stored: StoredTensor) -> list[tuple[int, int]]:
    rows, granule = target.shape[0], stored.granule
    straight = isinstance(stored, SafetensorsEntry) and stored.dtype == target.dtype
    size = GPU_PIECE_BYTES if target.is_cuda else STRAIGHT_PIECE_BYTES if straight else PIECE_BYTES
    step = size * rows // max(1, target.numel() * target.element_size())
    step = max(granule, step // granule * granule)
    return [(start, min(start + step, rows)) for start in range(0, rows, step)]
