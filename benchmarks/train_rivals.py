"""A training step of transformers' LlamaForCausalLM: as it is, with compiled layers, and with Liger's kernels."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from contextlib import nullcontext

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from llama_core import LlamaConfig


def step_of(shape: LlamaConfig, tokens: Tensor, device: torch.device, how: str) -> Callable[[], Tensor]:
    """Forward, loss, backward, fused AdamW; bfloat16 throughout.

    Args:
        shape: the model's.
        tokens: (B, S + 1) on the device. transformers shifts labels itself, so it sees the first S.
        device: where to train.
        how: "eager", "compiled" (each layer, with cuDNN's attention on a GPU) or "liger".

    Raises:
        ImportError: transformers or Liger is not installed.
    """
    transformers = importlib.import_module("transformers")
    config = transformers.LlamaConfig(**{**shape.to_hf(), "use_cache": False}, attn_implementation="sdpa")
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with device:
            model = transformers.LlamaForCausalLM(config)
    finally:
        torch.set_default_dtype(dtype)
    model.train()
    if how == "liger":
        # The last of a process: it also replaces functions of transformers for all models.
        liger = importlib.import_module("liger_kernel.transformers.monkey_patch")
        liger.apply_liger_kernel_to_llama(
            rope=True, rms_norm=True, swiglu=True, cross_entropy=False, fused_linear_cross_entropy=True, model=model
        )
    if how == "compiled":
        for layer in model.model.layers:
            layer.compile()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    rows = tokens[:, :-1].contiguous()
    cudnn = how == "compiled" and device.type == "cuda"

    def step() -> Tensor:
        with sdpa_kernel(SDPBackend.CUDNN_ATTENTION) if cudnn else nullcontext():
            loss: Tensor = model(input_ids=rows, labels=rows).loss
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return step
