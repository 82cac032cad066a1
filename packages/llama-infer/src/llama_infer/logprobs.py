"""Log-probabilities of produced tokens and of prompts: of the raw logits, whatever the sampling settings are."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from llama_core import Llama, Tokenizer

from .outputs import Logprob
from .scheduler import Work


class LogprobWriter:
    """Notes log-probabilities in the sequences that ask for them.

    Args:
        model: scores hidden states of prompts.
        tokenizer: for the texts of tokens.
        logits_of: hidden states (T, E) of a step and some of their rows → logits, in place of the model's own; where
            several ranks must compute them together.
    """

    def __init__(
        self,
        model: Llama,
        tokenizer: Tokenizer | None,
        logits_of: Callable[[Tensor, slice], Tensor] | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.logits_of = logits_of or (lambda hidden_TE, rows: model.logits(hidden_TE[rows]))

    @torch.inference_mode()
    def of_prompt(self, batch: list[Work], hidden_TE: Tensor) -> None:
        """What each row of a prompt says about the token after it."""
        end = 0
        for work in batch:
            begin, end = end, end + work.count
            sequence, wanted = work.sequence, work.sequence.params.prompt_logprobs
            rows = min(work.count, len(sequence.prompt_ids) - 1 - work.start)
            if wanted is None or rows < 1:
                continue
            logits_SV = self.logits_of(hidden_TE, slice(begin, begin + rows))
            next_ids = sequence.prompt_ids[work.start + 1 : work.start + 1 + rows]
            for offset, entry in enumerate(self._entries(logits_SV, next_ids, wanted)):
                sequence.prompt_logprobs[work.start + 1 + offset] = entry

    @torch.inference_mode()
    def entry(self, logits_V: Tensor, token_id: int, wanted: int) -> dict[int, Logprob]:
        """Of a token that was drawn from these logits."""
        return self._entries(logits_V.unsqueeze(0), [token_id], wanted)[0]

    def _entries(self, logits_SV: Tensor, token_ids: list[int], wanted: int) -> list[dict[int, Logprob]]:
        logprobs_SV = logits_SV.float().log_softmax(dim=-1)
        own_S1 = logprobs_SV.gather(1, torch.tensor(token_ids, device=logits_SV.device).unsqueeze(1))
        ranks = ((logprobs_SV > own_S1).sum(dim=1) + 1).tolist()
        most = logprobs_SV.topk(min(wanted, logits_SV.shape[1]), dim=1) if wanted else None
        entries = []
        for row, (token_id, own) in enumerate(zip(token_ids, own_S1.flatten().tolist(), strict=True)):
            entry = {token_id: Logprob(own, ranks[row], self._text(token_id))}
            if most is not None:
                pairs = zip(most.indices[row].tolist(), most.values[row].tolist(), strict=True)
                for rank, (other, logprob) in enumerate(pairs, start=1):
                    entry.setdefault(other, Logprob(logprob, rank, self._text(other)))
            entries.append(entry)
        return entries

    def _text(self, token_id: int) -> str | None:
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return None
        return self.tokenizer.decode([token_id], skip_special=False)
