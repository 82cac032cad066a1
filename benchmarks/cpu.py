"""Generation on a CPU beside transformers, and the memory that loading takes. The model is the embedded SmolLM2-135M.

    python benchmarks/cpu.py [--quick] [--threads N] [--save]

Generation: float32, greedy, prompt 64, 48 new tokens, the prompt's pass included; the two take turns on the same
prompts, each repeat on new ones (so that no cached prompt helps), and the ratio is the median over the repeats of
transformers' seconds divided by ours. Both must produce the same tokens. Loading: in a process of its own, the peak of
resident memory over what was resident before, divided by the bytes of the loaded weights.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers
from rich.console import Console
from rich.table import Table

from llama_core import load_model, save_model
from llama_infer import LLM, SamplingParams
from llama_infer.embedded import embedded_model

PROMPT, NEW = 64, 48
BARS = {1: 1.3, 16: 1.1}
"""Batch size to the ratio promised."""
MEMORY_BAR = 1.15
PARAMS = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True)


def seconds(call: Callable[[], Any]) -> tuple[float, Any]:
    start = time.perf_counter()
    result = call()
    return time.perf_counter() - start, result


def generation(path: Path, repeats: dict[int, int]) -> list[tuple[int, float, float, float, float]]:
    """For each batch size: our and their tokens/s, the ratio of times, and the share of equal tokens."""
    llm = LLM(path, dtype="float32", device="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        theirs = transformers.AutoModelForCausalLM.from_pretrained(
            path.parent, gguf_file=path.name, dtype=torch.float32
        ).eval()
    theirs.generation_config.eos_token_id = None
    generator = torch.Generator().manual_seed(0)
    rows = []
    for batch, count in repeats.items():
        times: list[tuple[float, float]] = []
        equal = 0
        for repeat in range(count + 1):
            tokens = torch.randint(10, 49000, (batch, PROMPT), generator=generator)
            prompts = tokens.tolist()
            mask = torch.ones_like(tokens)
            ours_s, outputs = seconds(lambda prompts=prompts: llm.generate(prompts, PARAMS))
            with torch.inference_mode():
                theirs_s, their_tokens = seconds(
                    lambda tokens=tokens, mask=mask: theirs.generate(
                        tokens, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0
                    )
                )
            if repeat == 0:
                continue  # the first round warms both
            times.append((ours_s, theirs_s))
            ours = torch.tensor([output.token_ids for output in outputs])
            equal += int((ours == their_tokens[:, PROMPT:]).sum())
        ours_s, theirs_s = (statistics.median(column) for column in zip(*times))
        ratio = statistics.median(b / a for a, b in times)
        rows.append((batch, batch * NEW / ours_s, batch * NEW / theirs_s, ratio, equal / (batch * NEW * count)))
    return rows


def load_memory(path: Path) -> float:
    """Peak of resident memory while `path` is loaded, beyond what was before, over the size of the weights."""
    code = (
        "import sys, torch\n"
        "from pathlib import Path\n"
        "from llama_core import load_model\n"
        "def kib(key):\n"
        "    lines = Path('/proc/self/status').read_text().splitlines()\n"
        "    return int(next(line for line in lines if line.startswith(key)).split()[1])\n"
        "torch.ones(100, 100) @ torch.ones(100, 100)\n"
        "Path('/proc/self/clear_refs').write_text('5')  # the peak begins now\n"
        "before = kib('VmRSS')\n"
        "model = load_model(sys.argv[1], dtype=torch.float32)\n"
        "size = sum(p.numel() * p.element_size() for p in model.parameters())\n"
        "print((kib('VmHWM') - before) * 1024 / size)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=True, capture_output=True, text=True)
    return float(done.stdout)


def cpu_name() -> str:
    with open("/proc/cpuinfo", encoding="utf-8") as file:
        return next((line.split(":")[1].strip() for line in file if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--save", action="store_true", help="write the table to benchmarks/results/cpu.md")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = embedded_model()

    table = Table("measure", "ours", "transformers", "ratio", "promised", "same tokens")
    lines = ["| measure | ours | transformers | ratio | promised | same tokens |", "|---|---|---|---|---|---|"]

    def row(*cells: str) -> None:
        table.add_row(*cells)
        lines.append(f"| {' | '.join(cells)} |")

    for batch, ours, theirs, ratio, same in generation(path, {1: 3, 16: 2} if arguments.quick else {1: 15, 16: 7}):
        speeds = f"{ours:.1f} tokens/s", f"{theirs:.1f} tokens/s"
        row(f"generate, batch {batch}", *speeds, f"{ratio:.2f}", f"≥ {BARS[batch]}", f"{same:.0%}")
    if sys.platform == "linux":
        with tempfile.TemporaryDirectory() as folder:
            save_model(load_model(path), Path(folder) / "hf")
            for name, source in (("HF folder", Path(folder) / "hf"), ("GGUF file", path)):
                row(f"peak memory of loading, {name}", "", "", f"{load_memory(source):.2f}", f"≤ {MEMORY_BAR}", "")

    busy = os.getloadavg()[0] - arguments.threads
    where = f"{cpu_name()}, {arguments.threads} threads, torch {torch.__version__}"
    where += f", transformers {transformers.__version__}"
    console = Console()
    console.print(table)
    console.print(where)
    if busy > 0.5:
        console.print(f"[yellow]the machine was busy with other work (load {busy:.1f} beside ours)")
    if arguments.save:
        command = "python benchmarks/cpu.py" + " --quick" * arguments.quick + f" --threads {arguments.threads} --save"
        commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
        text = f"# CPU\n\n`{command}` at {commit or 'no commit'}; {where}\n\n" + "\n".join(lines) + "\n"
        if busy > 0.5:
            text += f"\nThe machine was busy with other work (load {busy:.1f} beside ours).\n"
        (Path(__file__).parent / "results" / "cpu.md").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
