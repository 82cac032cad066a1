"""`llama-infer bench` on a tiny model, and `--heads` on a tiny shape."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from llama_core import Llama
from llama_infer import LLM, cli
from llama_infer.device_rates import DeviceRates, best_seconds, measure_rates
from llama_infer.engine_bench import bench_engine, prompt_flops, roof, step_flops, weight_bytes
from llama_infer.quantize import quantize_model

TINY = ["bench", "--heads", "--shape", "tiny", "--tokens", "5", "--tp", "2", "--max-tokens", "3", "--device", "cpu"]


def test_table_and_claims(
    save: Callable[..., Path], capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    folder = save(max_position_embeddings=128)
    assert cli.main([*TINY, "--model", str(folder)]) == 0
    out = capfd.readouterr().out
    assert [line.split()[:2] for line in out.splitlines() if re.match(r" +(one|loop|batched) ", line)] == [
        *(["one", "1"], ["loop", "4"], ["batched", "4"], ["loop", "2"], ["batched", "2"], ["loop", "1"]),
        *(["batched", "1"], ["one", "head"]),
    ]
    for claim in ("2.3 ms", "4.1 ms for 32", "40% less", "3.2 ×", "saves 50% of keys and values, 25.0% of weights"):
        assert claim in out
    assert "the same ids" in out


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["bench", "--batch-sizes", "0"], "--batch-sizes must be numbers of at least 1, got (0,)"),
        (["bench", "--max-tokens", "1"], "--max-tokens is 1; it must be at least 2"),
        (["bench", "--png", "no/where.png"], "no/where.png: there is no folder no"),
        ([*TINY, "--shape", "tinny"], "no preset 'tinny'; did you mean 'tiny'?"),
        ([*TINY, "--tp", "3"], "tp is 3; 4 heads do not divide over it"),
        ([*TINY, "--max-tokens", "0"], "--max-tokens is 0; it must be at least 1"),
        ([*TINY, "--model", "nowhere"], "nowhere does not exist"),
    ],
)
def test_mistakes_are_one_line(capfd: pytest.CaptureFixture[str], argv: list[str], line: str) -> None:
    assert cli.main(argv) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert err.startswith(f"llama-infer: {line}")
    assert err.count("\n") == 1


# --- latency and throughput


def test_table_json_and_picture(
    save: Callable[..., Path], tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setenv("COLUMNS", "80")
    argv = ["bench", "--model", str(save(max_position_embeddings=128)), "--device", "cpu", "--max-tokens", "5"]
    argv += ["--batch-sizes", "1", "3", "--prompt-lengths", "7", "20"]
    assert cli.main([*argv, "--json", str(tmp_path / "b.json"), "--png", str(tmp_path / "b.png")]) == 0
    out = capfd.readouterr().out
    rows = [line.split()[:2] for line in out.splitlines() if re.match(r" +\d+ +\d+ +[\d.]+ ms", line)]
    assert rows == [["1", "7"], ["3", "7"], ["1", "20"], ["3", "20"]]
    assert "…" not in out
    assert re.search(r"copies [\d.]+ GB/s, multiplies matrices at [\d.e-]+ TFLOP/s", out)
    found = json.loads((tmp_path / "b.json").read_text())
    assert found["dtype"] == "float32"
    assert found["copy_bytes_per_second"] > 1e6
    for point in found["points"]:
        assert 0 < point["first_token"] <= point["prompts"] < point["total"]
        assert 0 < point["step"] <= point["slowest_step"]
        assert point["output_rate"] == pytest.approx(point["batch"] * 5 / point["total"])
        assert point["batch"] / point["slowest_step"] * 0.99 < point["decode_rate"]
        assert point["step_roof"] > 0
    picture = (tmp_path / "b.png").read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert len(picture) > 10_000


def test_without_matplotlib_it_says_what_to_install(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "--png", str(tmp_path / "b.png")]) == 2
    assert 'pip install "llama-infer[bench]"' in capfd.readouterr().err


def test_steps_are_timed_where_all_generate(make_model: Callable[..., Llama]) -> None:
    """A step that sleeps shows in the step's time, and a sleep while prompts are read in the first token's."""
    llm = LLM(make_model(), max_num_seqs=2)
    run = llm.engine.runner.run

    def slow(batch: list[object]) -> object:
        time.sleep(0.03 if all(work.count == 1 for work in batch) else 0.1)  # type: ignore[attr-defined]
        return run(batch)  # type: ignore[arg-type]

    llm.engine.runner.run = slow  # type: ignore[method-assign, assignment]
    (point,) = bench_engine(llm, DeviceRates(1e9, 1e9), [2], [10], 6)
    assert 0.03 < point.step < point.prompts  # the median: one slow step on a busy machine is no failure
    assert 0.1 < point.first_token <= point.prompts < point.total
    assert point.total > 0.1 + 5 * 0.03
    assert 2 / point.slowest_step * 0.99 < point.decode_rate < 2 / 0.03


def test_guessed_tokens_count(make_model: Callable[..., Llama]) -> None:
    """A draft that is always right gives 5 tokens in a step."""
    model = make_model(max_position_embeddings=128)
    llm = LLM(model, draft=model, max_num_seqs=1)
    (point,) = bench_engine(llm, DeviceRates(1e9, 1e9), [1], [10], 61)
    assert point.decode_rate > 4.9 / point.slowest_step


def test_what_does_not_fit_is_refused(make_model: Callable[..., Llama]) -> None:
    llm = LLM(make_model(), max_num_seqs=2)
    with pytest.raises(ValueError, match="60 prompt and 6 new tokens are more than the context of 64"):
        bench_engine(llm, DeviceRates(1, 1), [1], [60], 6)
    with pytest.raises(ValueError, match="a batch of 3 is more than max_num_seqs 2"):
        bench_engine(llm, DeviceRates(1, 1), [3], [10], 6)


def test_arithmetic_is_what_torch_counts(make_model: Callable[..., Llama]) -> None:
    model = make_model()
    tokens = torch.zeros(3, 10, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        model.logits(model(tokens)[:, -1])
    counted = counter.get_total_flops()
    # Torch counts every pair of tokens, we those that a causal mask leaves: 55 of 100.
    pairs = 4 * 2 * 4 * 8 * 3 * (100 - 55)
    assert prompt_flops(model.config, 3, 10) in (counted, counted - pairs)
    one = prompt_flops(model.config, 1, 1)
    assert step_flops(model.config, 1, 1) == one
    assert step_flops(model.config, 4, 30) == 4 * one + (30 - 4) * 4 * 2 * 4 * 8


def test_bytes_are_those_of_the_weights_as_stored(make_model: Callable[..., Llama]) -> None:
    shape = {"hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4, "head_dim": 32}
    model = make_model(**shape)
    embedding = model.model.embed_tokens
    assert embedding is not None
    norm = 128 * 4
    whole = sum(parameter.nbytes for parameter in model.parameters()) - embedding.weight.nbytes - norm
    assert weight_bytes(model) == whole
    tied = make_model(**shape, tie_word_embeddings=True)
    assert weight_bytes(tied) == whole
    quantize_model(model, "int8")
    assert model.lm_head is not None
    layers = whole - model.lm_head.weight.nbytes
    assert layers / 4 < weight_bytes(model) - model.lm_head.weight.nbytes < layers / 3.7


def test_rates_and_roof() -> None:
    rates = measure_rates(torch.device("cpu"), torch.float32)
    assert rates.copy > 1e8
    assert rates.matmul > 1e8
    assert roof(100, 10, DeviceRates(copy=10, matmul=50)) == 2
    assert roof(100, 30, DeviceRates(copy=10, matmul=50)) == 3
    assert best_seconds(lambda: time.sleep(0.01), torch.device("cpu"), runs=2) >= 0.01
