"""benchmarks/train.py, which is run on machines that are hard to come by, must not find out there that it is broken."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the package without its workspace")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_every_program_of_a_group_trains_the_same_random_tokens() -> None:
    """Tiny shapes on this CPU; nothing compiled, and rivals where they are installed."""
    from train_works import WORKS, run_group

    said: list[tuple[str, object]] = []
    compiled = [work.who for work in WORKS["smol"] if "compiled" in work.who]
    run_group("smol", 0.0, True, False, compiled, lambda kind, value: said.append((kind, value)))
    steps = [value for kind, value in said if kind == "step"]
    assert len(said) == len(WORKS["smol"]) - len(compiled)
    failed = [str(value) for kind, value in said if kind == "failed"]
    assert all("No module named" in text for text in failed), failed
    ours = steps[0]
    assert isinstance(ours, dict)
    assert ours["who"] == "ours"
    for step in steps:
        assert isinstance(step, dict)
        # The loss of fresh weights over a vocabulary of 512, ln 512 = 6.24, however they were drawn.
        assert step["loss"] == pytest.approx(6.24, abs=0.3), step["who"]
        assert step["speed"] > 0


def test_the_table_has_ratios_to_our_own_step() -> None:
    from train import report

    def step(who: str, speed: float, peak: float) -> dict[str, object]:
        value = {"work": "w", "who": who, "seconds": 0.5, "speed": speed, "peak": peak, "mfu": 0.6}
        return {"group": "smol", "kind": "step", "value": {**value, "mfu_torchtitan": 0.5}}

    results = [step("ours", 1000.0, 4e9), step("other", 800.0, 5e9)]
    results += [{"group": "loop", "kind": "loop", "value": {"loop over bare": "+0.10%"}}]
    results += [{"group": "smol", "kind": "failed", "value": "w, third: ImportError: no"}]
    text = report(results, 12.0)
    assert "| w | ours | 500.0 | 1,000 | 60.0 | 50.0 | 4.0 | 1.000 | 1.000 |" in text
    assert "| w | other | 500.0 | 800 | 60.0 | 50.0 | 5.0 | 0.800 | 1.250 |" in text
    assert "| loop over bare | +0.10% |" in text
    assert text.endswith("failed: w, third: ImportError: no")
