"""`llama-train bench sweep`: cases and what is passed over, by hand; a real case; results kept, shown and drawn."""

from __future__ import annotations

import csv
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from llama_train.cli import main
from llama_train.config import DataConfig, ModelConfig, ParallelSettings, TrainConfig
from llama_train.config_file import dump_config, load_config
from llama_train.manage import sweep, sweep_case
from llama_train.manage.sweep import Case, Machine, cases, parse_layout, run_case, why_not
from llama_train.manage.sweep_results import Results, by_speed, csv_of, png_of, table_of
from llama_train.out_of_memory import OutOfMemory

CPU = Machine("cpu", 4, None, "CPU")


@pytest.fixture
def base() -> TrainConfig:
    return TrainConfig(
        device="cpu",
        model=ModelConfig(preset="tiny"),
        data=DataConfig(vocab_size=300, sequence_length=16),
        parallel=ParallelSettings(dp_shard=1),
        threads=1,
    )


def _cases(base: TrainConfig, *layouts: str, micro: tuple[int, ...] = (1,), acc: tuple[int, ...] = (1,)) -> list[Case]:
    return list(cases(base, layouts, micro, acc, ["none"], [False]))


def test_layouts() -> None:
    assert parse_layout("1") == ParallelSettings(dp_shard=1)
    assert parse_layout("dp2.tp4.pp3.cp5") == ParallelSettings(dp_shard=2, tp=4, pp=3, cp=5)
    assert parse_layout("dp_replicate2") == ParallelSettings(dp_replicate=2, dp_shard=1)
    for wrong in ("", "2", "dp", "dp0", "tp2.tp2", "ep2", "dp2,tp2"):
        with pytest.raises(ValueError, match="sizes such as 1, dp2"):
            parse_layout(wrong)


def test_cases_are_all_combinations(base: TrainConfig) -> None:
    found = list(cases(base, ["1", "dp2"], [1, 4], [1, 2], ["none", "full"], [False, True]))
    assert len({case.key for case in found}) == len(found) == 32
    (case,) = [case for case in found if case.key == "dp2-micro4-acc2-full-compile"]
    row = case.row()
    assert (row["processes"], row["rows_per_step"], row["layout"]) == (2, 16, "dp_shard 2")
    assert (row["activation_checkpointing"], row["compile"]) == ("full", True)
    assert case.config.model == base.model


def test_what_is_passed_over(base: TrainConfig) -> None:
    reasons = [why_not(case, CPU) for case in _cases(base, "1", "dp2", "dp8", "tp3", "pp4")]
    assert reasons[:2] == [None, None]
    assert reasons[2] == "needs 8 processes; this machine has 4 cores"
    assert "4 attention heads do not divide over tp 3" in str(reasons[3])
    assert "2 layers are fewer than pp 4" in str(reasons[4])
    (case,) = _cases(base, "1")
    assert why_not(case, Machine("cuda", 1, 10**12, "GPU")) is None
    assert str(why_not(case, Machine("cuda", 1, 10**4, "GPU"))).endswith("GB are predicted; a GPU has 0 GB")


def test_a_case_is_the_step_of_a_run(base: TrainConfig) -> None:
    (case,) = _cases(base, "1", micro=(2,), acc=(3,))
    found = sweep_case.measure(case.config, steps=2, warmup=1)
    assert found is not None
    assert found["state"] == "ok"
    assert float(str(found["tokens_per_second"])) == pytest.approx(2 * 3 * 16 / float(str(found["seconds"])), rel=0.3)
    assert 5.0 < float(str(found["loss"])) < 6.5  # near ln 300: it has seen three steps of noise
    assert found["mfu"] is None


def test_a_case_in_processes_of_its_own_and_one_that_takes_too_long(base: TrainConfig, tmp_path: Path) -> None:
    (case,) = _cases(base, "1")
    assert run_case(case, tmp_path, 1, 1, 100.0)["state"] == "ok"
    assert load_config(tmp_path / f"{case.key}.toml") == case.config
    assert run_case(case, tmp_path, 1, 1, 0.01) == {"state": "timeout", "reason": "took longer than 0.01 s"}


