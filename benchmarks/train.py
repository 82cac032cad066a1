"""Training on one GPU against what else one would take, in one table; each row's rivals in the same call.

    python benchmarks/train.py                          # everything: about six minutes on an H200
    python benchmarks/train.py --only smol --profile    # one group, with the kernels of our step
    python benchmarks/train.py --tiny                   # a rehearsal on a CPU with tiny shapes; its times say nothing

Groups: smol (SmolLM-1.7B, 8 × 2048 tokens), 8b (Llama-3-8B, 1 × 8192), long (the longest sequence of 8B), loop (the
whole loop over its bare step, with and without saving), learn (the quickstart's data in bfloat16 and in fp8). Every
group is a process of its own, so that each begins with an empty GPU; within one, everything is freed between works.

Rivals are transformers' LlamaForCausalLM with torch's fused AdamW: as it is; with each layer compiled and cuDNN's
attention (the fastest combination here); with Liger's kernels, where they can be imported; and our own model in plain
torch. All train in bfloat16 throughout, on random tokens, without clipping. picotron needs flash-attn 2, which comes
without wheels; its figure is that of an earlier run on the same kind of machine (54.3% MFU, 54.6 GB).
"""

from __future__ import annotations

import argparse
import json
import platform
import subprocess
import sys
import time
from pathlib import Path

import torch
from gpu_timing import commit
from train_works import GROUPS, run_group

TIMEOUTS = {"smol": 120, "8b": 110, "long": 110, "loop": 100, "learn": 100}


def main() -> None:
    """Run the groups one after the other and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups, separated by commas")
    parser.add_argument(
        "--skip", default="", help='programs, separated by semicolons: "transformers; 8b: transformers, Liger"'
    )
    parser.add_argument("--seconds", type=float, default=2.5, help="of timed steps of each work")
    parser.add_argument("--profile", action="store_true", help="print where our steps spend their time")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, on a CPU where there is no GPU")
    parser.add_argument("--out", help="folder for results.json")
    parser.add_argument("--group", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    skip = [name.strip() for name in arguments.skip.split(";")]
    if arguments.group:
        run_group(arguments.group, arguments.seconds, arguments.tiny, arguments.profile, skip, say)
        return
    results: list[dict[str, object]] = []
    started = time.monotonic()
    for group in arguments.only.split(","):
        if group not in GROUPS:
            parser.error(f"--only {group!r}: choose from {', '.join(GROUPS)}")
        results += in_own_process(group, sys.argv[1:], TIMEOUTS[group])
        if arguments.out:
            Path(arguments.out, "results.json").write_text(json.dumps(results, indent=1), encoding="utf-8")
    print(report(results, time.monotonic() - started))


def say(kind: str, value: object) -> None:
    """From a group's process to this program, a line of JSON; everything else that it prints is passed on."""
    print(f"RESULT {json.dumps({'kind': kind, 'value': value})}", flush=True)


def in_own_process(group: str, arguments: list[str], timeout: float) -> list[dict[str, object]]:
    """What the group's process said until it ended or its time was up."""
    command = [sys.executable, __file__, *arguments, "--group", group]
    started, found = time.monotonic(), []
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if line.startswith("RESULT "):
                found.append({"group": group, **json.loads(line.removeprefix("RESULT "))})
            print(line, end="", flush=True)
            if time.monotonic() - started > timeout:  # looked at between works: each prints
                process.kill()
                print(f"group {group}: stopped after {timeout} s", flush=True)
                break
    print(f"group {group}: {time.monotonic() - started:.0f} s", flush=True)
    return found


def report(results: list[dict[str, object]], seconds: float) -> str:
    """The tables of this run, in Markdown."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "a CPU"
    lines = ["", f"{device}, torch {torch.__version__}, Python {platform.python_version()}, commit {commit()}, "]
    lines[-1] += f"{seconds:.0f} s"
    steps = [r["value"] for r in results if r["kind"] == "step"]
    if steps:
        lines += [
            "",
            "| work | who | ms/step | tokens/s | MFU % | torchtitan's % | peak GB | speed ÷ ours | GB ÷ ours |",
        ]
        lines += ["|---|---|---|---|---|---|---|---|---|"]
    for step in steps:
        assert isinstance(step, dict)
        base = next((s for s in steps if s["work"] == step["work"] and s["who"] == "ours"), None)  # type: ignore[index]
        ratios = ("–", "–")
        if base is not None:
            ratios = (f"{step['speed'] / base['speed']:.3f}", f"{step['peak'] / max(1, base['peak']):.3f}")
        lines.append(
            f"| {step['work']} | {step['who']} | {1000 * step['seconds']:.1f} | {step['speed']:,.0f} | "
            f"{100 * step['mfu']:.1f} | {100 * step['mfu_torchtitan']:.1f} | {step['peak'] / 1e9:.1f} | "
            f"{ratios[0]} | {ratios[1]} |"
        )
    for kind in ("loop", "learn"):
        found = [r["value"] for r in results if r["kind"] == kind]
        if found:
            lines += ["", f"| {kind} | |", "|---|---|"]
            lines += [f"| {name} | {value} |" for entry in found for name, value in entry.items()]  # type: ignore[attr-defined]
    failed = [r["value"] for r in results if r["kind"] == "failed"]
    lines += ["", *(f"failed: {value}" for value in failed)] if failed else []
    return "\n".join(lines)


if __name__ == "__main__":
    main()
