"""One line for each request that was answered, where they are wanted; its words only where those are wanted too."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from .generation import Generation
from .service import Service, log


def log_request(service: Service, name: str, prompts: Sequence[Any], generation: Generation) -> None:
    if not (service.settings.log_requests or service.settings.log_prompts):
        return
    tokens = sum(len(request.prompt_ids) for request in generation.requests)
    made = sum(len(sequence.token_ids) for sequence in generation.sequences)
    seconds = time.perf_counter() - generation.begun
    reasons = ", ".join(sorted({str(sequence.finish_reason) for sequence in generation.sequences}))
    log.info("%s: %d tokens of prompt, %d produced in %.2f s, %s", name, tokens, made, seconds, reasons)
    if service.settings.log_prompts:
        for prompt in prompts:
            log.info("%s asked: %r", name, prompt)
        for sequence in generation.sequences:
            log.info("%s answered: %r", name, sequence.text)