def test_out_of_memory_is_a_result(base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.toml"
    path.write_text(dump_config(base), encoding="utf-8")

    def full(*arguments: object) -> None:
        raise OutOfMemory("out of memory on cuda\nmore")

    monkeypatch.setattr(sweep_case, "measure", full)
    assert sweep_case.main([str(path), str(tmp_path / "a.result"), "1", "1"]) == 1
    found = json.loads((tmp_path / "a.result").read_text(encoding="utf-8"))
    assert found == {"state": "oom", "reason": "out of memory on cuda"}


@pytest.mark.parametrize(
    ("code", "state", "reason"),
    [
        ("import os; os.kill(os.getpid(), 9)", "oom", "killed by the system"),
        ("raise RuntimeError('a fault')", "fail", "RuntimeError: a fault"),
        ("raise SystemExit(3)", "fail", "status 3"),
    ],
)
def test_processes_that_die_are_results(
    code: str, state: str, reason: str, base: TrainConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = tmp_path / "program"
    program.write_text(f"#!{sys.executable}\n{code}\n", encoding="utf-8")
    program.chmod(0o755)
    monkeypatch.setattr(sweep.sys, "executable", str(program))
    found = run_case(_cases(base, "1")[0], tmp_path, 1, 1, 60.0)
    assert found["state"] == state
    assert reason in found["reason"]


def test_known_cases_are_those_of_the_same_settings(
    base: TrainConfig, tmp_path: Path, change: Callable[..., Any]
) -> None:
    (case,) = _cases(base, "1")
    kept = Results(tmp_path, 3, 1)
    assert kept.known(case) is None
    kept.keep(case, {"state": "ok"})
    assert kept.known(case) == {"state": "ok"}
    assert Results(tmp_path, 4, 1).known(case) is None
    (other,) = _cases(change(base, seed=1), "1")
    assert other.key == case.key
    assert kept.known(other) is None
    (tmp_path / f"{case.key}.json").write_text("{", encoding="utf-8")
    assert kept.known(case) is None


_SAME = {"micro_batch_size": 1, "gradient_accumulation_steps": 1, "activation_checkpointing": "none", "compile": False}


def _row(case: str, layout: str, speed: float, each: float, mfu: float | None) -> dict[str, Any]:
    found = {
        "tokens_per_second": speed,
        "tokens_per_second_per_device": each,
        "mfu": mfu,
        "memory": 10**9,
        "seconds": 0.5,
    }
    return {"case": case, "layout": layout, **_SAME, "state": "ok", **found}


ROWS = [
    _row("a", "one process", 100.0, 100.0, 0.4),
    _row("b", "tp 2", 300.0, 150.0, None),
    {"case": "c", "layout": "tp 4", **_SAME, "state": "oom", "reason": "full"},
]


def test_the_fastest_for_each_device_comes_first() -> None:
    assert [row["case"] for row in by_speed(ROWS)] == ["b", "a", "c"]
    rows = list(csv.DictReader(csv_of(by_speed(ROWS)).splitlines()))
    assert [(row["case"], row["mfu"], row["reason"]) for row in rows] == [
        ("b", "", ""),
        ("a", "0.4", ""),
        ("c", "", "full"),
    ]
    assert table_of(ROWS).row_count == 3


def test_the_picture() -> None:
    pytest.importorskip("matplotlib", reason="the extra `plot`")
    assert png_of(ROWS).startswith(b"\x89PNG")
    assert png_of(ROWS[2:]).startswith(b"\x89PNG")


def test_the_command_goes_on_where_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    started: list[str] = []

    def fake(case: Case, folder: Path, steps: int, warmup: int, timeout: float) -> dict[str, Any]:
        started.append(case.key)
        if case.config.data.micro_batch_size == 4:
            return {"state": "oom", "reason": "full"}
        speed = 100.0 * case.config.data.micro_batch_size
        return {"state": "ok", "tokens_per_second": speed, "tokens_per_second_per_device": speed, "mfu": None,
                "memory": 10**9, "seconds": 0.1}  # fmt: skip

    monkeypatch.setattr(sweep, "run_case", fake)
    monkeypatch.setattr(sweep, "probe", lambda device: CPU)
    monkeypatch.chdir(tmp_path)
    command = ["bench", "sweep", "tiny", "--device", "cpu", "--layouts", "1", "tp3"]
    assert main([*command, "--micro-batch", "1", "2"]) == 0
    assert started == ["1-micro1-acc1", "1-micro2-acc1"]
    assert "passed over tp3-micro1-acc1: impossible, tp 3 cannot run this model" in capsys.readouterr().out
    assert main([*command, "--micro-batch", "1", "2", "4"]) == 0
    assert started[2:] == ["1-micro4-acc1"]
    out = capsys.readouterr().out
    assert "known       1-micro2-acc1: 200 tokens/s" in out
    assert "measured    1-micro4-acc1: oom, full" in out
    assert main([*command, "--micro-batch", "1", "2", "4", "--retry"]) == 0
    assert started[3:] == ["1-micro4-acc1"]
    with (tmp_path / "sweep" / "sweep.csv").open(encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["state"] for row in rows] == ["ok", "ok", "oom", "impossible", "impossible", "impossible"]
    assert [row["case"] for row in rows[:2]] == ["1-micro2-acc1", "1-micro1-acc1"]
    stored = json.loads((tmp_path / "sweep" / "sweep.json").read_text(encoding="utf-8"))
    assert (stored["machine"]["name"], len(stored["cases"])) == ("CPU", 6)
    assert main(["bench", "sweep", "tiny", "--layouts", "tp3", "--output", "none"]) == 1


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["tiny", "--layouts", "2dp"], "--layouts is '2dp'; it must be sizes such as 1, dp2"),
        (["tyny"], "did you mean 'tiny'"),
        (["none.toml"], "none.toml does not exist"),
        (["tiny", "--micro-batch", "0"], "--micro-batch is (0,); it must be numbers of at least 1"),
    ],
)
def test_mistakes(flags: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        status = main(["bench", "sweep", *flags])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
