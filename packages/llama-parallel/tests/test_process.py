import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from llama_parallel import Process, read_process


def test_without_torchrun_there_is_one_process() -> None:
    process = read_process({"HOME": "/home/someone"})
    assert process == Process(rank=0, world_size=1, local_rank=0)
    assert process.is_main


def test_reads_torchruns_variables() -> None:
    process = read_process({"RANK": "13", "WORLD_SIZE": "16", "LOCAL_RANK": "5"})
    assert process == Process(rank=13, world_size=16, local_rank=5)
    assert not process.is_main


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_incomplete_environment_is_refused(missing: str) -> None:
    environ = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0"}
    del environ[missing]
    with pytest.raises(ValueError, match=f"without {missing}: "):
        read_process(environ)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"RANK": "zero"}, r"RANK = 'zero': must be a whole number"),
        ({"WORLD_SIZE": ""}, r"WORLD_SIZE = '': must be a whole number"),
        ({"LOCAL_RANK": "1.5"}, r"LOCAL_RANK = '1.5': must be a whole number"),
        ({"WORLD_SIZE": "0"}, r"world_size = 0: must be at least 1"),
        ({"RANK": "4"}, r"rank = 4: must be from 0 to 3"),
        ({"RANK": "-1"}, r"rank = -1: must be from 0 to 3"),
        ({"LOCAL_RANK": "3"}, r"local_rank = 3: must be from 0 to rank 2"),
        ({"LOCAL_RANK": "-1"}, r"local_rank = -1: must be from 0 to rank 2"),
    ],
)
def test_impossible_environment_is_refused(changed: dict[str, str], message: str) -> None:
    environ = {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}
    with pytest.raises(ValueError, match=message):
        read_process(environ | changed)


def test_real_torchrun_numbers_every_process(tmp_path: Path) -> None:
    script = tmp_path / "who.py"
    script.write_text(
        "import dataclasses, json, os, pathlib, sys\n"
        "from llama_parallel import read_process\n"
        "process = read_process(os.environ)\n"
        "out = pathlib.Path(sys.argv[1]) / f'{process.rank}.json'\n"
        "out.write_text(json.dumps(dataclasses.asdict(process)))\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    environ = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    subprocess.run([*command, str(script), str(tmp_path)], check=True, env=environ, timeout=120)
    found = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in (0, 1)]
    assert found == [{"rank": rank, "world_size": 2, "local_rank": rank} for rank in (0, 1)]
