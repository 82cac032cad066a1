"""What every serving operation owes torch and its caller: whole graphs, CUDA graphs, no rows at all, huge tensors."""

import pytest
import torch

import llama_kernels
from llama_kernels import reference

HEADS, KV_HEADS, WIDTH, PAGE = 4, 2, 16, 4


class Step:
    """One decode step of two sequences: write keys, attend, weight-only layers, draw."""

    def __init__(self, device, dtype):
        hidden = HEADS * WIDTH * 2
        self.x = torch.randn(2, hidden, device=device, dtype=dtype)
        make = lambda outputs, inputs: torch.randn(outputs, inputs, device=device, dtype=dtype) / inputs**0.5  # noqa: E731
        self.int8 = llama_kernels.quantize_int8(make((HEADS + 2 * KV_HEADS) * WIDTH, hidden))
        self.fp8 = llama_kernels.quantize_fp8(make(hidden, HEADS * WIDTH))
        self.int4 = llama_kernels.quantize_int4(make(50, hidden))
        self.k_cache, self.v_cache = (torch.randn(6, PAGE, KV_HEADS, WIDTH, device=device, dtype=dtype) for _ in "kv")
        self.tables = torch.tensor([[3, 1, 0], [5, 2, 4]], dtype=torch.int32, device=device)
        self.lens = torch.tensor([6, 11], dtype=torch.int32, device=device)
        self.slots = torch.tensor([1 * PAGE + 1, 4 * PAGE + 2], device=device)
        self.seeds = torch.tensor([7, 8], device=device)

    def __call__(self, x):
        qkv = llama_kernels.int8_linear(x, *self.int8).unflatten(1, (-1, WIDTH))
        q, k, v = qkv.split([HEADS, KV_HEADS, KV_HEADS], dim=1)
        llama_kernels.write_kv(k, v, self.k_cache, self.v_cache, self.slots)
        out = llama_kernels.paged_attention(q, self.k_cache, self.v_cache, self.tables, self.lens)
        logits = llama_kernels.int4_linear(llama_kernels.fp8_linear(out.flatten(1), *self.fp8), *self.int4)
        return logits, llama_kernels.sample(logits, self.seeds, temperature=0.5, top_k=20, top_p=0.9, min_p=0.01)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
def test_compiles_whole(device):
    step = Step(device, torch.bfloat16 if device.type == "cuda" else torch.float32)
    torch.manual_seed(0)  # the plain draw takes torch's generator
    logits, ids = step(step.x)
    backend = "inductor" if device.type == "cuda" else "aot_eager"
    torch.manual_seed(0)
    compiled_logits, compiled_ids = torch.compile(step, fullgraph=True, backend=backend)(step.x)
    torch.testing.assert_close(compiled_logits, logits)
    assert torch.equal(compiled_ids, ids)


@pytest.mark.gpu
def test_cuda_graph_replays_on_new_data():
    step = Step("cuda", torch.bfloat16)
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # kernels compile before the capture
        step(step.x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step(step.x)
    step.x.copy_(torch.randn_like(step.x))
    step.seeds.add_(100)
    graph.replay()
    cache = step.k_cache.clone()
    for actual, expected in zip(captured, step(step.x), strict=True):
        torch.testing.assert_close(actual, expected)
    assert torch.equal(step.k_cache, cache)


def test_no_rows(device):
    step = Step(device, torch.float32)
    none = step.x[:0]
    assert llama_kernels.int8_linear(none, *step.int8).shape == (0, (HEADS + 2 * KV_HEADS) * WIDTH)
    assert llama_kernels.int4_linear(none, *step.int4).shape == (0, 50)
    assert llama_kernels.fp8_linear(none[:, : HEADS * WIDTH], *step.fp8).shape == (0, none.shape[1])
    before = step.k_cache.clone()
    k = torch.zeros(0, KV_HEADS, WIDTH, device=device)
    llama_kernels.write_kv(k, k, step.k_cache, step.v_cache, step.slots[:0])
    assert torch.equal(step.k_cache, before)
    q = torch.zeros(0, HEADS, WIDTH, device=device)
    assert llama_kernels.paged_attention(q, step.k_cache, step.v_cache, step.tables[:0], step.lens[:0]).shape == q.shape
    cos = torch.ones(1, 0, WIDTH // 2, device=device)
    q, k = llama_kernels.rope(q.unsqueeze(0), k.unsqueeze(0), cos, cos)
    assert (q.shape, k.shape) == ((1, 0, HEADS, WIDTH), (1, 0, KV_HEADS, WIDTH))
    assert llama_kernels.sample(torch.zeros(0, 9, device=device), step.seeds[:0]).shape == (0,)


# Each of these runs small on any device, and with more than 2³¹ elements on a GPU (kernels.md, rows 11 to 13).
SIZES = [(1000, "cpu"), pytest.param(2**31, "cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize(("elements", "device"), SIZES)
@pytest.mark.parametrize("rows", [1, 3])
def test_last_outputs_of_a_huge_int8_weight(elements, device, rows, near):
    weight = torch.randint(-128, 128, (elements // 4096 + 5, 4096), dtype=torch.int8, device=device)
    scale = torch.rand(len(weight), device=device)
    x = torch.randn(rows, 4096, device=device).to(torch.bfloat16)
    expected = x.double() @ weight[-5:].double().T * scale[-5:].double()
    near(llama_kernels.int8_linear(x, weight, scale)[:, -5:], expected)


@pytest.mark.parametrize(("elements", "device"), SIZES)
@pytest.mark.parametrize("rows", [1, 3])
def test_last_outputs_of_a_huge_int4_weight(elements, device, rows, near):
    packed = torch.randint(-(2**31), 2**31, (elements // 512 + 5, 32, 16), dtype=torch.int32, device=device)
    scale, minimum = (torch.randn(len(packed), 32, device=device).to(torch.bfloat16) for _ in range(2))
    x = torch.randn(rows, 4096, device=device).to(torch.bfloat16)
    expected = x.double() @ reference.int4_weight(packed[-5:], scale[-5:].double(), minimum[-5:].double()).T
    near(llama_kernels.int4_linear(x, packed, scale, minimum)[:, -5:], expected)


@pytest.mark.parametrize(("elements", "device"), SIZES)
def test_last_slot_of_a_huge_cache(elements, device):
    k_cache, v_cache = (
        torch.zeros(elements // 16384 + 2, 16, 8, 128, dtype=torch.bfloat16, device=device) for _ in "kv"
    )
    k, v = (torch.randn(2, 8, 128, device=device).to(torch.bfloat16) for _ in "kv")
    slots = len(k_cache) * 16
    llama_kernels.write_kv(k, v, k_cache, v_cache, torch.tensor([slots - 1, slots], device=device))  # one is outside
    assert torch.equal(k_cache[-1, -1], k[0])
    assert torch.equal(v_cache[-1, -1], v[0])
    assert not k_cache[0].any()
    assert not k_cache[-1, :-1].any()


@pytest.mark.parametrize(("elements", "device"), SIZES)
def test_last_row_of_huge_logits(elements, device):
    rows, vocabulary = elements // 128_256 + 2, 128_256 if device == "cuda" else 300
    logits = torch.zeros(rows, vocabulary, dtype=torch.bfloat16, device=device)
    logits[-1, 77] = 50.0
    seeds = torch.arange(rows, device=device)
    assert int(llama_kernels.sample(logits, seeds, top_k=5, top_p=0.9)[-1]) == 77
