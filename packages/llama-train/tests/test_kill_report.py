"""Thirty kills while saving; conftest prints the report at the end of the session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

PROGRAM = Path(__file__).with_name("kill_report.py")


@pytest.mark.parametrize(("kills", "processes"), [(24, 1), (6, 2)])
def test_a_kill_costs_the_steps_since_the_last_complete_checkpoint(
    kills: int, processes: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    command = [sys.executable, PROGRAM, tmp_path, "--kills", kills, "--processes", processes]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    result = subprocess.run(
        list(map(str, command)), check=False, capture_output=True, text=True, env=environment, timeout=600
    )
    record_property("kill report", result.stdout)
    assert result.returncode == 0, result.stdout + result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[:2] for line in lines[:-1]] == [["kill", str(number)] for number in range(1, kills + 1)]
    assert sum("writing step-" in line for line in lines) >= kills // 3  # the others came just after one
    assert "undisturbed run: yes" in lines[-1]
