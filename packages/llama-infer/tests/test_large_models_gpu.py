"""On GPUs: one model on several of them, rounded folders and a rounded cache, against the same on one CPU process."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from llama_core import Llama, causal_attend, generate_naive
from llama_infer import LLM, SamplingParams, cli
from llama_infer.fp8_cache import measured_scales
from llama_infer.rounding import QUANTIZATIONS
from llama_kernels.write_kv import from_fp8, to_fp8

pytestmark = pytest.mark.gpu

PROMPTS = [[5, 6, 7], [9, 8, 7, 6, 5, 4, 3], list(range(40)), [1], [5, 6, 7, 8]]
PARAMS = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SHAPE = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
SCRIPT = """
import json, sys
from llama_infer import LLM, SamplingParams
folder, size, settings, prompts = sys.argv[1], int(sys.argv[2]), json.loads(sys.argv[3]), json.loads(sys.argv[4])
llm = LLM(folder, tensor_parallel_size=size, dtype="float32", device="cuda", **settings)
params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
first = [output.token_ids for output in llm.generate(prompts, params)]
again = [output.token_ids for output in llm.generate(prompts, params)]
assert first == again
llm.engine.scheduler.pool.check()
print(json.dumps(first))
"""


def under_torchrun(script: Path, size: int, *arguments: str) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size), "--standalone"]
    return subprocess.run([*torchrun, str(script), *arguments], capture_output=True, text=True, timeout=240)


@pytest.mark.parametrize("size", [2, 4, 8])
@pytest.mark.parametrize(
    "settings",
    [
        {},  # graphs, overlap
        {"enforce_eager": True},
        {"max_num_seqs": 3, "max_num_batched_tokens": 9, "block_size": 4, "max_model_len": 60},
        {"attention": "sdpa"},
        {"kv_cache_dtype": "fp8"},
    ],
    ids=["graphs", "eager", "chunks", "sdpa", "fp8"],
)
def test_tensor_parallel_equals_the_oracle(
    save: Callable[..., Path], make_model: Callable[..., Llama], tmp_path: Path, size: int, settings: dict[str, object]
) -> None:
    if torch.cuda.device_count() < size:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    changes = {"num_attention_heads": 8, "num_key_value_heads": 4}  # 8 ranks hold each key/value head twice
    folder, model = save(**changes), make_model(**changes)
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = under_torchrun(script, size, str(folder), str(size), json.dumps(settings), json.dumps(PROMPTS))
    assert done.returncode == 0, done.stderr
    attend = RoundedAttend(model) if settings.get("kv_cache_dtype") == "fp8" else None
    for prompt, got in zip(PROMPTS, json.loads(done.stdout), strict=True):
        assert got == generate_naive(lambda t: model.logits(model(t, attend=attend)), prompt, max_new_tokens=12)


def test_a_rank_that_fails_ends_all_with_its_traceback(save: Callable[..., Path], tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("one GPU")
    script = tmp_path / "script.py"
    script.write_text(
        "import os\nfrom llama_infer import runner\n"
        "if os.environ['RANK'] == '1':\n    runner.ModelRunner.run = lambda self, batch: 1 / 0\n" + SCRIPT
    )
    done = under_torchrun(script, 2, str(save()), "2", "{}", "[[1, 2, 3]]")
    assert done.returncode != 0
    assert "ZeroDivisionError" in done.stderr
    assert "rank 1 of 2 has failed" in done.stderr


class RoundedAttend:
    """Causal attention over keys and values rounded as a cache of fp8 rounds them."""

    def __init__(self, model: Llama) -> None:
        self.scales = measured_scales(model)

    def __call__(self, layer: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        k, v = (from_fp8(to_fp8(x, s), s, x.dtype) for x, s in zip((k, v), self.scales[:, layer], strict=True))
        return causal_attend(layer, q, k, v)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_rounded_cache_equals_its_oracle(
    save: Callable[..., Path], model: Llama, attention: str, eager: bool
) -> None:
    llm = LLM(
        save(), dtype="float32", device="cuda", kv_cache_dtype="fp8", attention=attention, enforce_eager=eager,
        max_num_seqs=4, max_num_batched_tokens=24, kv_cache_memory_bytes=6 * 2**10,
    )  # fmt: skip
    attend = RoundedAttend(model)
    for prompt, output in zip(PROMPTS, llm.generate(PROMPTS, PARAMS), strict=True):
        expected = generate_naive(lambda t: model.logits(model(t, attend=attend)), prompt, max_new_tokens=12)
        assert output.token_ids == expected
    llm.engine.scheduler.pool.check()


def test_a_rounded_cache_serves_bfloat16(save: Callable[..., Path]) -> None:
    folder = save()
    tokens = {
        kind: [o.token_ids for o in LLM(folder, device="cuda", kv_cache_dtype=kind).generate(PROMPTS, PARAMS)]
        for kind in ("auto", "fp8")
    }
    assert [len(each) for each in tokens["fp8"]] == [12] * len(PROMPTS)
    assert all(one[0] == other[0] for one, other in zip(tokens["auto"], tokens["fp8"], strict=True))


@pytest.mark.parametrize("kind", QUANTIZATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_rounded_folder_is_rounding_when_loading(
    save: Callable[..., Path], tmp_path: Path, kind: str, dtype: str
) -> None:
    source, target = save(**SHAPE), tmp_path / "rounded"
    assert cli.main(["convert", str(source), str(target), "--quantization", kind, "--dtype", dtype]) == 0
    saved, rounded = LLM(target, dtype=dtype, device="cuda"), LLM(source, dtype=dtype, device="cuda", quantization=kind)
    state = saved.model.state_dict()
    for name, tensor in rounded.model.state_dict().items():
        assert state[name].is_cuda
        if tensor.dtype.is_floating_point and name.endswith("scale"):
            # A quotient: a GPU may round it otherwise than the CPU that wrote the folder.
            torch.testing.assert_close(state[name], tensor, rtol=1e-2, atol=0)
    assert [len(o.token_ids) for o in saved.generate(PROMPTS, PARAMS)] == [12] * len(PROMPTS)


@pytest.mark.parametrize("gpus", [1, 2])
def test_a_spread_model_equals_the_undivided_one(save: Callable[..., Path], gpus: int) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{torch.cuda.device_count()} GPUs")
    folder = save(num_hidden_layers=6, hidden_size=64, intermediate_size=256)
    budgets: dict[int | str, int | str] = dict.fromkeys(range(gpus), 860_000) | {"cpu": 500_000}
    whole = LLM(folder, dtype="float32", device="cuda", kernels="plain").generate(PROMPTS, PARAMS)
    llm = LLM(folder, dtype="float32", device="cuda", kernels="plain", device_map="auto", max_memory=budgets)
    assert "on GPU 0 (embed_tokens" in llm.remarks[0]
    for one, other in zip(whole, llm.generate(PROMPTS, PARAMS), strict=True):
        assert one.token_ids == other.token_ids
