"""A draft model of the Llama-3.2-1B shape before one of the Llama-3-8B shape on one GPU, random bfloat16 weights.

    python benchmarks/speculative.py [--tiny] [--acceptance 0.7] [--guesses 2 3 4 5] [--batches 1 4]

Random weights agree about nothing, so acceptance is made up: after the whole step has run, checks and draws included, a
coin of the given chance says of each guess whether it stands. Everything else is the engine as it is. Prompt 128, 200
new tokens, greedy; each is run once to warm up and then timed. --tiny rehearses it on a CPU.
"""

from __future__ import annotations

import argparse
import platform
import random
from dataclasses import replace
from typing import Any

import torch
from engine import Bench

from llama_core import Llama, pack_projections, preset
from llama_infer.sampler import Drawn, Sampler


class CoinSampler(Sampler):
    """Draws as another sampler, and then lets a coin decide which proposals stand."""

    def __init__(self, sampler: Sampler, acceptance: float) -> None:
        super().__init__(sampler.fast)
        self.acceptance = acceptance
        self.coin = random.Random(0)

    def draw(self, logits_RV: Any, sequences: Any, newest: Any, allowed: Any = None, proposals: Any = None) -> Drawn:
        results = super().draw(logits_RV, sequences, newest, allowed, proposals).wait()
        ids = [token_id for token_id, _ in results]
        if proposals is not None:
            for row, token_id in zip(proposals.rows, proposals.tokens.tolist(), strict=True):
                stands = self.coin.random() < self.acceptance
                ids[row] = token_id if stands else (token_id + 1) % logits_RV.shape[1]
        return Drawn(torch.tensor([ids, [largest for _, largest in results]], dtype=torch.float64), None)


def model_of(bench: Bench, name: str) -> Llama:
    bench.config = replace(preset("tiny"), max_position_embeddings=1024) if bench.tiny else preset(name)
    model = bench.model()
    pack_projections(model)
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--acceptance", type=float, default=0.7)
    parser.add_argument("--guesses", type=int, nargs="+", default=[2, 3, 4, 5])
    parser.add_argument("--batches", type=int, nargs="+", default=[1])
    arguments = parser.parse_args()
    bench = Bench(arguments.tiny)
    print(f"{platform.machine() if bench.tiny else torch.cuda.get_device_name()}, torch {torch.__version__}")
    draft = model_of(bench, "llama-3.2-1b")
    model = model_of(bench, "llama-3-8b")
    for batch in arguments.batches:
        alone = 0.0
        for guesses in (0, *arguments.guesses):
            settings = {"draft": draft, "num_speculative_tokens": guesses} if guesses else {}
            llm = bench.llm(model, max_model_len=512, max_num_seqs=batch, **settings)
            if guesses:
                llm.engine.sampler = CoinSampler(llm.engine.sampler, arguments.acceptance)
            seconds = bench.generate(llm, [128] * batch, 200)
            rate = batch * (200 / bench.scale) / seconds
            if not guesses:
                alone = rate
                bench.row(f"batch {batch}", "no draft", f"{rate:.1f} tokens/s")
                continue
            held = f"{llm.acceptance_rate:.0%} of guesses stood" if llm.acceptance_rate is not None else ""
            bench.row(f"batch {batch}", f"{guesses} guesses", f"{rate:.1f} tokens/s", f"{rate / alone:.2f} ×; {held}")
            del llm


if __name__ == "__main__":
    main()
