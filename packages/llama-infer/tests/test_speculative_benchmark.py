"""benchmarks/speculative.py, rehearsed on a CPU, so that it doesn't fail on a machine that is hard to come by."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[3] / "benchmarks" / "speculative.py"


@pytest.mark.slow
def test_rehearsal() -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, str(BENCHMARK), "--tiny", "--guesses", "3", "--acceptance", "1", "--batches", "2"]
    out = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert re.search(r"batch 2 \| no draft \| [\d.]+ tokens/s", out)
    assert "100% of guesses stood" in out
