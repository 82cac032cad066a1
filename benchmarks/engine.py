"""llama-infer's engine beside transformers on one GPU: the Llama-3-8B shape with random bfloat16 weights.

    python benchmarks/engine.py [--tiny] [--only batch1 requests …] [--no-rivals] [--profile]

batch1: prompt 128, 200 new tokens; int8, int4, fp8: the same with rounded weights. requests: 256 of 100 to 1024 prompt
tokens, 256 new ones each. batch64: prompt 512, 128 new tokens. first_token: of a prompt of 8176. Each is run once to
warm up (kernels compiled, graphs captured) and then timed, prompts included; every prompt is new, so nothing is cached.
The roof counts the bytes of the weights at the rate at which this card copies, and prompts at its matrix rate.
--tiny rehearses it all on a CPU.
"""

from __future__ import annotations

import argparse
import gc
import platform
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from llama_core import Llama, pack_projections, preset
from llama_infer import LLM, SamplingParams
from llama_infer.placement import ops_for
from llama_infer.quantize import quantize_model

QUOTED = {"batch1": "gpt-fast 170.7", "requests": "transformers continuous batching 544", "batch64": "transformers 877"}
"""Measured earlier on an H200 (not in this run)."""


class Bench:
    def __init__(self, tiny: bool) -> None:
        self.tiny = tiny
        self.device = torch.device("cpu" if tiny else "cuda")
        self.config = replace(preset("tiny"), max_position_embeddings=1024) if tiny else preset("llama-3-8b")
        self.dtype = torch.float32 if tiny else torch.bfloat16
        self.scale = 16 if tiny else 1  # every number of tokens is divided by it
        self.generator = torch.Generator().manual_seed(0)
        self.rows: list[tuple[str, str, str, str]] = []

    def model(self) -> Llama:
        with torch.device("meta"):
            model = Llama(self.config, ops_for(self.device))
        model = model.to(self.dtype).to_empty(device=self.device).eval().requires_grad_(False)
        for parameter in model.parameters():
            parameter.normal_(0, 0.02)
        return model

    def prompts(self, lengths: list[int]) -> list[list[int]]:
        high = self.config.vocab_size
        return [torch.randint(high, (max(1, n // self.scale),), generator=self.generator).tolist() for n in lengths]

    def llm(self, model: Llama, **settings: Any) -> LLM:
        settings["max_model_len"] = settings["max_model_len"] // self.scale
        if not self.tiny:
            settings.setdefault("kv_cache_memory_bytes", 60 * 2**30)
        return LLM(model, **settings)

    def timed(self, call: Callable[[], Any]) -> float:
        if not self.tiny:
            torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        if not self.tiny:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    def generate(self, llm: LLM, lengths: list[int], new: int) -> float:
        """Seconds of the second run."""
        params = SamplingParams(temperature=0.0, max_tokens=max(1, new // self.scale), ignore_eos=True)
        seconds = 0.0
        for _ in range(2):
            prompts = self.prompts(lengths)
            seconds = self.timed(lambda prompts=prompts: llm.generate(prompts, params, show_progress=False))
        return seconds

    def row(self, name: str, what: str, value: str, note: str = "") -> None:
        self.rows.append((name, what, value, note))
        print(f"| {name} | {what} | {value} | {note} |", flush=True)


def batch1(bench: Bench, model: Llama, name: str, copy_rate: float) -> float:
    llm = bench.llm(model, max_model_len=512, max_num_seqs=1)
    prompt = bench.generate(llm, [128], 1)
    seconds = bench.generate(llm, [128], 200)
    rate = 200 / bench.scale / seconds
    tensors = [*model.model.layers.parameters(), *model.model.layers.buffers(), model.lm_head.weight]  # type: ignore[union-attr]
    unique = {t.data_ptr(): t.nbytes for t in tensors}
    roof = copy_rate / sum(unique.values())
    bench.row(name, "prompt 128, 200 new", f"{rate:.1f} tokens/s", f"roof {roof:.0f}; {QUOTED.get(name, '')}")
    bench.row(name, "of it the prompt, to its first token", f"{1e3 * prompt:.1f} ms")
    return rate


def requests(bench: Bench, model: Llama) -> None:
    lengths = torch.randint(100, 1025, (256,), generator=bench.generator).tolist()
    llm = bench.llm(model, max_model_len=2048, max_num_seqs=256)
    seconds = bench.generate(llm, lengths, 256)
    rate = 256 * (256 / bench.scale) / seconds
    bench.row("requests", "256 of 100-1024, 256 new", f"{rate:.0f} tokens/s", QUOTED["requests"])


def batch64(bench: Bench, model: Llama) -> float:
    llm = bench.llm(model, max_model_len=1024, max_num_seqs=64)
    seconds = bench.generate(llm, [512] * 64, 128)
    rate = 64 * (128 / bench.scale) / seconds
    bench.row("batch64", "prompt 512, 128 new", f"{rate:.0f} tokens/s", QUOTED["batch64"])
    return rate


def first_token(bench: Bench, model: Llama) -> None:
    llm = bench.llm(model, max_model_len=8192, max_num_seqs=1)
    seconds = bench.generate(llm, [8176], 1)
    tokens = torch.zeros(1, 8176 // bench.scale, dtype=torch.int64, device=bench.device)
    with torch.inference_mode():
        for _ in range(2):
            plain = bench.timed(lambda: model.logits(model(tokens)[:, -1]))
    bench.row("first_token", "prompt 8176", f"{seconds * 1e3:.0f} ms", f"the model alone: {plain * 1e3:.0f} ms")


def rivals(bench: Bench, ours: dict[str, float]) -> None:
    try:
        import transformers
    except ImportError:
        print("transformers is not installed: no rival")
        return
    transformers.logging.set_verbosity_error()
    config = transformers.LlamaConfig(**{**bench.config.to_hf(), "architectures": ["LlamaForCausalLM"]})
    with torch.device(bench.device):
        theirs = transformers.LlamaForCausalLM._from_config(config, dtype=bench.dtype).eval()
    theirs.generation_config.eos_token_id = None
    for name, rows, prompt, new in (("batch1", 1, 128, 50), ("batch64", 64, 512, 128)):
        if name not in ours:
            continue
        new = max(1, new // bench.scale)
        for _ in range(2):
            ids = torch.tensor(bench.prompts([prompt] * rows), device=bench.device)
            with torch.inference_mode():
                seconds = bench.timed(
                    lambda ids=ids, new=new: theirs.generate(
                        ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, do_sample=False, pad_token_id=0
                    )
                )
        rate = rows * new / seconds
        bench.row(name, "transformers, the same run", f"{rate:.1f} tokens/s", f"ours is {ours[name] / rate:.2f} times")


def copy_rate(bench: Bench) -> float:
    """Bytes per second, read and written."""
    source = torch.empty(2**24 if bench.tiny else 2**31, dtype=torch.uint8, device=bench.device).random_()
    target = torch.empty_like(source)
    seconds = min(bench.timed(lambda: target.copy_(source)) for _ in range(5))
    return 2 * source.nbytes / seconds


def profile(bench: Bench, model: Llama) -> None:
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as record

    for rows, prompt, length in ((1, 128, 512), (64, 512, 1024)):
        llm = bench.llm(model, max_model_len=length, max_num_seqs=rows)
        params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
        llm.generate(bench.prompts([prompt] * rows), params)
        with record(activities=[ProfilerActivity.CUDA]) as trace:
            llm.generate(bench.prompts([prompt] * rows), params)
        print(f"--- {rows} rows, prompt and 24 steps")
        print(trace.key_averages().table(sort_by="cuda_time_total", row_limit=14, max_name_column_width=60))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true")
    names = ["batch1", "requests", "batch64", "first_token", "int8", "int4", "fp8"]
    parser.add_argument("--only", nargs="+", default=names, choices=names)
    parser.add_argument("--no-rivals", action="store_true")
    parser.add_argument("--profile", action="store_true")
    arguments = parser.parse_args()
    bench = Bench(arguments.tiny)
    where = platform.machine() if bench.tiny else torch.cuda.get_device_name()
    print(f"{where}, torch {torch.__version__}")
    rate = copy_rate(bench)
    print(f"copy: {rate / 1e12:.2f} TB/s")
    ours: dict[str, float] = {}
    model = bench.model()
    pack_projections(model)
    if "batch1" in arguments.only:
        ours["batch1"] = batch1(bench, model, "batch1", rate)
    if "requests" in arguments.only:
        requests(bench, model)
    if "batch64" in arguments.only:
        ours["batch64"] = batch64(bench, model)
    if "first_token" in arguments.only:
        first_token(bench, model)
    if arguments.profile:
        profile(bench, model)
    del model
    for kind in ("int8", "fp8", "int4"):
        if kind in arguments.only:
            gc.collect()
            model = bench.model()
            if bench.tiny and kind == "int4":
                continue  # its 64 inputs are no group of 128
            quantize_model(model, kind)
            rounded = batch1(bench, model, kind, rate)
            if "batch1" in ours:
                bench.row(kind, "over bfloat16", f"{rounded / ours['batch1']:.2f}")
            del model
    if not arguments.no_rivals:
        gc.collect()
        if not bench.tiny:
            torch.cuda.empty_cache()
        rivals(bench, ours)


if __name__ == "__main__":
    main()
