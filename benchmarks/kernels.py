"""Every kernel of llama-kernels but attention, against torch, torch.compile and Liger in one run on one GPU.

    python benchmarks/kernels.py [--only rms_norm ...] [--plot roofline.png]    (the plot needs matplotlib)

Times are medians of GPU events. Calls under a millisecond are captured in a CUDA graph, ten in a row, so that Python's
launch time is in nobody's number. Ceilings are measured in the same run: a copy of as many bytes as the operation has
to move (each input read once, each output written once), and torch's matrix products. A rival that is not installed is
left out. Attention but the paged one has its own script, kernels_attention.py.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from gpu_timing import BF16, Row, both_ways, commit, copying, events, forward_and_backward, plot, timed
from kernels_attention import paged_rows
from torch import Tensor

import llama_kernels
from llama_kernels import reference

HAS_LIGER = importlib.util.find_spec("liger_kernel") is not None


def rms_norm() -> Iterator[Row]:
    x, dy = torch.randn(2, 16384, 4096, device="cuda").to(BF16)
    weight = torch.randn(4096, device="cuda").to(BF16)
    plain = lambda x, w: F.rms_norm(x, (4096,), w, 1e-5)  # noqa: E731
    rivals = {
        "ours": lambda x, w: llama_kernels.rms_norm(x, w, 1e-5),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    if HAS_LIGER:
        liger = importlib.import_module("liger_kernel.ops.rms_norm").LigerRMSNormFunction
        rivals["Liger"] = lambda x, w: liger.apply(x, w, 1e-5, 0.0, "llama", False)
    yield from both_ways("rms_norm", rivals, [x, weight], [dy], (2, 3), (4, 9))


def add_rms_norm() -> Iterator[Row]:
    x, residual, dy, dtotal = torch.randn(4, 16384, 4096, device="cuda").to(BF16)
    weight = torch.randn(4096, device="cuda").to(BF16)

    def plain(x: Tensor, residual: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (4096,), w, 1e-5), total

    rivals = {
        "ours": lambda x, r, w: llama_kernels.add_rms_norm(x, r, w, 1e-5),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    yield from both_ways("add_rms_norm", rivals, [x, residual, weight], [dy, dtotal], (4, 4), (5, 10))


def swiglu() -> Iterator[Row]:
    gate, up, dy = torch.randn(3, 16384, 14336, device="cuda").to(BF16)
    plain = lambda gate, up: F.silu(gate) * up  # noqa: E731
    rivals = {"ours": llama_kernels.swiglu, "torch": plain, "torch.compile": torch.compile(plain)}
    if HAS_LIGER:
        # Its backward writes over the saved inputs, so repeated calls are right in time only.
        rivals["Liger"] = importlib.import_module("liger_kernel.ops.swiglu").LigerSiLUMulFunction.apply
    yield from both_ways("swiglu", rivals, [gate, up], [dy], (3, 5), (5, 13))


def rope() -> Iterator[Row]:
    q, dq = torch.randn(2, 2, 8192, 32, 128, device="cuda").to(BF16)
    k, dk = torch.randn(2, 2, 8192, 8, 128, device="cuda").to(BF16)
    theta = torch.rand(1, 8192, 64, device="cuda")
    cos, sin = theta.cos(), theta.sin()
    plain = lambda q, k: reference.rope(q, k, cos, sin)  # noqa: E731
    rivals = {
        "ours": lambda q, k: llama_kernels.rope(q, k, cos, sin),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    nbytes = 2 * (q.nbytes + k.nbytes) + cos.nbytes + sin.nbytes
    ceiling = copying(nbytes)
    for who, function in rivals.items():
        for way, ms in zip(("forward", "backward"), forward_and_backward(function, [q, k], [dq, dk]), strict=True):
            rate = f"{nbytes / ms / 1e9:.2f} TB/s"
            yield Row(f"rope {way}", who, ms, ceiling, rate, 3 * (q.numel() + k.numel()), nbytes)


def linear_cross_entropy() -> Iterator[Row]:
    tokens, width, vocabulary = 8192, 4096, 128_256
    hidden = torch.randn(tokens, width, device="cuda").to(BF16).requires_grad_()
    weight = (torch.randn(vocabulary, width, device="cuda") / 64).to(BF16).requires_grad_()
    targets = torch.randint(vocabulary, (tokens,), device="cuda")

    def products() -> None:
        logits = hidden.detach() @ weight.detach().T
        torch.mm(logits, weight.detach())
        torch.mm(logits.T, hidden.detach())

    ceiling = events(products, 10)
    plain = lambda h, w: F.cross_entropy((h @ w.T).float(), targets)  # noqa: E731
    rivals = {
        "ours": lambda h, w: llama_kernels.linear_cross_entropy(h, w, targets),
        "ours, float32 dweight": lambda h, w: llama_kernels.linear_cross_entropy(
            h, w, targets, float32_weight_grad=True
        ),
        "torch": plain,
        "torch.compile": torch.compile(plain),
    }
    if HAS_LIGER:
        liger = importlib.import_module(
            "liger_kernel.ops.fused_linear_cross_entropy"
        ).LigerFusedLinearCrossEntropyFunction
        rivals["Liger"] = lambda h, w: liger.apply(h, w, targets)[0]
    exact = None
    for who, function in rivals.items():

        def step(function: Callable[..., Tensor] = function) -> None:
            hidden.grad = weight.grad = None
            function(hidden, weight).backward()

        hidden.grad = weight.grad = None
        step()
        hidden.grad = weight.grad = None
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        step()
        extra = torch.cuda.max_memory_allocated() - before - hidden.nbytes - weight.nbytes
        note = f"{extra / 1e9:.2f} GB beyond the gradients"
        grad = weight.grad[:4096].double()  # type: ignore[index]
        if exact is None:
            exact = exact_weight_gradient(hidden.detach(), weight.detach(), targets, 4096)
        note += f", dweight error {float((grad - exact).norm() / exact.norm()):.1e}"
        flops, nbytes = 6 * tokens * width * vocabulary, 2 * (hidden.nbytes + weight.nbytes)
        yield Row("linear_cross_entropy forward + backward", who, events(step, 10), ceiling, note, flops, nbytes)


def exact_weight_gradient(hidden: Tensor, weight: Tensor, targets: Tensor, rows: int) -> Tensor:
    """The first rows of dweight with float32 logits, 512 tokens at a time."""
    total = torch.zeros(rows, hidden.shape[1], device="cuda", dtype=torch.float64)
    for start in range(0, len(hidden), 512):
        x, y = hidden[start : start + 512], targets[start : start + 512]
        p = torch.mm(x, weight.T, out_dtype=torch.float32).softmax(1)[:, :rows].double()
        inside = (y < rows).nonzero().squeeze(1)
        p[inside, y[inside]] -= 1
        total += p.T @ x.double()
    return total / len(hidden)


def sample() -> Iterator[Row]:
    rows, vocabulary = 256, 128_256
    seeds = torch.arange(rows, device="cuda")
    for spread in (1.0, 4.0):
        for dtype in (torch.float32, BF16):
            logits = (torch.randn(rows, vocabulary, device="cuda") * spread).to(dtype)
            ceiling = events(lambda: torch.empty_like(logits).copy_(logits), 20) / 2  # noqa: B023
            where = f"{str(dtype).removeprefix('torch.')}, spread {spread:g}"
            kinds = ({}, {"top_k": 50}, {"top_p": 0.9}, {"top_p": 0.99}, {"top_k": 50, "top_p": 0.9, "min_p": 0.02})
            for options in kinds:
                what = ", ".join(f"{k}={v}" for k, v in options.items()) or "temperature only"
                ms = timed(lambda: llama_kernels.sample(logits, seeds, **options), inner=3)  # type: ignore[arg-type]  # noqa: B023
                count, nbytes = 4 * logits.numel(), logits.nbytes
                yield Row(f"sample 256 × 128,256, {what}", f"ours, {where}", ms, ceiling, "", count, nbytes)

    def by_sort() -> Tensor:
        ordered, index = logits.float().sort(dim=1, descending=True)
        p = ordered.softmax(1)
        p = torch.where(p.cumsum(1) - p < 0.9, p, 0.0)
        return index.gather(1, torch.multinomial(p, 1))

    yield Row("sample 256 × 128,256, top_p=0.9", f"torch sort, {where}", events(by_sort, 10), ceiling)


def decode_linears() -> Iterator[Row]:
    for outputs, width in ((14336, 4096), (4096, 14336)):
        x = torch.randn(1, width, device="cuda").to(BF16)
        dense = [torch.randn(outputs, width, device="cuda").to(BF16) for _ in range(8)]
        kinds: dict[str, tuple[Callable[..., Tensor], list[tuple[Tensor, ...]]]] = {
            "bf16 (torch)": (F.linear, [(w,) for w in dense]),
            "int8": (llama_kernels.int8_linear, [llama_kernels.quantize_int8(w) for w in dense]),
            "fp8": (llama_kernels.fp8_linear, [llama_kernels.quantize_fp8(w) for w in dense]),
            "int4": (llama_kernels.int4_linear, [llama_kernels.quantize_int4(w) for w in dense * 2]),
        }
        rate = 2e9 / copying(2e9)
        for who, (linear, layers) in kinds.items():

            def rotate(linear: Callable[..., Tensor] = linear, layers: list[tuple[Tensor, ...]] = layers) -> None:
                for layer in layers:
                    linear(x, *layer)  # noqa: B023

            nbytes = sum(t.nbytes for t in layers[0])
            ms = timed(rotate, inner=2) / len(layers)
            name, note = f"linear at batch 1, {width} → {outputs}", f"{nbytes / ms / 1e9:.2f} TB/s"
            yield Row(name, who, ms, nbytes / rate, note, 2 * width * outputs, nbytes)


def fp8_matmul() -> Iterator[Row]:
    n = 8192
    x, weight, dy = (torch.randn(n, n, device="cuda").to(BF16) for _ in range(3))
    dense = forward_and_backward(F.linear, [x, weight], [dy])
    with torch.no_grad():
        inference = timed(lambda: llama_kernels.fp8_matmul(x, weight))
    rounded = forward_and_backward(llama_kernels.fp8_matmul, [x, weight], [dy])
    training = [x.detach().requires_grad_(), weight.detach().requires_grad_()]
    keeping = events(lambda: llama_kernels.fp8_matmul(*training), 20)
    for what, ours, theirs, flops in (
        ("forward", inference, dense[0], 2),
        ("forward that keeps for backward", keeping, dense[0], 2),
        ("backward", rounded[1], dense[1], 4),
    ):
        for who, ms in (("ours, casts included", ours), ("bf16 (torch)", theirs)):
            note, nbytes = f"{flops * n**3 / ms / 1e9:.0f} TFLOP/s", (3 * flops // 2) * x.nbytes
            yield Row(f"fp8_matmul 8192³ {what}", who, ms, theirs, note, flops * n**3, nbytes)


def access() -> Iterator[Row]:
    """Teaching: what a GPU reads when it is asked for one value in n, and when it is asked for scattered rows."""
    count = 2**28
    x = torch.randn(count, device="cuda").to(BF16)
    out = torch.empty(count // 32, device="cuda", dtype=BF16)
    for stride in (1, 2, 4, 8, 16, 32):
        view = x[: stride * len(out) : stride]
        ms = events(lambda: out.copy_(view), 20)  # noqa: B023
        useful = 2 * out.nbytes
        yield Row("read every n-th value, write dense", f"n = {stride}", ms, useful / (2e9 / copying(2e9)))
    for width in (8, 64, 512, 4096):
        table = x.view(-1, width)
        index = torch.randperm(len(table), device="cuda")[: len(table) // 4]
        target = torch.empty(len(index), width, device="cuda", dtype=BF16)
        ms = events(lambda: torch.index_select(table, 0, index, out=target), 20)  # noqa: B023
        yield Row(
            "gather rows in random order", f"{2 * width} bytes each", ms, 2 * target.nbytes / (2e9 / copying(2e9))
        )


def paged_attention() -> Iterator[Row]:
    rate = 2e9 / copying(2e9)
    for batch, length, ms, nbytes in paged_rows():
        name, note = f"paged_attention {batch} × {length} keys", f"{nbytes / ms / 1e9:.2f} TB/s, {nbytes / 1e6:.0f} MB"
        yield Row(name, "ours, bfloat16", ms, nbytes / rate, note, 4 * batch * length * 32 * 128, nbytes)


KINDS = (rms_norm, add_rms_norm, swiglu, rope, linear_cross_entropy, sample, decode_linears, fp8_matmul)
BENCHMARKS = {f.__name__: f for f in (*KINDS, paged_attention, access)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(BENCHMARKS), default=list(BENCHMARKS))
    parser.add_argument("--plot", metavar="PNG", help="draw our rows under the measured roofs")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("a CUDA GPU is needed")
    square = torch.randn(8192, 8192, device="cuda").to(BF16)
    products = events(lambda: square @ square, 30)  # also brings the clocks up
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, commit {commit()}")
    print(f"copy {2e9 / copying(2e9) / 1e9:.2f} TB/s (read + written), ", end="")
    print(f"bf16 8192³ {2 * 8192**3 / products / 1e9:.0f} TFLOP/s\n")
    print("| operation | who | ms | ceiling ms | fraction of ceiling | |\n|---|---|---|---|---|---|")
    rows = []
    for name in options.only:
        try:
            for row in BENCHMARKS[name]():
                rows.append(row)
                numbers = f"{row.ms:.4f} | {row.ceiling_ms:.4f} | {row.fraction:.3f}"
                print(f"| {row.operation} | {row.who} | {numbers} | {row.note} |", flush=True)
        except Exception as error:  # one rival's failure must not cost the rest of a lease
            print(f"| {name} | failed: {type(error).__name__}: {str(error)[:120]} | | | | |", flush=True)
        torch.cuda.empty_cache()
    if options.plot:
        own = [row for row in rows if row.who.startswith(("ours", "int", "fp8")) and "spread 4" not in row.who]
        plot(own, options.plot, 2e12 / copying(2e9), 2e3 * 8192**3 / products)


if __name__ == "__main__":
    main()
