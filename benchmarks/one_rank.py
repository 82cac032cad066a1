"""What the machinery costs where it is not needed: a training step of one process against the plain model's.

    python benchmarks/one_rank.py                    # a GPU, or a CPU where there is none
    python benchmarks/one_rank.py --device cpu --steps 6

Three steps take turns, so that a busy or throttled machine slows them alike: the plain model with torch's AdamW and
clipping; `llama-train`'s step of one process, which is the same thing; and the step that a layout takes, with all sizes
1, in a process group of one. Prints the median time of each and its ratio to the plain one. The project's bar is 1.02.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace

import torch
import torch.distributed as dist

from llama_core import LlamaConfig, preset
from llama_parallel import Process
from llama_train.batches import Batch
from llama_train.build import build_model
from llama_train.config import DataConfig, OptimizerConfig, ParallelSettings, TrainConfig
from llama_train.on_ranks import OnRanks
from llama_train.trainer import OneProcess
from llama_train.world import World

RATE, MAX_NORM = 3e-4, 1.0


def main() -> None:
    """Time and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--model", help="a preset; default smollm2-360m on a GPU, tiny with 4 layers of 256 on a CPU")
    parser.add_argument("--rows", type=int, default=8)
    parser.add_argument("--length", type=int, default=0, help="default 2048 on a GPU, 128 on a CPU")
    parser.add_argument("--steps", type=int, default=20)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    gpu = device.type == "cuda"
    shape = preset(arguments.model or ("smollm2-360m" if gpu else "tiny"))
    if not gpu and arguments.model is None:
        shape = shape.replace(hidden_size=256, intermediate_size=704, num_hidden_layers=4, vocab_size=2048, head_dim=64)
    length = arguments.length or (2048 if gpu else 128)
    config = TrainConfig(
        device=device.type,
        dtype="bfloat16" if gpu else "float32",
        data=DataConfig(sequence_length=length, micro_batch_size=arguments.rows),
        optimizer=OptimizerConfig(master_weights=False),  # what the plain step does too
        parallel=ParallelSettings(dp_shard=1),
    )
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, shape.vocab_size, (arguments.rows, length + 1), generator=generator)
    batch = Batch(tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous())

    with tempfile.TemporaryDirectory() as folder:
        store = dist.FileStore(f"{folder}/store", 1)
        dist.init_process_group("nccl" if gpu else "gloo", store=store, rank=0, world_size=1)
        alone = OneProcess(config, shape, World(Process(), device))
        ranks = OnRanks(replace(config), shape, World(Process(), device, dist.new_group(backend="gloo")))
        steps: dict[str, Callable[[], object]] = {
            "plain model": plain_step(config, shape, batch, device),
            "one process": lambda: alone.step([batch], RATE, MAX_NORM),
            "layout of one": lambda: ranks.step([ranks.share(batch)], RATE, MAX_NORM),
        }
        times = measure(steps, arguments.steps, device)
        dist.destroy_process_group()
    base = times["plain model"]
    print(f"{shape.num_hidden_layers} layers of {shape.hidden_size}, {arguments.rows} × {length} tokens, {device}")
    for name, seconds in times.items():
        print(f"{name:14} {1000 * seconds:9.2f} ms a step, {seconds / base:6.3f} of the plain model's")


def plain_step(config: TrainConfig, shape: LlamaConfig, batch: Batch, device: torch.device) -> Callable[[], object]:
    """Forward, loss, backward, clip, AdamW, in as few lines as torch needs."""
    model = build_model(shape, config, device)
    matrices = [p for p in model.parameters() if p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        own = batch.to(device)
        hidden = model(own.tokens)
        loss = model.ops.linear_cross_entropy(hidden, model.lm_head.weight, own.targets)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM, foreach=True)
        optimizer.step()
        optimizer.zero_grad()

    return step


def measure(steps: dict[str, Callable[[], object]], count: int, device: torch.device) -> dict[str, float]:
    """Median seconds of each, taken in turn, after three rounds of warm-up."""
    times: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(count + 3):
        for name, step in steps.items():
            wait(device)
            start = time.perf_counter()
            step()
            wait(device)
            if number >= 3:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def wait(device: torch.device) -> None:
    """For all queued work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


if __name__ == "__main__":
    main()
