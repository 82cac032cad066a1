"""The products of a decode step at batch 1, tile by tile: which cut of each keeps memory busiest.

    python benchmarks/decode_kernels.py [--kinds float byte int4] [--rounds 3] [--fast]

Llama-3-8B's four products of a layer, with their norms, gates and sums, over as many layers' weights as fill 2 GB,
in a CUDA graph. Prints microseconds and the share of the rate of copying (bytes read and written) for each tile, the
best last. `--fast` times the package's own choice only.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable

import torch

from llama_kernels import quantize_fp8, quantize_int4, quantize_int8
from llama_kernels.row_launch import Tile, launch_row

SHAPES = {  # outputs (rows of the weight), inputs, norm, gated, residual
    "qkv": (6144, 4096, True, False, False),
    "out": (4096, 4096, False, False, True),
    "gate_up": (28672, 4096, True, True, False),
    "down": (4096, 14336, False, False, True),
}
ROUND = {"byte": quantize_int8, "fp8": quantize_fp8, "int4": quantize_int4}
TILES = {
    ("float", 4096): [
        Tile(*t) for t in ((2, 4, 2, 4, 4), (1, 6, 2, 4, 4), (4, 3, 1, 2, 4), (4, 2, 1, 3, 4), (2, 3, 2, 6, 4), (4, 4, 2, 2, 8), (2, 4, 2, 3, 8))
    ],
    ("float", 14336): [
        Tile(*t) for t in ((1, 4, 2, 2, 8), (1, 3, 2, 2, 16), (1, 5, 2, 1, 16), (1, 2, 2, 3, 8), (2, 3, 1, 1, 16), (1, 3, 2, 2, 8))
    ],
    ("byte", 4096): [
        Tile(*t) for t in ((4, 3, 2, 4, 4), (2, 4, 2, 6, 4), (4, 4, 2, 3, 4), (8, 3, 1, 2, 8), (2, 6, 2, 4, 4), (4, 3, 2, 6, 2))
    ],
    ("byte", 14336): [
        Tile(*t) for t in ((2, 3, 2, 2, 8), (1, 4, 2, 3, 8), (2, 4, 2, 1, 16), (4, 3, 1, 1, 16), (1, 4, 2, 2, 16), (1, 6, 2, 2, 8))
    ],
    ("int4", 4096): [
        Tile(*t) for t in ((4, 4, 2, 4, 2), (8, 3, 1, 4, 4), (4, 3, 2, 6, 2), (4, 4, 2, 8, 2), (8, 4, 2, 2, 4), (4, 4, 2, 6, 4))
    ],
    ("int4", 14336): [
        Tile(*t) for t in ((4, 3, 2, 1, 8), (2, 4, 2, 2, 8), (2, 3, 2, 3, 8), (4, 3, 2, 2, 16), (1, 4, 2, 4, 4), (2, 4, 2, 2, 16))
    ],
}  # fmt: skip
TILES |= {("fp8", width): TILES["byte", width] for width in (4096, 14336)}


def in_graph(call: Callable[[], None], rounds: int) -> float:
    """Seconds of `call`, replayed."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(rounds + 1):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["float", "byte", "int4"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--fast", action="store_true")
    arguments = parser.parse_args()
    source = torch.empty(2**30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    rate = 2 * source.nbytes / in_graph(lambda: target.copy_(source), arguments.rounds)
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rate / 1e12:.2f} TB/s")
    del source, target
    for kind, (name, (outputs, width, norm, gated, add)) in itertools.product(arguments.kinds, SHAPES.items()):
        weight = torch.randn(outputs, width, device="cuda")
        one = (weight.bfloat16(),) if kind == "float" else ROUND[kind](weight.bfloat16() if kind == "int4" else weight)
        size = sum(part.nbytes for part in one)
        count = max(2, int(2e9 / size))
        layers = [tuple(part.clone() for part in one) for _ in range(count)]
        x = torch.randn(1, width, device="cuda").bfloat16()
        norm_weight = torch.rand(width, device="cuda").bfloat16() if norm else None
        residual = torch.randn(1, outputs // (2 if gated else 1), device="cuda").bfloat16() if add else None
        results = []
        for tile in [None] if arguments.fast else [None, *TILES[kind, width]]:

            def call(layers=layers, tile=tile, x=x, norm_weight=norm_weight, gated=gated, residual=residual) -> None:
                for layer in layers:
                    weight, scale, minimum = (*layer, None, None)[:3]
                    launch_row(x, weight, scale, minimum, norm_weight, 1e-5, gated, residual, tile)

            try:
                seconds = in_graph(call, arguments.rounds) / count
            except Exception as error:  # a tile too large for shared memory, say: the others still count
                print(f"{kind} {name} {tile}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            results.append((seconds, tile))
        for seconds, tile in sorted(results, key=lambda result: -result[0]):
            share = size / seconds / rate
            print(f"{kind:5} {name:8} {1e6 * seconds:7.1f} us {share:6.1%}  {tuple(tile) if tile else 'chosen'}", flush=True)
        del layers


if __name__ == "__main__":
    main()
