"""What a run's metrics.jsonl tells, through resumes, cuts and damage."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from llama_train.manage.history import History, read_history, thin


def _line(step: int, loss: float = 1.0, kind: str = "train", **more: object) -> str:
    return json.dumps(
        {"kind": kind, "step": step, "loss": loss, "tokens": step * 100, "tokens_per_second": 50.0, **more}
    )


def _write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_later_lines_take_the_place_of_a_past_that_did_not_last(tmp_path: Path) -> None:
    """Steps 1 to 9 by threes, an evaluation; back to 4 with another spacing: 6 and 9 are gone, as is the evaluation."""
    first = [_line(3, 3.0), _line(6, 2.9), _line(6, 2.8, "held_out"), _line(9, 2.7)]
    history = read_history(_write(tmp_path / "m", *first, _line(5, 2.5), _line(7, 2.4), _line(7, 2.3, "held_out")))
    assert history.curve("loss") == [(3, 3.0), (5, 2.5), (7, 2.4)]
    assert history.curve("held_out") == [(7, 2.3)]
    assert history.last_step == 7
    assert history.damaged == 0


def test_damage_is_counted_and_passed_over(tmp_path: Path) -> None:
    bad = [
        "{",
        "[1]",
        '"x"',
        '{"kind": "train"}',
        '{"kind": "train", "step": "3"}',
        '{"a": ' * 3000,
        "\0\0\0",
        "",
        "nö",
    ]
    path = _write(tmp_path / "m", _line(1), *bad, _line(2, float("nan")), _line(3, grad_norm=None), _line(4)[:-9])
    history = read_history(path)
    assert [record["step"] for record in history.train] == [1, 2, 3]
    assert history.damaged == 8  # zeros and an empty line are no lines
    assert history.curve("loss") == [(1, 1.0), (3, 1.0)]  # NaN has no place in a picture
    assert history.curve("grad_norm") == []


def test_other_kinds_of_lines_are_not_training(tmp_path: Path) -> None:
    history = read_history(_write(tmp_path / "m", _line(1), json.dumps({"kind": "nonfinite", "step": 2})))
    assert history.last_step == 1
    assert history.damaged == 0


def test_nothing_there(tmp_path: Path) -> None:
    assert read_history(tmp_path / "none") == History()
    assert read_history(_write(tmp_path / "m", "")).seconds == ()
    with pytest.raises(ValueError, match="cannot be read"):
        read_history(tmp_path)


def test_time_and_places_between_lines(tmp_path: Path) -> None:
    """100 tokens a step; at 50/s two seconds a step; then 100/s."""
    history = read_history(_write(tmp_path / "m", _line(1), _line(3), _line(5, tokens_per_second=100.0)))
    assert history.seconds == (2.0, 6.0, 8.0)
    assert history.positions("tokens") == (100, 300, 500)
    assert history.place(2, "time") == 4.0
    assert history.place(4, "time") == 7.0
    assert history.place(4, "tokens") == 400.0
    assert history.place(4, "steps") == 4
    assert History().place(4, "time") == 4


def test_thinning_keeps_extremes_and_both_ends() -> None:
    points = [(float(x), 0.0) for x in range(10_000)]
    points[1234] = (1234.0, 9.0)
    points[7777] = (7777.0, -9.0)
    kept = thin(points, 200)
    assert len(kept) <= 201
    assert kept[-1] == points[-1]
    assert {(1234.0, 9.0), (7777.0, -9.0)} <= set(kept)
    assert kept == sorted(kept)
    assert thin(points[:5], 200) == points[:5]
