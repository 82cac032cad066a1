"""What is said of a schedule is true of the one that torch runs."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.pipelining import PipelineStage
from torch.testing._internal.distributed.fake_pg import FakeStore

from llama_parallel import bubble
from llama_parallel.schedules import SCHEDULES, micro_batch_faults, stages_of_rank, torch_schedule
from llama_parallel.testing import run_ranks

_LENGTH = {"F": 1, "B": 2, "I": 1, "W": 1}


Actions = list[tuple[int, str, int]]
"""Stage, F(orward), B(ackward), I (its part for the input) or W (for weights), micro-batch; in order."""


def single(name: str, pp: int, count: int) -> dict[int, Actions]:
    """What torch's GPipe and 1F1B do; their own tables are for drawings, and leave out micro-batch 0 (torch 2.11)."""
    order = {}
    for rank in range(pp):
        full = count if name == "gpipe" else min(count, pp - rank)
        order[rank] = [(rank, "F", number) for number in range(full)]
        for number in range(count):
            order[rank].append((rank, "B", number))
            if full + number < count:
                order[rank].append((rank, "F", full + number))
    return order


def idle(todo: dict[int, Actions], stages: int) -> float:
    """Play a table of actions with free communication; the share of time in which ranks wait."""
    done: dict[tuple[int, str, int], float] = {}
    clock = dict.fromkeys(todo, 0.0)
    total = sum(_LENGTH[kind] for actions in todo.values() for _, kind, _ in actions)

    def needs(stage: int, kind: str, number: int) -> Iterator[tuple[int, str, int]]:
        if kind == "F" and stage > 0:
            yield stage - 1, "F", number
        if kind == "B":
            yield (stage + 1, "B", number) if stage < stages - 1 else (stage, "F", number)

    while any(todo.values()):
        left = sum(map(len, todo.values()))
        for rank, actions in todo.items():
            while actions:
                stage, kind, number = actions[0]
                name = "B" if kind == "I" else kind
                before = list(needs(stage, name, number))
                if any(need not in done for need in before):
                    break
                clock[rank] = max([clock[rank], *(done[need] for need in before)]) + _LENGTH[kind]
                done[stage, name, number] = clock[rank]
                actions.pop(0)
        assert sum(map(len, todo.values())) < left, todo
    return 1 - total / (max(clock.values()) * len(todo))


def tables(rank: int, pp: int) -> list[tuple[str, int, int, Any]]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=pp)
    found = []
    for name in SCHEDULES:
        for virtual in (1, 2) if name in ("interleaved_1f1b", "zero_bubble") else (1,):
            for count in range(1, 4 * pp + 1):
                meta = torch.device("cpu")
                stages = [
                    PipelineStage(torch.nn.Identity(), index, pp * virtual, meta)
                    for index in range(0, pp * virtual, pp)
                ]
                try:
                    made = torch_schedule(name, stages, count, lambda hidden, target: hidden)
                except ValueError as error:
                    found.append((name, virtual, count, str(error)))
                else:
                    order = single(name, pp, count)
                    if name in ("interleaved_1f1b", "zero_bubble"):
                        order = {
                            at: [(a[0], a[1].value, a[2]) for a in actions if a is not None]
                            for at, actions in made.pipeline_order.items()
                        }
                    found.append((name, virtual, count, idle(order, pp * virtual)))
    return found


@pytest.mark.parametrize("pp", [2, 4])
def test_bubbles_and_faults_are_those_of_torchs_schedules(pp: int) -> None:
    (found,) = run_ranks(tables, 1, pp, backend=None)
    for name, virtual, count, result in found:
        faults = list(micro_batch_faults(name, pp, count))
        if faults:
            assert result == faults[0]
            continue
        assert isinstance(result, float), (name, count, result)
        told = bubble(name, pp, count, virtual=virtual)
        if count >= (2 * pp if name == "zero_bubble" else pp) and count % pp == 0:
            assert result == pytest.approx(told), (name, virtual, count)
        else:
            assert result >= told - 1e-9, (name, virtual, count)


def test_more_micro_batches_and_stages_leave_less_idle() -> None:
    assert bubble("1f1b", 4, 12) == pytest.approx(3 / 15)
    assert bubble("interleaved_1f1b", 4, 12, virtual=2) == pytest.approx(3 / 27)
    assert bubble("zero_bubble", 4, 12) == pytest.approx(1 / 13)
    assert [bubble(name, 1, 3) for name in SCHEDULES] == [0, 0, 0, 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("afab", 2, 2), "schedule = 'afab': must be one of gpipe, 1f1b, interleaved_1f1b, zero_bubble"),
        (("1f1b", 0, 2), "pp = 0: must be at least 1"),
        (("1f1b", 2, 0), "micro_batches = 0: must be at least 1"),
    ],
)
def test_nonsense_is_refused(arguments: tuple[str, int, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        bubble(*arguments)


def test_stages_of_a_rank() -> None:
    assert [stages_of_rank(name, None) for name in SCHEDULES] == [1, 1, 2, 1]
    assert stages_of_rank("zero_bubble", 3) == 3
    with pytest.raises(ValueError, match="virtual_stages = 2: gpipe has one stage on each rank"):
        stages_of_rank("gpipe", 2)
    with pytest.raises(ValueError, match="virtual_stages = 0"):
        stages_of_rank("interleaved_1f1b", 0)
