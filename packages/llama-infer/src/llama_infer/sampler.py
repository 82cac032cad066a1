"""From logits to the next token of each sequence, by its own settings and generator.

Order, as in vLLM: raw log-probabilities → end tokens kept away (`min_tokens`) → `logit_bias` → penalties → tokens that
guided output allows → temperature and filters (`llama_core.sample`, or on a GPU one kernel of llama_kernels that needs
no answer from the device).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor

import llama_kernels
from llama_core import sample

from .guided_mask import AllowedTokens
from .sequence import Sequence
from .speculative import Proposals


@dataclass(frozen=True)
class Drawn:
    """Tokens on their way to the host."""

    host: Tensor
    """(2, R) float64: the ids, and the largest logit of each row."""
    arrival: torch.cuda.Event | None
    """None: they are there."""

    def wait(self) -> list[tuple[int, float]]:
        if self.arrival is not None:
            self.arrival.synchronize()
        ids, largest = self.host.tolist()
        return list(zip(map(int, ids), largest, strict=True))


class Sampler:
    """Draws tokens; `fast` by the kernel of llama_kernels, whose draws for a seed are others than llama_core's."""

    def __init__(self, fast: bool) -> None:
        self.fast = fast
        self._settings: tuple[list[Sequence], list[Tensor]] = ([], [])

    @torch.inference_mode()
    def draw(
        self,
        logits_RV: Tensor,
        sequences: list[Sequence],
        newest: Tensor,
        allowed: AllowedTokens | None = None,
        proposals: Proposals | None = None,
    ) -> Drawn:
        """Draw one token for each row, and note it in `newest` (one place for each sequence's slot).

        A sequence may have several rows; they are draws after one another. `allowed` is what guided output lets come,
        `proposals` what a draft model has drawn for some of the rows.
        """
        raw_RV = logits_RV
        largest_R, likeliest_R = logits_RV.max(dim=-1)  # NaN if there is one in the row
        if any(_is_processed(sequence) for sequence in sequences):
            logits_RV = processed(logits_RV, sequences)
        if allowed is not None:
            logits_RV = allowed.mask(logits_RV)
        if self.fast and logits_RV is raw_RV and all(sequence.params.temperature == 0 for sequence in sequences):
            ids_R = likeliest_R
        elif proposals is None:
            ids_R = self._draw(logits_RV, largest_R, sequences)
        else:
            ids_R = torch.empty(len(sequences), dtype=torch.int64, device=logits_RV.device)
            chosen = set(proposals.rows)
            free = [row for row in range(len(sequences)) if row not in chosen]
            if free:
                ids_R[free] = self._draw(logits_RV[free], largest_R[free], [sequences[row] for row in free])
            ids_R[proposals.rows] = proposals.checked(_sound(logits_RV, largest_R)[proposals.rows])
        both = torch.stack((ids_R.double(), largest_R.double()))
        slots = torch.tensor([sequence.slot for sequence in sequences])
        if logits_RV.device.type != "cuda":
            newest[slots] = ids_R
            return Drawn(both, None)
        newest[slots.pin_memory().to(newest.device, non_blocking=True)] = ids_R
        host = torch.empty(both.shape, dtype=both.dtype, pin_memory=True)
        host.copy_(both, non_blocking=True)
        arrival = torch.cuda.Event()
        arrival.record()
        return Drawn(host, arrival)

    def _draw(self, logits_RV: Tensor, largest_R: Tensor, sequences: list[Sequence]) -> Tensor:
        if self.fast:
            return self._draw_fast(logits_RV, sequences)
        return _draw_plain(_sound(logits_RV, largest_R), sequences)

    def _draw_fast(self, logits_RV: Tensor, sequences: list[Sequence]) -> Tensor:
        if all(sequence.params.temperature == 0 for sequence in sequences):
            return logits_RV.argmax(dim=-1)
        if sequences != self._settings[0]:  # the batch is mostly that of the step before
            params = [sequence.params for sequence in sequences]
            columns = [
                torch.tensor([sequence.seed for sequence in sequences]),
                torch.tensor([p.temperature for p in params], dtype=torch.float32),
                torch.tensor([max(p.top_k, 0) for p in params], dtype=torch.int32),
                torch.tensor([p.top_p for p in params], dtype=torch.float32),
                torch.tensor([p.min_p for p in params], dtype=torch.float32),
            ]
            on_device = [column.pin_memory().to(logits_RV.device, non_blocking=True) for column in columns]
            self._settings = sequences, on_device
        seeds, temperature, top_k, top_p, min_p = self._settings[1]
        before: Counter[Sequence] = Counter()  # rows of the same sequence are one draw after the other
        places = []
        for sequence in sequences:
            places.append(len(sequence.token_ids) + sequence.pending + before[sequence])
            before[sequence] += 1
        drawn = torch.tensor(places)
        offsets = drawn.pin_memory().to(logits_RV.device, non_blocking=True)
        return llama_kernels.sample(
            logits_RV, seeds, offsets=offsets, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p
        )


def _sound(logits_RV: Tensor, largest_R: Tensor) -> Tensor:
    """The logits with zeros in rows that nothing can be drawn from: they are refused later, each by itself."""
    sound_R = largest_R.isfinite()
    return logits_RV if sound_R.all() else torch.where(sound_R.unsqueeze(1), logits_RV, 0.0)


def _draw_plain(logits_RV: Tensor, sequences: list[Sequence]) -> Tensor:
    params = [sequence.params for sequence in sequences]
    return sample(
        logits_RV,
        [p.temperature for p in params],
        [p.top_k for p in params],
        [p.top_p for p in params],
        [p.min_p for p in params],
        [sequence.generator for sequence in sequences],
    )


def _is_processed(sequence: Sequence) -> bool:
    params = sequence.params
    penalised = params.repetition_penalty != 1 or params.presence_penalty or params.frequency_penalty
    return bool(penalised or params.logit_bias or _must_go_on(sequence))


def _must_go_on(sequence: Sequence) -> bool:
    """Whether its end tokens are kept away here; where output is guided, what is allowed says it."""
    return bool(sequence.end_ids) and not sequence.may_end and sequence.guide is None


def processed(logits_RV: Tensor, sequences: list[Sequence]) -> Tensor:
    """(R, V) float32 logits after `min_tokens`, `logit_bias` and the penalties of each row's sequence."""
    out_RV = logits_RV.float().clone()
    vocabulary = out_RV.shape[1]
    for row_V, sequence in zip(out_RV, sequences, strict=True):
        params = sequence.params
        if _must_go_on(sequence):
            # A tokenizer may have more ids than the model has rows.
            row_V[[token_id for token_id in sequence.end_ids if token_id < vocabulary]] = float("-inf")
        if params.logit_bias:
            ids = torch.tensor(list(params.logit_bias), device=row_V.device)
            row_V[ids] += torch.tensor(list(params.logit_bias.values()), device=row_V.device)
        if params.repetition_penalty != 1:
            seen = torch.tensor(sequence.ids, device=row_V.device).unique()
            old = row_V[seen]
            new = torch.where(old > 0, old / params.repetition_penalty, old * params.repetition_penalty)
            row_V[seen] = new.clamp(max=torch.finfo(new.dtype).max)  # 1e-40 is a penalty too, and nobody can draw inf
        if (params.presence_penalty or params.frequency_penalty) and sequence.token_ids:
            ids, counts = torch.tensor(sequence.token_ids, device=row_V.device).unique(return_counts=True)
            row_V[ids] -= params.presence_penalty + params.frequency_penalty * counts
    return out_RV
