"""`llama-infer bench`: measurements that explain."""

from __future__ import annotations

import dataclasses
import importlib.util
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .cli_options import ModelOptions, model_path

if TYPE_CHECKING:
    from rich.console import Console

    from .heads_bench import Row

PROMPT = "The answer to the ultimate question of life, the universe, and everything is"
CLAIMS = {"one": "2.3 ms", "all": "4.1 ms for 32", "memory": "40% less", "engine": "3.2 ×"}
"""Of the article that inspired this, on hardware it does not name."""
INSTALL = 'pip install "llama-infer[bench]"'


@dataclass(frozen=True, kw_only=True)
class Bench(ModelOptions):
    """Measure on this machine: latency and throughput of a model, beside what the device can do at best.

    Every --batch-sizes with every --prompt-lengths: the time to the first token, the step, tokens per second, and the
    share of the roof, which is the arithmetic at the device's own matrix rate or the bytes to read at its copy rate,
    whichever takes longer. Both rates are measured first.

    --heads instead: the attention of one layer with one head, a loop over all heads, and all heads at once; with as
    many key/value heads, grouped ones and a single one; and generation by the engine against a loop without a cache.

    `llama-infer bench serve` measures a server; its own --help says how.
    """

    batch_sizes: tuple[int, ...] = (1, 4, 16)
    """Sequences that generate at once."""
    prompt_lengths: tuple[int, ...] = (128, 512)
    """Tokens of each prompt."""
    max_tokens: int | None = None
    """New tokens to generate. Default: 64, and 24 with --heads."""
    json: Path | None = None
    """Write the numbers to this file."""
    png: Path | None = None
    """Draw them into this file; needs the extra `bench`."""
    heads: bool = False
    """Measure heads."""
    shape: str = "llama-3-8b"
    """With --heads: whose layer, a preset of llama_core."""
    tokens: int = 128
    """With --heads: tokens of the sequence."""
    tp: int = 4
    """With --heads: tensor-parallel ranks in the columns of what each holds and sends."""

    def run(self) -> int:
        if self.max_tokens is not None and self.max_tokens < 1:
            raise ValueError(f"--max-tokens is {self.max_tokens}; it must be at least 1")
        return self._heads(self.max_tokens or 24) if self.heads else self._engine(self.max_tokens or 64)

    def _engine(self, new: int) -> int:
        for name in ("batch_sizes", "prompt_lengths"):
            if not getattr(self, name) or min(getattr(self, name)) < 1:
                raise ValueError(f"--{name.replace('_', '-')} must be numbers of at least 1, got {getattr(self, name)}")
        if new < 2:
            raise ValueError(f"--max-tokens is {new}; it must be at least 2, for a step after the first token")
        for path in (self.json, self.png):
            if path is not None and not path.parent.is_dir():
                raise ValueError(f"{path}: there is no folder {path.parent}")
        if self.png is not None and importlib.util.find_spec("matplotlib") is None:
            raise ValueError(f"--png needs matplotlib: {INSTALL}")
        fitting = dataclasses.replace(
            self,
            max_num_seqs=self.max_num_seqs or max(self.batch_sizes),
            max_model_len=self.max_model_len or max(self.prompt_lengths) + new,
        )
        llm = fitting.load()
        from rich.console import Console

        from .bench_report import device_name, print_table, told_rates, write_json, write_picture
        from .device_rates import measure_rates
        from .embedded import NAME
        from .engine_bench import bench_engine

        weight = next(llm.model.parameters())
        rates = measure_rates(weight.device, weight.dtype)
        device = device_name(weight.device)
        about = {
            "model": NAME if self.model is None else self.model,
            "dtype": str(weight.dtype).removeprefix("torch."),
            "quantization": self.quantization,
            "kv_cache_dtype": self.kv_cache_dtype,
            "device": device,
        }
        points = bench_engine(llm, rates, self.batch_sizes, self.prompt_lengths, new)
        title = ", ".join(str(value) for value in about.values() if value and value != "auto")
        print_table(points, f"{title}: {new} new tokens each", Console(file=sys.stdout))
        print(told_rates(rates))
        if self.json is not None:
            write_json(self.json, points, rates, about)
        if self.png is not None:
            write_picture(self.png, points, f"{title}\n{told_rates(rates)}")
        return 0

    def _heads(self, max_tokens: int) -> int:
        path = model_path(self.model)
        from rich.console import Console

        from llama_core import preset

        from .heads_bench import bench_heads
        from .placement import DTYPES, resolve_device

        device, dtype = resolve_device(self.device), "float32" if self.dtype == "auto" else self.dtype
        rows = bench_heads(preset(self.shape), tokens=self.tokens, tp=self.tp, dtype=DTYPES[dtype], device=device)
        console = Console(file=sys.stdout)
        what = f"attention of one {self.shape} layer, {self.tokens} tokens, {dtype} on {device}"
        _print_rows(rows, what, self.tp, console)
        naive, engine, same = engine_over_naive(str(path), str(device), max_tokens)
        _print_claims(rows, naive / engine, console)
        ids = "the same ids" if same else "OTHER ids"
        print(f"{max_tokens} greedy tokens of {path.name}: naive {naive:.2f} s, engine {engine:.2f} s, {ids}")
        return 0


