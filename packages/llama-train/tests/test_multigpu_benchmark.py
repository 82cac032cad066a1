"""benchmarks/multigpu.py, which is run on machines that are hard to come by, must not find out there that it is broken.

Here because this package's environment has all that the benchmark uses.
"""

from __future__ import annotations

import os
import re
import time
from pathlib import Path

import pytest

from llama_parallel import check_layout

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"
pytestmark = pytest.mark.skipif(not BENCHMARKS.exists(), reason="the package without its workspace")


@pytest.fixture(autouse=True)
def _path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCHMARKS))


def test_time_is_arithmetic_or_lone_communication_or_nothing() -> None:
    from multigpu_shares import Kernel, shares_of, top_kernels, union

    assert union([(5, 7), (0, 2), (1, 3), (3, 4)]) == [(0, 4), (5, 7)]
    kernels = [
        Kernel("gemm", 0, 40),
        Kernel("ncclDevKernel_AllReduce_Sum_bf16", 30, 60),  # 10 hidden, 20 alone
        Kernel("elementwise", 70, 80),
        Kernel("Memcpy DtoD (Device -> Device)", 75, 90),
        Kernel("ncclDevKernel_SendRecv", 95, 100),
    ]
    shares = shares_of(kernels)
    assert shares is not None
    assert (shares.compute, shares.exposed, shares.communication) == pytest.approx((0.6, 0.25, 0.35))
    assert shares.idle == pytest.approx(0.15)
    assert shares_of([]) is None
    table = top_kernels([*kernels, Kernel("gemm", 100, 160)])
    assert table.splitlines()[0].startswith("6 kernels")
    assert "| gemm | 2 | 0.00 | 0.1 | 62.5 |" in table


@pytest.mark.parametrize("gpus", [1, 2, 4, 8])
def test_every_work_and_case_fits_its_gpus(gpus: int) -> None:
    from multigpu_parity import MODEL, cases, task
    from multigpu_works import works

    found = works(gpus)
    assert len({work.name for work in found}) == len(found)
    names = {work.name for work in found}
    for work in found:
        assert work.gpus in (1, gpus), work.name
        assert work.baseline is None or work.baseline in names, work.name
        for one in (work, work.tiny()):
            batch = one.layout.dp * one.accumulation * one.rows
            assert one.tokens == batch * one.length
            check_layout(
                one.layout, one.model, sequence_length=one.length, global_batch=batch, context=one.plan.context,
                schedule=one.plan.schedule, micro_batches=one.accumulation,
            )  # fmt: skip
    for case in cases(gpus):
        assert case.layout.num_processes == gpus, case.name
        job = task(case, gpus)
        check_layout(
            case.layout, MODEL, sequence_length=job.tokens.shape[-1], global_batch=job.tokens.shape[1],
            context=case.plan.context, schedule=case.plan.schedule, micro_batches=job.accumulation,
            sequence_parallel=case.plan.sequence_parallel,
        )  # fmt: skip


def test_utilisation_is_the_published_one() -> None:
    """picotron's own log of this shape: 41,853 tokens/s are 51.1%."""
    from multigpu_report import PEAK, flops_of
    from multigpu_works import SMOL

    whole, standard = flops_of(SMOL, 2048)
    assert 41853 * whole / PEAK == pytest.approx(0.511, abs=5e-4)
    layers, width, vocab = 24, 2048, 49152
    of_layer = 4 * width * width + 3 * width * 8192 + 2 * width
    products = 6 * (layers * of_layer + width + vocab * width)
    assert standard == products + 6 * layers * width * 2048


def test_a_rank_that_fails_or_hangs_costs_its_own_work_only() -> None:
    from multigpu_jobs import Rank, run_job

    def fails(rank: Rank) -> None:
        rank.say(os.getpid())
        if rank.number == 1:
            raise RuntimeError("out of everything")
        time.sleep(60)

    def hangs(rank: Rank) -> None:
        rank.say(os.getpid())
        time.sleep(60)

    def dies(rank: Rank) -> None:
        os._exit(3)

    begun = time.monotonic()
    failed = run_job(fails, 2, (), device="cpu", timeout=30, method="fork")
    assert failed.reason == "RuntimeError: out of everything"
    hung = run_job(hangs, 1, (), device="cpu", timeout=4, method="fork")
    assert "TimeoutError: ranks [0]" in hung.reason
    assert hung.error is not None
    assert "in hangs" in hung.error  # where it stands
    assert "exit code 3" in run_job(dies, 1, (), device="cpu", timeout=30, method="fork").reason
    for said in (*failed.said, *hung.said):
        with pytest.raises(ProcessLookupError):
            os.kill(said[0], 0)
    assert time.monotonic() - begun < 25


# Slow: its forked ranks run torch's profiler, and in one of some twenty runs on loaded cores one of them died (-11).
@pytest.mark.slow
def test_rehearsal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import multigpu

    words = ["--out", str(tmp_path), "--device", "cpu", "--gpus", "2", "--quick", "--seconds", "0.01"]
    only = ["--only", "links,parity tp 2,one,tp2,pp2 zero,decode tp2", "--skip", "one 8k", "--profile", "tp2"]
    assert multigpu.main([*words, *only]) == 0
    text = (tmp_path / "tables.md").read_text()
    assert re.search(r"^\| tp 2 \| \S+e-1\d \|.*\| equal \|$", text, re.MULTILINE)
    losses = dict(re.findall(r"^\| (one|tp2|pp2 zero_bubble) \|.* \| (\d\.\d{3}) \| – \|$", text, re.MULTILINE))
    assert len(losses) == 3
    assert len(set(losses.values())) == 1  # the same weights and tokens on every layout
    assert re.search(r"^\| all-gather \| 16,384 \|", text, re.MULTILINE)
    assert re.search(r"^\| decode tp2 \| 3 \|", text, re.MULTILINE)
    assert "aten::mm" in (tmp_path / "profile-tp2-rank0.txt").read_text()
    assert "0 wrong or failed" in capsys.readouterr().out
