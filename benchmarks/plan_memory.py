"""The planner's memory beside what training on one GPU really takes, with the objects that `llama-train run` uses.

python benchmarks/plan_memory.py                  # on a GPU: two steps of each configuration, GB of 10⁹ bytes
python benchmarks/plan_memory.py --device cpu     # rehearsal on small shapes: no peak is known there
"""

from __future__ import annotations

import argparse
import gc
from dataclasses import dataclass, replace

import torch

from llama_core import LlamaConfig, preset
from llama_parallel import ParallelConfig
from llama_parallel.planner import Memory, Work, predict_memory
from llama_train.batches import Batch
from llama_train.build import build_model
from llama_train.config import DataConfig, OptimizerConfig, TrainConfig
from llama_train.optimizer import Optimizer
from llama_train.step import training_step

GB = 1e9
SMOL, EIGHT = preset("smollm-1.7b"), preset("llama-3-8b").replace(num_hidden_layers=12)


@dataclass(frozen=True)
class Case:
    """What is trained."""

    name: str
    shape: LlamaConfig
    rows: int
    length: int
    master: bool
    checkpointing: str
    micro_batches: int = 1


CASES = (
    Case("SmolLM-1.7B, pure bfloat16", SMOL, 4, 2048, False, "none"),
    Case("SmolLM-1.7B, float32 master", SMOL, 4, 2048, True, "none"),
    Case("SmolLM-1.7B, float32 master, accumulated", SMOL, 4, 2048, True, "none", 2),
    Case("SmolLM-1.7B, selective", SMOL, 8, 2048, False, "selective"),
    Case("Llama-3-8B with 12 layers", EIGHT, 1, 8192, False, "none"),
    Case("Llama-3-8B with 12 layers, full", EIGHT, 1, 8192, True, "full"),
)


def predicted(case: Case, kernels: bool) -> Memory:
    """By the planner."""
    precision = "master" if case.master else "bfloat16"
    rows = case.rows * case.micro_batches
    work = Work(case.shape, ParallelConfig(), case.length, rows, case.rows, precision, case.checkpointing)
    return predict_memory(replace(work, kernels=kernels))


def measured(case: Case, device: torch.device) -> tuple[float, float, float]:
    """Bytes of the weights, of the optimizer's own tensors, and the peak of the second step (0 on a CPU)."""
    config = TrainConfig(
        device=device.type,  # type: ignore[arg-type]
        dtype="bfloat16",
        activation_checkpointing=case.checkpointing,  # type: ignore[arg-type]
        data=DataConfig(sequence_length=case.length, micro_batch_size=case.rows),
        optimizer=OptimizerConfig(master_weights=case.master),
    )
    model = build_model(case.shape, config, device)
    optimizer = Optimizer(model.named_parameters(), config.optimizer, kernels=device.type == "cuda")
    tokens = torch.randint(case.shape.vocab_size, (case.rows, case.length))
    batches = [Batch(tokens, tokens.roll(-1, 1))] * case.micro_batches
    for _ in range(2):
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        training_step(model, optimizer, batches, 1e-4, 1.0)
    weights = float(sum(p.nbytes for p in model.parameters()))
    state = float(sum(t.nbytes for t in optimizer.state_dict().values()))
    return weights, state, float(torch.cuda.max_memory_allocated()) if device.type == "cuda" else 0.0


def small(case: Case) -> Case:
    """The same on a shape that a CPU trains in a second."""
    shape = preset("tiny").replace(tie_word_embeddings=case.shape.tie_word_embeddings)
    return replace(case, shape=shape, rows=2, length=64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    device = torch.device(parser.parse_args().device)
    for case in CASES if device.type == "cuda" else map(small, CASES):
        wanted = predicted(case, kernels=device.type == "cuda")
        weights, state, peak = measured(case, device)
        parts = ", ".join(f"{name} {value / GB:.2f}" for name, value in vars(wanted).items())
        ratio = f"{wanted.total / peak:.3f}" if peak else "no peak here"
        print(f"{case.name}: predicted {wanted.total / GB:.2f}, measured {peak / GB:.2f}, ratio {ratio}")
        print(f"  predicted {parts}")
        print(f"  measured weights {weights / GB:.2f}, optimizer {state / GB:.2f}", flush=True)
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
