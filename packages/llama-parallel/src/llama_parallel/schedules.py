"""Pipeline schedules by name: what each needs, what it leaves idle, and torch's class that runs it.

| name               | order                                              | a rank holds activations of          |
|--------------------|----------------------------------------------------|--------------------------------------|
| `gpipe`            | all forwards, then all backwards (AFAB)             | all micro-batches                    |
| `1f1b`             | one forward, one backward, once the pipeline is full | as many as stages follow             |
| `interleaved_1f1b` | the same over v smaller stages on each rank         | somewhat more                        |
| `zero_bubble`      | gradients of weights wait until a rank would idle   | as 1f1b, and inputs of those products |

GPipe: Huang et al. 2018 (https://arxiv.org/abs/1811.06965). 1F1B and interleaving: Narayanan et al. 2021
(https://arxiv.org/abs/2104.04473). Zero bubble, the schedule ZB-H1: Qi et al. 2023 (https://arxiv.org/abs/2401.10241).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch.distributed.pipelining import PipelineStage

SCHEDULES = ("gpipe", "1f1b", "interleaved_1f1b", "zero_bubble")
_SINGLE = ("gpipe", "1f1b")


def bubble(schedule: str, pp: int, micro_batches: int, *, virtual: int = 1) -> float:
    """The share of a step in which a rank waits for others: 0 for no pipeline.

    With equal stages, free communication, and a backward pass of twice the forward's time, half of it for the
    gradients of weights. Exact for multiples of pp (zero_bubble: from 2 pp on); other numbers leave more idle.

    Args:
        schedule: one of `SCHEDULES`.
        pp: ranks of the pipeline.
        micro_batches: of one step.
        virtual: stages of each rank.

    Raises:
        ValueError: an unknown schedule, or sizes below 1.
    """
    check_schedule(schedule, virtual)
    for name, value in (("pp", pp), ("micro_batches", micro_batches)):
        if value < 1:
            raise ValueError(f"{name} = {value}: must be at least 1")
    # In units of a stage's time for one micro-batch, both ways: v · m of work, pp - 1 of waiting. Putting off products
    # for weights, a third of the work, fills two thirds of the waiting (Qi et al., table 1: F + B - W each).
    waiting = (pp - 1) / (3 if schedule == "zero_bubble" else 1)
    return waiting / (virtual * micro_batches + waiting)


def stages_of_rank(schedule: str, wanted: int | None) -> int:
    """Stages of each rank: what is wanted, or by default 2 where the schedule is made for several, else 1."""
    check_schedule(schedule)
    virtual = (2 if schedule == "interleaved_1f1b" else 1) if wanted is None else wanted
    check_schedule(schedule, virtual)
    return virtual


def check_schedule(schedule: str, virtual: int | None = None) -> None:
    """ValueError for an unknown schedule, or one that does not go with so many stages on each rank."""
    if schedule not in SCHEDULES:
        raise ValueError(f"schedule = {schedule!r}: must be one of {', '.join(SCHEDULES)}")
    if virtual is not None and virtual < 1:
        raise ValueError(f"virtual_stages = {virtual}: must be at least 1")
    if virtual is not None and virtual > 1 and schedule in _SINGLE:
        raise ValueError(f"virtual_stages = {virtual}: {schedule} has one stage on each rank")


def micro_batch_faults(schedule: str, pp: int, micro_batches: int) -> Iterator[str]:
    """Why a step of so many micro-batches cannot run; nothing if it can."""
    if schedule in _SINGLE or pp == 1:
        return  # fewer micro-batches than stages are slow, not wrong
    rounds = max(1, micro_batches // pp)
    if micro_batches % rounds:
        near = [n for n in range(max(1, micro_batches - pp), micro_batches + pp) if n % max(1, n // pp) == 0]
        below = max(n for n in near if n < micro_batches)
        above = min((n for n in near if n > micro_batches), default=micro_batches // pp * pp + pp)
        yield (
            f"{schedule} over pp {pp} cannot run {micro_batches} micro-batches: they do not divide into {rounds} "
            f"rounds; {below} or {above} do"
        )


def torch_schedule(name: str, stages: Sequence[PipelineStage], micro_batches: int, loss: Callable[..., Any]) -> Any:
    """torch's schedule of this name for the stages of this rank. It scales nothing: the loss has its one divisor.

    Raises:
        ValueError: a number of micro-batches that the schedule cannot run.
    """
    from torch.distributed import pipelining  # takes a second to import, and names and bubbles are asked for without

    options: dict[str, Any] = {"n_microbatches": micro_batches, "loss_fn": loss, "scale_grads": False}
    faults = list(micro_batch_faults(name, stages[0].group_size, micro_batches))
    if faults:
        raise ValueError(faults[0])
    if name == "zero_bubble":
        return pipelining.ScheduleInterleavedZeroBubble(list(stages), **options)
    if name == "interleaved_1f1b":
        return pipelining.ScheduleInterleaved1F1B(list(stages), **options)
    (stage,) = stages
    # With fewer micro-batches than stages, 1F1B has no steady phase: it is GPipe, and torch refuses the name.
    if name == "gpipe" or micro_batches < stage.num_stages:
        return pipelining.ScheduleGPipe(stage, **options)
    return pipelining.Schedule1F1B(stage, **options)