def engine_over_naive(path: str, device: str, max_tokens: int) -> tuple[float, float, bool]:
    """Seconds that a loop without a cache takes, and the engine, in float32; whether their tokens are the same."""
    from llama_core import load_tokenizer

    from .llm import LLM
    from .sampling_params import SamplingParams

    ids = load_tokenizer(path).encode(PROMPT)
    naive, expected = _naive(path, device, ids, max_tokens)
    llm = LLM(path, dtype="float32", device=device, generation_config="off")
    llm.generate([ids[-1:]], SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True))  # starts threads
    start = time.perf_counter()
    output = llm.generate([ids], SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True))[0]
    return naive, time.perf_counter() - start, list(output.token_ids) == expected


def _naive(path: str, device: str, ids: list[int], max_tokens: int) -> tuple[float, list[int]]:
    import torch

    from llama_core import generate_naive, load_model

    model = load_model(path, dtype=torch.float32, device=device)

    def logits(tokens: torch.Tensor) -> torch.Tensor:
        return model.logits(model(tokens))

    generate_naive(logits, ids, max_new_tokens=1, device=device)  # starts threads
    start = time.perf_counter()
    found = generate_naive(logits, ids, max_new_tokens=max_tokens, device=device)
    return time.perf_counter() - start, found


def _print_rows(rows: Sequence[Row], what: str, tp: int, console: Console) -> None:
    from rich import box
    from rich.table import Table

    from .inspection.report import amount, duration

    table = Table(title=what, box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    table.add_column("heads", no_wrap=True)
    for name in ("KV", "FLOPs", "weights", "cache", f"cache/tp {tp}", f"sent/tp {tp}", "time"):
        table.add_column(name, justify="right")
    for row in rows:
        sizes = (row.weight_bytes, row.cache_bytes, row.rank_cache_bytes, row.sent_bytes)
        table.add_row(
            row.way, str(row.kv_heads), amount(row.flops).strip(), *(amount(size) + "B" for size in sizes),
            duration(row.seconds),
        )  # fmt: skip
    console.print(table)


def _print_claims(rows: Sequence[Row], speed_up: float, console: Console) -> None:
    from rich import box
    from rich.table import Table

    from .heads_bench import BATCHED, LOOP, ONE
    from .inspection.report import duration

    full = max(row.kv_heads for row in rows)
    grouped = next((row.kv_heads for row in rows if row.way == BATCHED and row.kv_heads not in (1, full)), full)
    found = {(row.way, row.kv_heads): row for row in rows if row.way != ONE}
    first = next(row for row in rows if row.way == ONE)
    most, some = found[BATCHED, full], found[BATCHED, grouped]
    weights, cache = 1 - some.weight_bytes / most.weight_bytes, 1 - some.cache_bytes / most.cache_bytes
    loop, batch = (duration(found[way, grouped].seconds) for way in (LOOP, BATCHED))
    table = Table(title="beside the article's claims", box=box.SIMPLE_HEAD, title_justify="left", title_style="bold")
    for name in ("", "claimed", "here"):
        table.add_column(name)
    table.add_row("one head", CLAIMS["one"], duration(first.seconds))
    table.add_row("all heads", CLAIMS["all"], f"{loop} in a loop, {batch} batched ({most.heads})")
    saving = f"{cache:.0%} of keys and values, {weights:.1%} of weights"
    table.add_row(f"{grouped} for {full} KV heads", CLAIMS["memory"], f"saves {saving}")
    table.add_row("engine over naive loop", CLAIMS["engine"], f"{speed_up:.1f} ×")
    console.print(table)
