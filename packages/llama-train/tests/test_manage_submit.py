"""`llama-train submit`, with programs on PATH that stand in for Slurm's; one job is run for real."""

from __future__ import annotations

import json
import os
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from llama_train.cli import main
from llama_train.config import TrainConfig
from llama_train.config_file import dump_config
from llama_train.manage.job_script import Cluster, default_template, job_fields, options_of, render, size_of

SBATCH = """#!{python}
import os, pathlib, sys
here = pathlib.Path(os.environ["SLURM_STAND_IN"])
number = len(list(here.glob("job-*"))) + 100
(here / f"job-{{number}}").write_text("\\n".join(sys.argv[1:]))
if (here / "refuse").exists():
    sys.exit("sbatch: error: Invalid account")
print(f"{{number}};cluster")
"""
SQUEUE = '#!/bin/sh\ncat "$SLURM_STAND_IN/squeue"\n'
SACCT = '#!/bin/sh\necho "$@" > "$SLURM_STAND_IN/asked"\ncat "$SLURM_STAND_IN/sacct"\n'


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder where the stand-ins keep what they were told; squeue and sacct print files of their names."""
    here, programs = tmp_path / "slurm-state", tmp_path / "bin"
    here.mkdir()
    programs.mkdir()
    texts = {"sbatch": SBATCH.format(python=sys.executable), "squeue": SQUEUE, "sacct": SACCT}
    for name, text in texts.items():
        _program(programs / name, text)
    for name in ("squeue", "sacct"):
        (here / name).write_text("", encoding="utf-8")
    monkeypatch.setenv("SLURM_STAND_IN", str(here))
    monkeypatch.setenv("PATH", f"{programs}:{os.environ['PATH']}")
    monkeypatch.chdir(tmp_path)
    return here


def _program(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)


def _handed_in(slurm: Path) -> dict[str, list[str]]:
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(slurm.glob("job-*"))}


@pytest.fixture
def folder(tiny: TrainConfig, tmp_path: Path, change: Callable[..., TrainConfig]) -> Path:
    """a: one process; b: two nodes of two GPUs in a folder below."""
    path = tmp_path / "experiments"
    (path / "deep").mkdir(parents=True)
    one = change(tiny, name="a b", folder="runs/a", **{"parallel.dp_shard": 1})
    two = change(tiny, name="b", folder=None, device="auto", **{"parallel.dp_shard": 2, "parallel.tp": 2})
    (path / "a.toml").write_text(dump_config(one), encoding="utf-8")
    (path / "deep" / "b.toml").write_text(dump_config(two), encoding="utf-8")
    return path


def test_jobs_are_handed_in_once(folder: Path, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--gpus-per-node", "2", "--partition", "gpu", "--account", "mine", "--time", "1-0", "--sbatch=--mem=0"]
    flags += ["--cpus-per-process", "6"]
    assert main(["submit", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    assert f"handed in   b ({folder}/deep/b.toml): 2 × 2 processes, job 101" in out
    assert [words[0] for words in _handed_in(slurm).values()] == ["--parsable", "--parsable"]
    script = (tmp_path / "runs" / "b" / "slurm" / "job.sh").read_text(encoding="utf-8")
    for line in (
        "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=6", "--gpus-per-node=2", "--partition=gpu",
        "--account=mine", "--time=1-0", "--mem=0", "--requeue", "--signal=B:USR1@300", "--job-name=b",
        f"--chdir={tmp_path}", f"--output={tmp_path}/runs/b/slurm/%j.out",
    ):  # fmt: skip
        assert f"#SBATCH {line}\n" in script
    assert "WORLD_SIZE=4 LOCAL_WORLD_SIZE=2\n" in script
    assert f"-m llama_train run {folder}/deep/b.toml &" in script
    alone = (tmp_path / "runs" / "a" / "slurm" / "job.sh").read_text(encoding="utf-8")
    assert "#SBATCH --job-name=a_b\n" in alone
    assert "--gpus-per-node" not in alone  # a CPU's
    assert f"-m llama_train run {folder}/a.toml &" in alone
    assert subprocess.run(["bash", "-n"], input=script + alone, text=True, check=False).returncode == 0
    (slurm / "squeue").write_text("100|RUNNING\n101|PENDING\n7|RUNNING\n", encoding="utf-8")
    assert main(["submit", str(folder), *flags]) == 0
    out = capsys.readouterr().out
    assert f"passed over a b ({folder}/a.toml): running" in out
    assert "passed over b" in out
    assert "nothing to hand in" in out
    assert len(_handed_in(slurm)) == 2


def test_dry_run_hands_in_nothing(
    folder: Path, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["submit", str(folder), "--gpus-per-node", "4", "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "#SBATCH --nodes=1\n" in out
    assert "WORLD_SIZE=4 LOCAL_WORLD_SIZE=4\n" in out
    assert _handed_in(slurm) == {}
    assert not (tmp_path / "runs").exists()


def test_a_chain_waits_link_by_link(folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "deep" / "b.toml").unlink()
    assert main(["submit", str(folder), "--chain", "3", "--no-requeue"]) == 0
    assert "job 100, then 101, then 102" in capsys.readouterr().out
    jobs = _handed_in(slurm)
    assert [words[1:-2] for words in jobs.values()] == [
        [],
        ["--dependency=afterany:100"],
        ["--dependency=afterany:101"],
    ]
    assert [words[-1] for words in jobs.values()] == ["1", "2", "3"]
    (script,) = {words[-2] for words in jobs.values()}
    text = Path(script).read_text(encoding="utf-8")
    assert "#SBATCH --no-requeue\n" in text
    assert "[ no = yes ]" in text


def _note(run: Path, state: str) -> None:
    """As a run that has ended leaves it."""
    (run / "outcome.json").write_text(json.dumps({"state": state, "message": ""}), encoding="utf-8")
    (run / "config.toml").touch()
    os.utime(run / "config.toml", ns=(1, 1))


@pytest.mark.parametrize(
    ("squeue", "sacct", "note", "state"),
    [
        ("100|PENDING", "100|FAILED", None, "pending"),  # what squeue says is newer
        ("100|RUNNING", "", "stopped", "running"),
        ("100|COMPLETING", "", "finished", "running"),
        ("", "100|COMPLETED", "finished", "finished"),
        ("", "100|COMPLETED", "stopped", "stopped"),
        ("", "100|COMPLETED", None, "fail"),  # without a run: something else is wrong
        ("", "100|FAILED", "fail", "fail"),
        ("", "100|FAILED", "oom", "oom"),  # the run knows better
        ("", "100|OUT_OF_MEMORY", "fail", "oom"),
        ("", "100|TIMEOUT", None, "timeout"),
        ("", "100|CANCELLED by 1000", "fail", "stopped"),
        ("", "100|NODE_FAIL", "finished", "finished"),
        ("", "", "stopped", "stopped"),  # no accounting
        ("", "999|FAILED\nrubbish", None, "new"),
    ],
)
def test_states(
    squeue: str, sacct: str, note: str | None, state: str, folder: Path, slurm: Path, tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (folder / "deep" / "b.toml").unlink()
    assert main(["submit", str(folder)]) == 0
    (slurm / "squeue").write_text(squeue + "\n", encoding="utf-8")
    (slurm / "sacct").write_text(sacct + "\n", encoding="utf-8")
    if note is not None:
        _note(tmp_path / "runs" / "a", note)
        (tmp_path / "runs" / "a" / "checkpoints" / "step-00000020").mkdir(parents=True)
    capsys.readouterr()
    assert main(["submit", str(folder), "--status"]) == 0
    head, row = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "state", "job", "nodes", "step", "file"]
    assert row.split()[2:4] == [state, "100"]
    assert "--jobs=100" in (slurm / "asked").read_text(encoding="utf-8")


def test_a_finished_run_whose_file_asks_for_more_goes_on(
    folder: Path, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "deep" / "b.toml").unlink()
    run = tmp_path / "runs" / "a"
    (run / "checkpoints" / "step-00000020").mkdir(parents=True)
    _note(run, "finished")
    assert main(["submit", str(folder)]) == 0
    assert _handed_in(slurm) == {}
    (run / "checkpoints" / "step-00000020").rename(run / "checkpoints" / "step-00000019")
    assert main(["submit", str(folder), "--status"]) == 0
    assert "its file now says 20 steps" in capsys.readouterr().out
    assert main(["submit", str(folder)]) == 0
    assert len(_handed_in(slurm)) == 1


def test_only_what_went_wrong(folder: Path, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", str(folder), "--gpus-per-node", "4"]) == 0
    (slurm / "sacct").write_text("100|FAILED\n101|TIMEOUT\n", encoding="utf-8")
    assert main(["submit", str(folder), "--gpus-per-node", "4"]) == 0  # not by itself
    assert len(_handed_in(slurm)) == 2
    assert main(["submit", str(folder), "--gpus-per-node", "4", "--only", "timeout", "oom"]) == 0
    out = capsys.readouterr().out
    assert "passed over a b" in out
    assert "handed in   b" in out
    assert len(_handed_in(slurm)) == 3
    lines = (tmp_path / "runs" / "b" / "slurm" / "jobs.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["job"] for line in lines] == ["101", "102"]
    (slurm / "sacct").write_text("101|TIMEOUT\n102|OUT_OF_MEMORY\n", encoding="utf-8")
    capsys.readouterr()
    assert main(["submit", str(folder), "--status", "--gpus-per-node", "4"]) == 0
    assert "b    oom" in capsys.readouterr().out


def test_files_that_are_no_runs_are_told_and_passed_over(
    folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "pyproject.toml").write_text("[project]\nname = 'x'\n", encoding="utf-8")
    text = (folder / "a.toml").read_text(encoding="utf-8")
    wrong = text.replace("runs/a", "runs/w").replace("tp = 1\n", "tp = 5\n")
    (folder / "wrong.toml").write_text(wrong, encoding="utf-8")
    assert main(["submit", str(folder), "--gpus-per-node", "10"]) == 0
    out = capsys.readouterr().out
    assert "passed over pyproject.toml" in out
    assert "2 attention heads do not divide over tp 5" in out  # before it waits for its turn
    assert len(_handed_in(slurm)) == 2
    for name in ("a.toml", "wrong.toml", "deep/b.toml"):
        (folder / name).unlink()
    assert main(["submit", str(folder)]) == 2


def test_a_template_of_ones_own(folder: Path, slurm: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["submit", "--print-template"]) == 0
    assert capsys.readouterr().out == default_template()
    own = tmp_path / "own.sh"
    own.write_text(
        '#!/bin/bash\n#SBATCH -N {{nodes}}\necho "${HOME} $((1+1))" {{{{ {{name}}\n{{command}}\n', encoding="utf-8"
    )
    assert main(["submit", str(folder), "--template", str(own)]) == 0
    script = (tmp_path / "runs" / "a" / "slurm" / "job.sh").read_text(encoding="utf-8")
    assert script.startswith('#!/bin/bash\n#SBATCH -N 1\necho "${HOME} $((1+1))" {{{{ a_b\n')
    own.write_text("{{gpus}}", encoding="utf-8")
    assert main(["submit", str(folder), "--template", str(own), "--only", "new"]) == 2
    assert "the template names {{gpus}}; there is: name, nodes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--only", "running"], "--only is 'running'; it must be one of new, stopped"),
        (["--chain", "0"], "--chain is 0; it must be at least 1"),
        (["--partition", "a b"], "--partition is 'a b'; it must be one word"),
        (["--sbatch=-x"], "--sbatch is '-x'; it must be an option"),
        (["--template", "nowhere"], "--template nowhere cannot be read"),
    ],
)
def test_mistakes(
    flags: list[str], message: str, folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        status = main(["submit", str(folder), *flags])
    except SystemExit as error:  # tyro's own way out
        status = int(str(error.code))
    assert status == 2
    assert message in " ".join(capsys.readouterr().err.replace("│", " ").split())
    assert _handed_in(slurm) == {}


def test_what_slurm_refuses_and_where_there_is_none(
    folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (slurm / "refuse").touch()
    assert main(["submit", str(folder)]) == 1
    assert "llama-train: sbatch: sbatch: error: Invalid account" in capsys.readouterr().err
    assert not (tmp_path / "runs" / "a" / "slurm" / "jobs.jsonl").exists()
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["submit", str(folder)]) == 1
    assert "there is no sbatch here" in capsys.readouterr().err
    assert main(["submit", str(folder), "--status"]) == 0
    assert "new" in capsys.readouterr().out


def test_two_files_of_one_run_are_refused(folder: Path, slurm: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "z.toml").write_text((folder / "a.toml").read_text(encoding="utf-8"), encoding="utf-8")
    assert main(["submit", str(folder)]) == 2
    assert "have one run folder, runs/a" in capsys.readouterr().err


def test_nodes(tiny: TrainConfig, change: Callable[..., TrainConfig]) -> None:
    def nodes(cluster: Cluster, **sizes: int) -> tuple[int, int]:
        size = size_of(change(tiny, **{f"parallel.{key}": value for key, value in sizes.items()}), cluster)
        return size.nodes, size.per_node

    assert nodes(Cluster(), dp_shard=4) == (1, 4)
    assert nodes(Cluster(), dp_shard=4, tp=8) == (4, 8)
    assert nodes(Cluster(), dp_shard=12) == (2, 6)
    assert nodes(Cluster(nodes=3), tp=2) == (3, 8)  # an open dp_shard takes all there are
    with pytest.raises(ValueError, match=r"12 processes .* do not divide over 1 nodes of 8 GPUs"):
        nodes(Cluster(nodes=1), dp_shard=12)
    with pytest.raises(ValueError, match="do not divide"):
        nodes(Cluster(), tp=3)
    assert options_of({"qos": None, "account": "a"}, ["--mem=0"]) == ("--account=a", "--mem=0")


# srun starts as many tasks as the environment says, and scancel signals each of them and nothing that they start.
SRUN = """#!/bin/bash
shift
for ((task = 0; task < STAND_IN_TASKS; task++)); do
  SLURM_PROCID=$task SLURM_LOCALID=$task "$@" &
  echo $! >> "$SLURM_STAND_IN/tasks"
