"""A decoder layer at batch 1, launch by launch: which cut of each product keeps memory busiest in its place.

    python benchmarks/decode_kernels.py [--kinds float int8 fp8 int4] [--tune] [--attention]

Eight layers of Llama-3-8B's shape in a CUDA graph, as llama-infer's fused decode step runs them: each kernel begins
while the one ahead ends, so a product is measured within the chain and not alone. --tune tries the tiles of `TRIES`
for one product after the other and keeps what makes the layer fastest. --attention takes parts of the chain away to
see what attention costs. Copy rate: bytes read and written.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from llama_kernels import paged_attention, quantize_fp8, quantize_int4, quantize_int8, rope_write_kv
from llama_kernels.row_launch import Tile, choose_tile, launch_row

LAYERS, HIDDEN, INNER, HEADS, KV_HEADS, WIDTH, CONTEXT = 8, 4096, 14336, 32, 8, 128, 256
SHAPES = {"qkv": (6144, HIDDEN), "out": (HIDDEN, HIDDEN), "gate_up": (2 * INNER, HIDDEN), "down": (HIDDEN, INNER)}
ROUND = {"int8": quantize_int8, "fp8": quantize_fp8, "int4": quantize_int4}
# rows, stages, programs, warps
TRIES = {
    ("float", 4096): (
        (2, 4, 2, 4), (2, 3, 2, 4), (2, 3, 3, 4), (2, 3, 4, 4), (4, 3, 1, 8), (4, 3, 2, 8), (2, 2, 4, 4), (1, 4, 4, 4),
    ),
    ("float", 14336): ((1, 4, 1, 8), (1, 3, 2, 8), (1, 4, 2, 8), (1, 3, 1, 16), (2, 2, 1, 16)),
    ("byte", 4096): (
        (4, 3, 2, 4), (2, 4, 4, 4), (2, 3, 6, 4), (4, 2, 4, 4), (8, 3, 1, 8), (8, 2, 2, 8), (2, 3, 4, 2),
    ),
    ("byte", 14336): ((1, 4, 2, 8), (2, 3, 1, 8), (2, 2, 2, 8), (2, 3, 1, 16), (1, 3, 3, 8)),
    ("int4", 4096): ((2, 4, 4, 2), (4, 3, 4, 2), (2, 3, 8, 2), (4, 3, 2, 4), (2, 4, 6, 4), (1, 4, 8, 2)),
    ("int4", 14336): ((2, 3, 2, 8), (4, 3, 1, 8), (2, 2, 3, 8), (2, 3, 1, 16), (1, 3, 4, 8)),
}  # fmt: skip


def seconds_of(call: Callable[[], None], rounds: int = 6) -> float:
    """Of one replay as a CUDA graph, the best of some."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    times = []
    for _ in range(rounds):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3)
    return min(times[1:])


class Chain:
    """The launches of some layers."""

    def __init__(self, kind: str) -> None:
        self.kind = {"int8": "byte", "fp8": "byte"}.get(kind, kind)
        self.layers = [{name: self._weight(kind, *shape) for name, shape in SHAPES.items()} for _ in range(LAYERS)]
        self.bytes = sum(part.nbytes for parts in self.layers[0].values() for part in parts)
        self.norm = torch.rand(HIDDEN, device="cuda").bfloat16()
        self.x = torch.randn(1, HIDDEN, device="cuda").bfloat16()
        cache = torch.randn(2, LAYERS, 64, 16, KV_HEADS, WIDTH, device="cuda").bfloat16()
        self.keys, self.values = cache
        self.tables = torch.arange(32, device="cuda", dtype=torch.int32).unsqueeze(0)
        self.lengths = torch.tensor([CONTEXT], device="cuda", dtype=torch.int32)
        self.slots = self.lengths - 1
        self.angles = torch.rand(2, 1, WIDTH // 2, device="cuda")

    def _weight(self, kind: str, rows: int, width: int) -> tuple[Tensor, ...]:
        weight = (torch.randn(rows, width, device="cuda") * width**-0.5).bfloat16()
        return (weight,) if kind == "float" else ROUND[kind](weight)

    def run(self, tiles: dict[str, Tile], without: frozenset[str] = frozenset()) -> None:
        x = self.x
        for index, layer in enumerate(self.layers):
            parts = {name: (*layer[name], None, None)[:3] for name in layer}
            more: dict[str, Any] = {name: {"tile": tiles[name]} for name in SHAPES}
            qkv = launch_row(x, *parts["qkv"], self.norm, 1e-5, **more["qkv"])
            q = qkv[:, :HIDDEN].view(1, HEADS, WIDTH)
            if "rope" not in without:
                q = rope_write_kv(qkv, *self.angles, self.keys[index], self.values[index], self.slots, HEADS)
            if "attention" not in without:
                where = self.keys[index], self.values[index], self.tables, self.lengths
                q = paged_attention(q, *where, max_seqlen_k=512)
            x = launch_row(q.flatten(1), *parts["out"], residual=x, **more["out"])
            act = launch_row(x, *parts["gate_up"], self.norm, 1e-5, gated=True, **more["gate_up"])
            x = launch_row(act, *parts["down"], residual=x, **more["down"])

    def time(self, tiles: dict[str, Tile], without: frozenset[str] = frozenset()) -> float:
        return seconds_of(lambda: self.run(tiles, without)) / LAYERS


def copy_rate() -> float:
    """Bytes per second, read and written."""
    source = torch.zeros(2**31, dtype=torch.uint8, device="cuda")
    target = torch.zeros_like(source)

    def copy() -> None:
        target.copy_(source)

    return 2 * source.nbytes / seconds_of(copy)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", default=["float", "int8", "int4"])
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--attention", action="store_true")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; copy {rate / 1e12:.2f} TB/s")
    for kind in arguments.kinds:
        chain = Chain(kind)
        tiles = {
            name: choose_tile(chain.kind, width, rows // 2 if name == "gate_up" else rows, name == "gate_up")
            for name, (rows, width) in SHAPES.items()
        }
        best = chain.time(tiles)
        ideal = chain.bytes / rate
        print(f"{kind}: a layer {1e6 * best:.1f} us; its bytes at the rate of copying {1e6 * ideal:.1f} us", flush=True)
        if arguments.attention:
            for without in ({"attention"}, {"attention", "rope"}):
                seconds = chain.time(tiles, frozenset(without))
                print(f"  without {' and '.join(sorted(without))}: {1e6 * seconds:.1f} us")
        if not arguments.tune:
            continue
        for name, numbers in itertools.product(SHAPES, range(10)):
            tries = TRIES[chain.kind, SHAPES[name][1]]
            if numbers >= len(tries):
                continue
            tile = Tile(*tries[numbers])
            try:
                seconds = chain.time(tiles | {name: tile})
            except Exception as error:  # a tile too large for shared memory, say: the others still count
                print(f"  {name} {tuple(tile)}: {type(error).__name__}: {str(error)[:100]}", flush=True)
                continue
            kept = seconds < best * 0.998
            print(f"  {name:8} {1e6 * seconds:6.1f} us {tuple(tile)}{' kept' if kept else ''}", flush=True)
            if kept:
                best, tiles = seconds, tiles | {name: tile}
        print(
            f"{kind}: {1e6 * best:.1f} us with",
            {name: tuple(tile) for name, tile in tiles.items()},
            flush=True,
        )
        del chain


if __name__ == "__main__":
    main()
