"""Attention against what else a user could call, on one GPU.

    python benchmarks/kernels_attention.py [--parts dense packed decode]

Causal, bfloat16. TFLOP/s count the products of the lower triangle, 2 S^2 D per head forward and 2.5 times that
backward, so recomputation counts against whoever does it. Every rival of a row runs in the same process just before
ours: the card's clocks move, so compare within a row. Decode counts the bytes of the cache over the rate of a large
copy measured in the same run. Times are medians of triton.testing.do_bench with the caches flushed; decode is timed in
replays of a CUDA graph, a small cache rotating with others.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from triton.testing import do_bench, do_bench_cudagraph

from llama_kernels.attention import attention
from llama_kernels.paged_attention import paged_attention

TOKENS = 32_768
DENSE = [(64, 32, 32), (128, 16, 16), (128, 32, 8)]  # width, query heads, key heads
LENGTHS = [2048, 8192, 16384]


def median(run: Callable[[], object]) -> float:
    """Seconds."""
    return float(do_bench(run, warmup=20, rep=80, return_mode="median")) / 1e3


def both(run: Callable[..., Tensor], inputs: tuple[Tensor, ...], flops: float) -> tuple[float, float]:
    """TFLOP/s forward and backward."""
    with torch.no_grad():
        forward = median(lambda: run(*inputs))
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = run(*leaves)
    dout = torch.randn_like(out)
    backward = median(lambda: torch.autograd.grad(out, leaves, dout, retain_graph=True))
    return flops / forward / 1e12, 2.5 * flops / backward / 1e12


def torch_kernel(kind: SDPBackend) -> Callable[..., Tensor]:
    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        with sdpa_kernel(kind):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True).transpose(1, 2)

    return run


def ours(backend: str | None, **packed: object) -> Callable[..., Tensor]:
    return lambda q, k, v: attention(q, k, v, causal=True, backend=backend, **packed)


def row(label: str, runs: dict[str, Callable[..., Tensor]], inputs: tuple[Tensor, ...], flops: float) -> None:
    found = {name: both(run, inputs, flops) for name, run in runs.items()}
    cells = [f"{found[name][0]:.0f} / {found[name][1]:.0f}" if name in found else "-" for name in NAMES]
    rivals = [name for name in found if name not in ("default", "triton")]
    ratios = [found["default"][i] / max(found[name][i] for name in rivals) for i in (0, 1)]
    fa2 = [found["triton"][i] / found["FlashAttention-2"][i] for i in (0, 1)]
    print(
        f"| {label} | " + " | ".join(cells) + f" | {ratios[0]:.2f} / {ratios[1]:.2f} | {fa2[0]:.2f} / {fa2[1]:.2f} |",
        flush=True,
    )


NAMES = ["FlashAttention-2", "cuDNN", "flash-attn 4", "default", "triton"]


def dense() -> None:
    for width, heads, kv_heads in DENSE:
        for length in LENGTHS:
            q = torch.randn(TOKENS // length, length, heads, width, device="cuda", dtype=torch.bfloat16)
            k, v = (torch.randn(*q.shape[:2], kv_heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            runs = {
                "FlashAttention-2": torch_kernel(SDPBackend.FLASH_ATTENTION),
                "cuDNN": torch_kernel(SDPBackend.CUDNN_ATTENTION),
            }
            if importlib.util.find_spec("flash_attn"):
                from flash_attn.cute import flash_attn_func

                runs["flash-attn 4"] = lambda q, k, v, call=flash_attn_func: call(q, k, v, causal=True)[0]
            runs |= {"default": ours(None), "triton": ours("triton")}
            row(f"{width}, {heads}/{kv_heads}, {length}", runs, (q, k, v), 2 * TOKENS * length * heads * width)


def packed() -> None:
    generator = torch.Generator().manual_seed(0)
    for width, heads, kv_heads in DENSE:
        cuts = torch.cat([torch.randint(1, TOKENS, (15,), generator=generator).sort().values, torch.tensor([TOKENS])])
        lengths = torch.diff(cuts, prepend=torch.zeros(1, dtype=torch.long))
        cu = F.pad(cuts, (1, 0)).to("cuda", torch.int32)
        longest = int(lengths.max())
        q = torch.randn(TOKENS, heads, width, device="cuda", dtype=torch.bfloat16)
        k, v = (torch.randn(TOKENS, kv_heads, width, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        how = {"cu_seqlens_q": cu, "cu_seqlens_k": cu, "max_seqlen_q": longest, "max_seqlen_k": longest}
        # torch 2.11's own varlen_attn has no grouped heads; this is the operator beneath it.
        runs = {"FlashAttention-2": ours("flash_torch", **how)}
        if importlib.util.find_spec("flash_attn"):
            from flash_attn.cute import flash_attn_varlen_func

            runs["flash-attn 4"] = lambda q, k, v, call=flash_attn_varlen_func, cu=cu, n=longest: call(
                q, k, v, cu_seqlens_q=cu, cu_seqlens_k=cu, max_seqlen_q=n, max_seqlen_k=n, causal=True
            )[0]
        runs |= {"default": ours(None, **how), "triton": ours("triton", **how)}
        flops = 2 * float((lengths.double() ** 2).sum()) * heads * width
        row(f"{width}, {heads}/{kv_heads}, 16 documents of 1 to {longest}", runs, (q, k, v), flops)


def copy_rate() -> float:
    """Bytes read plus written per second by a 2 GiB copy."""
    source = torch.empty(1 << 31, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * source.numel() / median(lambda: target.copy_(source))


def paged_rows() -> Iterator[tuple[int, int, float, int]]:
    """Decode steps over a paged cache, 32/8 heads of 128, pages of 16: (sequences, keys, milliseconds, bytes)."""
    for batch, length in ((1, 32_768), (8, 8192), (16, 8192), (64, 4096), (96, 2048), (256, 1024)):
        pools = []
        for _ in range(3 if batch == 1 else 1):  # one cache of 134 MB would partly stay in L2 from call to call
            pages = batch * length // 16
            k, v = (torch.randn(pages, 16, 8, 128, device="cuda", dtype=torch.bfloat16) for _ in range(2))
            tables = torch.randperm(pages, device="cuda").to(torch.int32).view(batch, -1)
            lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
            pools.append((torch.randn(batch, 32, 128, device="cuda", dtype=torch.bfloat16), k, v, tables, lens))

        def step(pools: list[tuple[Tensor, ...]] = pools) -> None:
            for pool in pools:
                paged_attention(*pool)

        ms = float(do_bench_cudagraph(step, rep=40, return_mode="median")) / len(pools)
        yield batch, length, ms, 2 * pools[0][1].nbytes


def decode() -> None:
    rate = copy_rate()
    print(f"\nDecode, 32/8 heads of 128, pages of 16 in random order; copy {rate / 1e12:.2f} TB/s\n")
    print("| sequences x keys | cache MB | us | TB/s | of copy |\n|---|---|---|---|---|")
    for batch, length, ms, size in paged_rows():
        found = f"{size / 1e6:.0f} | {ms * 1e3:.1f} | {size / ms / 1e9:.2f} | {size / ms * 1e3 / rate:.2f}"
        print(f"| {batch} x {length} | {found} |", flush=True)


def main() -> None:
    parts = {"dense": dense, "packed": packed, "decode": decode}
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", default=list(parts), choices=list(parts))
    arguments = parser.parse_args()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}; forward / backward TFLOP/s\n")
    print("| width, heads, length | " + " | ".join(NAMES) + " | default / fastest rival | triton / FA-2 |")
    print("|---" * (len(NAMES) + 3) + "|")
    for part in arguments.parts:
        parts[part]()


if __name__ == "__main__":
    main()
