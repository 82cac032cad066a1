"""One case of a sweep, in processes of its own: `python -m llama_train.manage.sweep_case CASE.toml RESULT.json`.

The training step of `llama-train run` on tokens drawn at random: no text is read and nothing is saved.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch

from llama_train.config import TrainConfig
from llama_train.config_file import load_config
from llama_train.layout_choice import which_process
from llama_train.meter import Meter
from llama_train.out_of_memory import OutOfMemory, memory_told
from llama_train.startup import resolve_run
from llama_train.trainer import OneProcess, Trainer
from llama_train.world import World, enter_world

from .new_run import shape_of
from .random_rows import random_batches


def measure(config: TrainConfig, steps: int, warmup: int) -> dict[str, object] | None:
    """Time some steps; every process makes this call.

    Args:
        config: of the case; `data` gives the sizes of a batch alone.
        steps: timed.
        warmup: before them.

    Returns:
        The figures on rank 0; None elsewhere. `seconds` is those of a step, `memory` the highest peak of any process.

    Raises:
        OutOfMemory, ValueError: as `train`.
    """
    process = which_process()
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    config, device, attention = resolve_run(config, process)
    with enter_world(process, device, config.parallel.timeout) as world, memory_told(config):
        shape = shape_of(config)
        trainer = _trainer(config, world)
        data = config.data
        batches = [
            trainer.share(batch).to(device)
            for batch in random_batches(
                shape.vocab_size,
                data.micro_batch_size,
                data.gradient_accumulation_steps,
                data.sequence_length,
                trainer.part,
            )
        ]
        meter = Meter(config, shape, world)
        rate, norm = config.optimizer.learning_rate, config.optimizer.max_grad_norm
        for _ in range(warmup):
            result = trainer.step(batches, rate, norm)
        float(result.loss)  # wait for the GPU
        world.barrier()
        meter.start(0)
        begun = time.perf_counter()
        for _ in range(steps):
            result = trainer.step(batches, rate, norm)
        figures = meter.measure(steps, result, rate, 0)
        seconds = (time.perf_counter() - begun) / steps
        memory = max(world.gather(figures.memory))
    if not process.is_main:
        return None
    return {
        "state": "ok",
        "tokens_per_second": figures.tokens_per_second,
        "tokens_per_second_per_device": figures.tokens_per_second_per_device,
        "mfu": figures.mfu,
        "mfu_torchtitan": figures.mfu_torchtitan,
        "memory": memory,
        "seconds": seconds,
        "loss": figures.loss,
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "dtype": config.dtype,
        "attention": attention,
        "torch": torch.__version__,
    }


def _trainer(config: TrainConfig, world: World) -> Trainer:
    shape = shape_of(config)
    if world.size == 1:
        return OneProcess(config, shape, world)
    from llama_train.on_ranks import OnRanks

    return OnRanks(config, shape, world)


def main(arguments: list[str]) -> int:
    """CASE.toml RESULT.json STEPS WARMUP; rank 0 writes the result, or any process that has no memory left."""
    case, result, steps, warmup = arguments
    try:
        found = measure(load_config(case), int(steps), int(warmup))
    except OutOfMemory as error:
        found = {"state": "oom", "reason": str(error).splitlines()[0]}
    except ValueError as error:
        found = {"state": "impossible", "reason": str(error).splitlines()[0]}
    if found is None:
        return 0
    path = Path(result)
    temporary = path.with_suffix(f".{which_process().rank}.tmp")
    temporary.write_text(json.dumps(found), encoding="utf-8")
    temporary.replace(path)
    return 0 if found["state"] == "ok" else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
