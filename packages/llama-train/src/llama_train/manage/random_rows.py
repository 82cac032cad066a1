"""Rows of random tokens, to time a step without any text."""

from __future__ import annotations

import torch

from llama_train.batches import Batch


def random_batches(vocab_size: int, rows: int, count: int, length: int, part: int) -> list[Batch]:
    """`count` micro-batches of `rows` rows, (rows, length) int64; different for each data-parallel part."""
    generator = torch.Generator().manual_seed(part)
    found = []
    for _ in range(count):
        tokens = torch.randint(0, vocab_size, (rows, length + 1), generator=generator)
        found.append(Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()))
    return found
