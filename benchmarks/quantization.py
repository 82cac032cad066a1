"""What rounding costs: perplexity of one model on one text, with weights or cache of fewer bits, as a Markdown table.

    python benchmarks/quantization.py RUN/hf held_out.txt
    python benchmarks/quantization.py RUN/hf --held-out RUN/data/held_out.npy --tokens 30000

Everything goes through the engine, as it generates. The error of the weights stands beside it: the root mean square of
what rounding has changed, relative to that of the weights themselves.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import numpy as np
import torch

from llama_core import load_model, load_tokenizer
from llama_infer import LLM
from llama_infer.embedded import embedded_model
from llama_infer.perplexity import measure
from llama_infer.rounding import QUANTIZATIONS, Rounded, round_weight


def decoded(rounded: Rounded) -> torch.Tensor:
    codes = rounded.codes.float().unflatten(1, (rounded.scale.shape[1], -1))
    zero = 0 if rounded.zero is None else rounded.zero.unsqueeze(2)
    return ((codes - zero) * rounded.scale.float().unsqueeze(2)).flatten(1)


def weight_error(path: Path, kind: str, dtype: torch.dtype) -> float:
    """Of all weights of the layers together."""
    changed = whole = 0.0
    for name, weight in load_model(path, dtype).named_parameters():
        if name.endswith("_proj.weight"):
            wide = weight.detach().float()
            changed += float((decoded(round_weight(weight, kind)) - wide).square().sum())
            whole += float(wide.square().sum())
    return (changed / whole) ** 0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("model", help="what LLM(…) takes; - for the embedded model")
    parser.add_argument("text", nargs="?", help="a file of text")
    parser.add_argument("--held-out", help="in place of a text: token ids of a training run")
    parser.add_argument("--tokens", type=int, default=30_000, help="of the beginning of --held-out")
    parser.add_argument("--bytes", type=int, default=100_000, help="of the beginning of the text")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--window", type=int, default=512)
    parser.add_argument("--variants", nargs="*", default=[*QUANTIZATIONS, "cache fp8", "int8, cache fp8"])
    given = parser.parse_args()
    path = embedded_model() if given.model == "-" else Path(given.model)
    if given.held_out is not None:
        ids = np.load(given.held_out, mmap_mode="r").reshape(-1)[: given.tokens]
        text = load_tokenizer(path).decode([int(token_id) for token_id in ids], skip_special=True)
    else:
        text = Path(given.text).read_bytes()[: given.bytes].decode(errors="ignore")

    def perplexity(quantization: str | None, cache: str) -> float:
        llm = LLM(path, dtype=given.dtype, quantization=quantization, kv_cache_dtype=cache)
        window = min(given.window, llm.max_model_len - 1)
        return measure(llm, text, window, max(1, window // 2)).perplexity

    start = time.perf_counter()
    base = perplexity(None, "auto")
    print("| weights | cache | error of the weights | perplexity | against the first |\n|---|---|---|---|---|")
    print(f"| {given.dtype} | {given.dtype} | | {base:.4f} | |", flush=True)
    for variant in given.variants:
        kind = next((kind for kind in QUANTIZATIONS if variant.startswith(kind)), None)
        cache = "fp8" if variant.endswith("cache fp8") else "auto"
        try:
            found = perplexity(kind, cache)
        except ValueError as error:
            print(f"| {kind} | | | {error} | |", flush=True)
            continue
        error = "" if kind is None else f"{weight_error(path, kind, getattr(torch, given.dtype)):.2%}"
        names = kind or given.dtype, "fp8" if cache == "fp8" else given.dtype
        print(f"| {names[0]} | {names[1]} | {error} | {found:.4f} | {found / base - 1:+.2%} |", flush=True)
    print(f"\n{len(text.encode()):,} bytes of text, {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
