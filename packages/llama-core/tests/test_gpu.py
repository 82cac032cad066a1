"""What must be the same on a GPU as on the CPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from llama_core import (
    Llama,
    PackedAttend,
    PaddedAttend,
    compile_layers,
    init_weights,
    pack_projections,
    positions_from_documents,
    positions_from_mask,
    preset,
    set_activation_checkpointing,
)
from llama_core.init import fill_normal
from llama_core.ops import linear_cross_entropy, rms_norm

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    # see test_compile.py
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
    pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores:UserWarning"),  # advice; exact float32 is wanted here
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
]

Make = Callable[..., Llama]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_initial_weights_are_the_same_bits(dtype: torch.dtype) -> None:
    for shape, offsets in (((1000, 999), (0, 0)), ((300, 70), (50_000, 3))):
        blocks = []
        for device in ("cpu", "cuda"):
            block = torch.empty(shape, dtype=dtype, device=device)
            fill_normal(block, "model.embed_tokens.weight", 3, 0.02, (128_256, 4096), offsets)
            blocks.append(block.cpu())
        assert torch.equal(*blocks)


def test_a_model_built_on_the_gpu_is_the_model_moved_there() -> None:
    moved = Llama(preset("tiny")).cuda()
    with torch.device("cuda"):
        built = Llama(preset("tiny"))
    with torch.device("meta"):
        filled = Llama(preset("tiny"))
    filled = filled.to_empty(device="cuda")
    init_weights(filled, seed=0)
    for model in (built, filled):
        assert model.model.rotary_emb.inv_freq.is_cuda
        assert torch.equal(model.model.rotary_emb.inv_freq, moved.model.rotary_emb.inv_freq)
        for a, b in zip(model.parameters(), moved.parameters(), strict=True):
            assert torch.equal(a, b)


@pytest.mark.parametrize("what", ["plain", "packed projections", "selective", "full", "compiled"])
def test_logits_and_gradients(make_t0: Make, what: str) -> None:
    tokens = torch.arange(48).view(2, 24)
    mask = torch.ones(2, 24, dtype=torch.int64)
    mask[0, :5] = 0
    documents = (torch.arange(24) // 10).expand(2, -1)
    cpu, gpu = make_t0(), make_t0().cuda()
    if what == "packed projections":
        pack_projections(gpu)
    elif what == "compiled":
        compile_layers(gpu)
    elif what != "plain":
        set_activation_checkpointing(gpu, what)
    for kind in ("causal", "padded", "documents"):
        losses = []
        for model, device in ((cpu, "cpu"), (gpu, "cuda")):
            t, m, d = tokens.to(device), mask.to(device), documents.to(device)
            positions, attend = {
                "causal": (None, None),
                "padded": (positions_from_mask(m), PaddedAttend(m)),
                "documents": (positions_from_documents(d), PackedAttend(d)),
            }[kind]
            hidden = model(t, positions, attend)
            assert model.lm_head is not None
            losses.append(linear_cross_entropy(hidden[:, 5:-1], model.lm_head.weight, t[:, 6:], z_loss=1e-4))
            model.zero_grad()
            if what != "packed projections":
                losses[-1].backward()
        torch.testing.assert_close(losses[1].cpu(), losses[0], rtol=0, atol=1e-5)
        for a, b in zip(cpu.parameters(), gpu.parameters(), strict=True):
            if b.grad is not None:
                torch.testing.assert_close(b.grad.cpu(), a.grad, rtol=0, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_b39_rms_norm(dtype: torch.dtype) -> None:
    for value, eps in ((300.0, 1e-5), (60000.0, 1e-5), (1e-3, 1e-12)):
        out = rms_norm(torch.full((2, 64), value, dtype=dtype, device="cuda"), torch.ones(64, dtype=dtype).cuda(), eps)
        torch.testing.assert_close(out.float().cpu(), torch.ones(2, 64), rtol=0, atol=2e-3)