done
status=0
for task in $(cat "$SLURM_STAND_IN/tasks"); do wait "$task" || status=$?; done
exit $status
"""
STAND_INS = {
    "scancel": '#!/bin/sh\n[ "$1" = --signal=USR1 ] && kill -USR1 $(cat "$SLURM_STAND_IN/tasks")\n',
    "scontrol": '#!/bin/sh\n[ "$1" = show ] && echo localhost || echo "$@" >> "$SLURM_STAND_IN/scontrol"\n',
    "srun": SRUN,
}


def test_a_job_that_nears_its_limit_saves_and_goes_back_into_the_queue(
    tiny: TrainConfig, slurm: Path, tmp_path: Path, change: Callable[..., TrainConfig]
) -> None:
    """The rendered script under bash, two processes: the shell is signalled, as Slurm does shortly before the limit."""
    for name, text in STAND_INS.items():
        _program(tmp_path / "bin" / name, text)
    config = change(tiny, **{"parallel.dp_shard": 2, "schedule.steps": 100_000})
    file = tmp_path / "long run.toml"
    file.write_text(dump_config(config), encoding="utf-8")
    script = tmp_path / "job.sh"
    script.write_text(render(default_template(), job_fields(config, file, Cluster())), encoding="utf-8")
    job_id = str(os.getpid())  # which fixes the port where the processes meet
    environment = {**os.environ, "SLURM_JOB_ID": job_id, "SLURM_JOB_NODELIST": "n1", "STAND_IN_TASKS": "2"}
    output = tmp_path / "output"
    with output.open("w") as out, subprocess.Popen(["bash", script], env=environment, stdout=out, stderr=out) as job:
        metrics = tmp_path / "run" / "metrics.jsonl"
        deadline = time.monotonic() + 120
        while not (metrics.is_file() and '"step"' in metrics.read_text(encoding="utf-8")):
            assert job.poll() is None, output.read_text(encoding="utf-8")
            assert time.monotonic() < deadline
            time.sleep(0.1)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(timeout=120) == 0
    assert "stopped    by SIGUSR1" in output.read_text(encoding="utf-8")
    assert (slurm / "scontrol").read_text(encoding="utf-8") == f"requeue {job_id}\n"
    assert json.loads((tmp_path / "run" / "outcome.json").read_text(encoding="utf-8"))["state"] == "stopped"
    assert list((tmp_path / "run" / "checkpoints").glob("step-*"))


def test_later_links_and_failures(
    tiny: TrainConfig, slurm: Path, tmp_path: Path, change: Callable[..., TrainConfig]
) -> None:
    """A link whose run has finished does nothing; a run that fails ends its job with its status, without a requeue."""
    for name, text in STAND_INS.items():
        _program(tmp_path / "bin" / name, text)
    config = change(tiny, **{"parallel.dp_shard": 1})
    values = job_fields(config, tmp_path / "none.toml", Cluster())
    script = tmp_path / "job.sh"
    script.write_text(render(default_template(), {**values, "command": "sh -c 'exit 3'"}), encoding="utf-8")
    environment = {**os.environ, "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n1", "STAND_IN_TASKS": "1"}

    def run(link: str) -> tuple[int, str]:
        (slurm / "tasks").unlink(missing_ok=True)
        done = subprocess.run(["bash", script, link], env=environment, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout

    (tmp_path / "run").mkdir()
    assert run("2") == (3, "")
    (tmp_path / "run" / "outcome.json").write_text('{"state": "finished"}', encoding="utf-8")
    assert run("1") == (3, "")
    assert run("2") == (0, "the run has finished\n")
    assert not (slurm / "scontrol").exists()
