"""Every parallel layout on 1, 2, 4 or 8 GPUs of one host: is it right, and how fast is it?

    python benchmarks/multigpu.py --out results                      all GPUs, parity, training, decoding: 8 minutes
    python benchmarks/multigpu.py --out results --only tp2,pp2       works whose names begin so ("parity", "decode" too)
    python benchmarks/multigpu.py --out results --only tp2 --profile tp2      and the kernels that took longest
    python benchmarks/multigpu.py --out results --device cpu --gpus 2 --quick     rehearsal: gloo, tiny shapes

It starts its ranks itself, anew for each work, so that an error or a lack of memory costs that work only; a work that
hangs is ended. Bfloat16 weights, gradients and AdamW states unless a name says float32; fused AdamW, no clipping.
MFU is picotron's (6 N + 12 L H S a token, both embedding tables, no causal halving), and in the next column the
standard one (without the input embedding, 6 L H S); the peak is 989.5 TFLOP/s. E is tokens/s/GPU over that of the
same model and length on one GPU in the same run. "alone" is communication that hides behind nothing, "idle" no kernel;
"host" is the share of a step until its last call returned (in brackets: of computing threads), near 100 where a process
launches too slowly for its GPU. "links" measures transfers and launches without a model.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from pathlib import Path

# The parent looks at no GPU, so that forked ranks may; this keeps torch's own questions off CUDA (torch.cuda docs).
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch
import torch._dynamo
import torch.distributed.fsdp
import torch.distributed.pipelining
import torch.distributed.tensor
from multigpu_decode import Decoded, DecodeWork, decode, decode_works
from multigpu_jobs import Outcome, Rank, run_job
from multigpu_links import links
from multigpu_parity import Case, Found, cases, compare
from multigpu_report import Report
from multigpu_train import train
from multigpu_works import Work, works


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder for tables, picture, profiles and errors")
    parser.add_argument("--gpus", type=int, help="1, 2, 4 or 8; by default all there are")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument(
        "--only", default="", help="beginnings of works' names, with commas between; also parity, decode"
    )
    parser.add_argument("--skip", default="", help="the same for what is left out")
    parser.add_argument("--profile", default="", metavar="NAME", help="beginnings of names: the kernels of one step")
    parser.add_argument("--compile", action="store_true", help="torch.compile of each layer")
    parser.add_argument("--quick", action="store_true", help="tiny shapes")
    parser.add_argument("--seconds", type=float, default=3.0, help="of timed steps for each work")
    parser.add_argument("--budget", type=float, default=460.0, help="seconds after which no new work begins")
    parser.add_argument("--list", action="store_true", help="only name the works")
    return parser.parse_args(words)


def chosen(name: str, options: argparse.Namespace) -> bool:
    """Whether --only and --skip leave this work in."""
    return (not options.only or begins(name, options.only)) and not begins(name, options.skip)


def begins(name: str, prefixes: str) -> bool:
    return any(name.startswith(prefix) for prefix in prefixes.split(",") if prefix)


class Run:
    """The whole run: what is left of its time, and how ranks are started."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.begun = options, time.monotonic()
        self.method = "fork"
        self.name, self.gpus = ("CPU", options.gpus or 2)
        if options.device == "cuda":
            self._look()
        if self.gpus not in (1, 2, 4, 8):
            raise SystemExit(f"multigpu.py: error: {self.gpus} GPUs: 1, 2, 4 or 8 are known here (see --gpus)")

    def _look(self) -> None:
        """Ask for the GPUs in a process of its own; where a fork has no use of them, start everything anew."""
        for method in ("fork", "spawn"):
            self.method = method
            outcome = run_job(look, 1, (), device="cuda", timeout=90, method=method)
            if outcome.said[0]:
                self.name, present = outcome.said[0][0]
                self.gpus = self.options.gpus or max(n for n in (1, 2, 4, 8) if n <= present)
                if self.gpus > present:
                    raise SystemExit(f"multigpu.py: error: --gpus {self.gpus}: there are {present}")
                return
            print(f"{method}: {outcome.reason}", file=sys.stderr, flush=True)
        raise SystemExit("multigpu.py: error: no GPU that PyTorch can use; --device cpu --quick rehearses")

    @property
    def spent(self) -> float:
        return time.monotonic() - self.begun

    def job(self, function: object, size: int, args: tuple[object, ...], timeout: float) -> Outcome:
        device, method = self.options.device, self.method
        return run_job(function, size, args, device=device, timeout=timeout, method=method)  # type: ignore[arg-type]


def look(rank: Rank) -> None:
    torch.zeros(1, device=rank.device)
    rank.say((torch.cuda.get_device_name(rank.device), torch.cuda.device_count()))


def check_parity(run: Run, report: Report) -> None:
    """All cases in one set of ranks; after one that failed, the rest in another."""
    todo: list[Case] = [case for case in cases(run.gpus) if chosen(f"parity {case.name}", run.options)]
    while todo:
        outcome = run.job(compare, run.gpus, (todo,), timeout=20.0 + 6.0 * len(todo))
        found: list[Found] = outcome.said[0]
        for one in found:
            report.parity(one)
        todo = todo[len(found) :]
        if outcome.error is not None and todo:
            report.failure(f"parity {todo[0].name}", outcome)
            todo = todo[1:]
        if run.spent > run.options.budget:
            break
    for case in todo:
        report.skipped(f"parity {case.name}", "no time left")


def main(words: list[str] | None = None) -> int:
    options = arguments(words)
    if options.list:
        for gpus in (options.gpus,) if options.gpus else (1, 2, 4, 8):
            names = [work.name for work in (*works(gpus), *decode_works(gpus))]
            print(f"{gpus}: {', '.join(names)}")
        return 0
    run = Run(options)
    report = Report(options.out, run.name, run.gpus, options.compile)
    if chosen("links", options):
        sizes = (1 << 10, 1 << 14) if options.quick else (1 << 10, 1 << 24, 1 << 28)
        report.links(run.job(links, run.gpus, (sizes, 5 if options.quick else 30), 60.0))
    check_parity(run, report)
    todo = [work for work in works(run.gpus) if chosen(work.name, options)]
    decoding = [work for work in decode_works(run.gpus) if chosen(work.name, options)]
    # decoding is quick; it comes before the long sequences, which time may not reach
    place = next((index for index, work in enumerate(todo) if "32k" in work.name), len(todo))
    queue: list[Work | DecodeWork] = [*todo[:place], *decoding, *todo[place:]]
    for work in queue:
        if run.spent > options.budget:
            report.skipped(work.name, "no time left")
            continue
        timeout = min(work.timeout, max(30.0, options.budget + 20 - run.spent))
        work = work.tiny() if options.quick else work
        if isinstance(work, DecodeWork):
            outcome = run.job(decode, work.gpus, (work,), timeout)
            results: list[Decoded] = outcome.said[0]
            report.decoding(work, results, outcome)
        else:
            table = begins(work.name, options.profile)
            outcome = run.job(train, work.gpus, (work, options.seconds, options.compile, table), timeout)
            report.training(work, outcome)
    report.finish(run.spent)
    return 1 if report.wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
