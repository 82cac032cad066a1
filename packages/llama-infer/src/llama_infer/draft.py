"""A draft model: a small model of the same vocabulary that runs ahead, token by token, of the one that generates.

Its keys and values lie in a cache of its own, in the same blocks: it computes the same tokens in the same step, so
whatever the block pool shares, copies or takes back holds for both. In a step it reads what is new of every sequence
and proposes a token; then, for those that generate, it reads that one and proposes the next, and so on. The model reads
all of them in one pass, and `speculative` decides which stand.

Each row that draws has a proposal, also the one behind the last guess, whose proposal nobody reads: the draft must
compute the last guess anyway, for when it is accepted.
"""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from llama_core import Llama
from llama_core.hub import local_path

from .loading import load_for_inference
from .paged_cache import PagedKVCache
from .placement import attention_for
from .runner import ModelRunner
from .scheduler import Work
from .sequence import Sequence, takes_guesses
from .speculative import Proposals, distribution, draw, uniforms

if TYPE_CHECKING:
    from .engine_build import EngineSettings

GUESSES = 4
"""Of each step, where nobody says how many."""


class Drafter:
    """Runs a draft model ahead.

    Args:
        runner: of the draft model, with a cache of as many blocks as the model's.
    """

    def __init__(self, runner: ModelRunner) -> None:
        self.runner = runner

    @torch.inference_mode()
    def propose(self, batch: list[Work]) -> tuple[list[Work], Proposals | None]:
        """The batch with its guesses filled in, and a proposal for each row whose sequence takes guesses.

        Args:
            batch: work whose `guesses` are placeholders.
        """
        takers = [work for work in batch if work.samples and takes_guesses(work.sequence)]
        first = [replace(work, count=work.count - len(work.guesses), guesses=()) for work in batch]
        logits = self.runner.run(first)[1]
        sampling = [work for work in batch if work.samples]
        if len(takers) < len(sampling) and takers:
            logits = logits[[at for at, work in enumerate(sampling) if takes_guesses(work.sequence)]]
        if not takers:
            return batch, None
        most = max(len(work.guesses) for work in takers)
        ends = [0]  # of each taker's proposals
        for work in takers:
            ends.append(ends[-1] + 1 + len(work.guesses))
        numbers = [
            uniforms(work.sequence.seed, len(work.sequence.token_ids) + ahead)
            for work in takers
            for ahead in range(1 + len(work.guesses))
        ]
        greedy = all(work.sequence.params.temperature == 0 for work in takers)
        tokens = torch.empty(ends[-1], dtype=torch.int64, device=logits.device)
        chances = None if greedy else torch.empty(ends[-1], logits.shape[1], device=logits.device)
        for ahead in range(most + 1):
            chosen = [at for at, work in enumerate(takers) if ahead <= len(work.guesses)]
            running = [takers[at] for at in chosen]
            if ahead:
                logits = self.runner.run([_one(work, ahead) for work in running])[1]
            places = [ends[at] + ahead for at in chosen]
            drawn, q_NV = _draw(
                logits, [work.sequence for work in running], [numbers[place][0] for place in places], greedy
            )
            self.runner.newest[[work.sequence.slot for work in running]] = drawn
            tokens[places] = drawn
            if chances is not None and q_NV is not None:
                chances[places] = q_NV
        return self._filled(batch, takers, ends, tokens, chances, numbers)

    def _filled(
        self,
        batch: list[Work],
        takers: list[Work],
        ends: list[int],
        tokens: Tensor,
        chances: Tensor | None,
        numbers: list[tuple[float, float, float]],
    ) -> tuple[list[Work], Proposals]:
        proposed = tokens.tolist()
        guesses = {
            work.sequence: tuple(proposed[begin : begin + len(work.guesses)])
            for work, begin in zip(takers, ends, strict=False)
        }
        filled = [replace(work, guesses=guesses.get(work.sequence, ())) for work in batch]
        rows: list[int] = []
        sequences: list[Sequence] = []
        row = 0
        for work in filled:
            if not work.samples:
                continue
            width = 1 + len(work.guesses)
            if work.sequence in guesses:
                rows += range(row, row + width)
                sequences += [work.sequence] * width
            row += width
        return filled, Proposals(rows, sequences, tokens, chances, numbers)


def _one(work: Work, ahead: int) -> Work:
    """The guess that is so many tokens ahead, alone."""
    return Work(work.sequence, work.start + work.count - len(work.guesses) + ahead - 1, 1, samples=True)


def _draw(
    logits_NV: Tensor, sequences: Seq[Sequence], numbers: list[float], greedy: bool
) -> tuple[Tensor, Tensor | None]:
    """A token for each row, and what it was drawn from, if not all are greedy."""
    if greedy:
        return logits_NV.argmax(dim=-1), None
    # A draft whose logits are no numbers proposes anything: the model decides.
    sound_N1 = logits_NV.amax(dim=-1, keepdim=True).isfinite()
    q_NV = distribution(torch.where(sound_N1, logits_NV, 0.0), sequences)
    return draw(q_NV, torch.tensor(numbers, dtype=torch.float64, device=q_NV.device)), q_NV


def check_draft(draft: Llama, model: Llama) -> None:
    """Raises ValueError where the two do not count in the same tokens, or are apart."""
    theirs, ours = draft.config.vocab_size, model.config.vocab_size
    if theirs != ours:
        raise ValueError(f"the draft model has {theirs} tokens and the model {ours}; both must have the same")
    there, here = (next(each.parameters()).device for each in (draft, model))
    if there != here:
        raise ValueError(f"the draft model is on {there} and the model on {here}; both must be on one device")


def guesses_of(draft: object, wanted: int | None, looked_up: int, ranks: int) -> int:
    """How many tokens a draft guesses in each step.

    Args:
        draft: the model, or its path; None for no draft.
        wanted: what the user says.
        looked_up: guesses from the text itself.
        ranks: processes that share the model.

    Raises:
        ValueError: what does not go together.
    """
    if draft is None and wanted is not None:
        raise ValueError("num_speculative_tokens needs a draft model; speculative_tokens guesses from the text itself")
    if draft is not None and looked_up:
        raise ValueError("speculative_tokens guesses from the text and draft from a model; choose one")
    if draft is not None and ranks != 1:
        raise ValueError("a draft model runs in one process; leave draft or tensor_parallel_size out")
    return GUESSES if wanted is None else wanted


def load_draft(path: str | Path, model: Llama, kernels: str, progress: Callable[[int, int], None] | None) -> Llama:
    """A draft model in the precision and on the device of the model. Raises ValueError as `load_for_inference`."""
    weight = next(model.parameters())
    place = local_path(Path(path).expanduser())
    return load_for_inference(place, weight.dtype, weight.device, kernels=kernels, progress=progress)


def build_drafter(
    draft: Llama, settings: EngineSettings, num_blocks: int, max_num_seqs: int, max_model_len: int
) -> Drafter:
    """A drafter with a cache of so many blocks."""
    weight = next(draft.parameters())
    attend_rows = attention_for(settings.attention, settings.kernels, draft.config, weight.device, weight.dtype)
    cache = PagedKVCache(draft.config, num_blocks, settings.block_size, weight.dtype, weight.device)
    graphs = weight.device.type == "cuda" and attend_rows is None and not settings.enforce_eager
    return Drafter(ModelRunner(draft, cache, max_num_seqs, max_model_len, attend_rows, graphs=graphs))
