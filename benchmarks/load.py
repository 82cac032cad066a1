"""How fast `load_model` is, against reading the same safetensors bytes with the safetensors library alone.

    python benchmarks/load.py --gigabytes 4 --device cpu
    python benchmarks/load.py --gigabytes 16 --device cuda

Both read a file that is in the page cache, so that copying is measured and not the disk, and both end with every
tensor in memory of its own on the device. Rounds alternate; the ratio is the median over the rounds.
"""

from __future__ import annotations

import argparse
import gc
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from llama_core import Llama, LlamaConfig, load_model, save_model


def shape(gigabytes: float) -> LlamaConfig:
    """A model of about this many bytes in bfloat16, with matrices as large as those of an 8B model."""
    width, inner, vocabulary = (4096, 14336, 32000) if gigabytes >= 2 else (512, 1792, 8000)
    layer = width * (width * 2.5 + inner * 3)
    layers = max(1, round((gigabytes * 1e9 / 2 - 2 * vocabulary * width) / layer))
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=inner,
        num_hidden_layers=layers,
        num_attention_heads=width // 64,
        num_key_value_heads=width // 256,
    )


def with_the_library(folder: Path, device: str) -> dict[str, torch.Tensor]:
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt", device=device) as file:
            for name in file.keys():  # noqa: SIM118 - a file, no dictionary
                tensor = file.get_tensor(name)
                tensors[name] = tensor.clone() if device == "cpu" else tensor  # on the CPU it is still a mapped file
    return tensors


def seconds(call: Callable[[], Any], device: str) -> float:
    gc.collect()
    start = time.perf_counter()
    held = call()
    if device != "cpu":
        torch.cuda.synchronize()
    elapsed = time.perf_counter() - start
    del held
    return elapsed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gigabytes", type=float, default=2.0, help="size of the model in bfloat16 (default 2)")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, default=None, help="where the model is written for the time being")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.folder) as name:
        folder = Path(name) / "model"
        with torch.device("meta"):
            model = Llama(shape(arguments.gigabytes)).bfloat16()
        model.to_empty(device="cpu")
        for parameter in model.parameters():
            parameter.data.fill_(0.5)
        save_model(model, folder)
        del model
        size = sum(path.stat().st_size for path in folder.glob("*.safetensors")) / 1e9
        print(f"{size:.2f} GB in bfloat16, {arguments.device}, {torch.get_num_threads()} threads")
        ratios = []
        for index in range(arguments.rounds + 1):
            ours = seconds(lambda: load_model(folder, device=arguments.device), arguments.device)
            theirs = seconds(lambda: with_the_library(folder, arguments.device), arguments.device)
            if index == 0:
                continue  # the first round warms the page cache and the device
            ratios.append(theirs / ours)
            rates = f"load_model {size / ours:6.2f} GB/s   safetensors {size / theirs:6.2f} GB/s"
            print(f"round {index}: {rates}   ratio {ratios[-1]:.2f}")
        print(f"median ratio {statistics.median(ratios):.2f} (at least 0.8 is promised)")


if __name__ == "__main__":
    main()
