"""`llama-train submit FOLDER`: runs as jobs of a Slurm cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro

from .config_checks import require

if TYPE_CHECKING:
    from .manage.jobs import Job

_EXAMPLES = """
A job runs in the current directory and goes on from the run's newest checkpoint. Before its time limit it is told to
save, and puts itself back into the queue (--requeue). Where that is not allowed, --chain hands in several jobs at once,
each waiting for the one before. Scripts and outputs lie in RUN/slurm.

Examples:
  llama-train submit experiments --dry-run                  print the scripts, hand in nothing
  llama-train submit experiments --partition gpu --account mine --time 24:00:00
  llama-train submit experiments --status                   a table of states
  llama-train submit experiments --only fail oom timeout    once more what went wrong
  llama-train submit experiments --chain 5 --no-requeue     a run of five days on a one-day partition
  llama-train submit --print-template > job.sh              change it, then --template job.sh
"""


@dataclass(frozen=True)
class SubmitConfig:
    """Hand in a Slurm job for every run that has a TOML file at or below a folder.

    Runs that are new, or were stopped and saved, are handed in; those that wait, run or have finished never are.
    """

    folder: Annotated[str, tyro.conf.Positional] = ""
    """Where the TOML files lie."""
    dry_run: bool = False
    """Print the job scripts and hand in nothing."""
    status: bool = False
    """Print a table of all runs and hand in nothing."""
    only: tuple[str, ...] = ()
    """Hand in runs of these states: new, stopped, fail, oom, timeout; unset means new and stopped."""
    gpus_per_node: int = 8
    """GPUs of a node, each of which gets a process; with device = "cpu" processes of a node."""
    nodes: int | None = None
    """Nodes of a run that leaves parallel.dp_shard open; unset means one, and otherwise what the layout takes."""
    time: str = "24:00:00"
    """Time limit of a job, as sbatch reads it."""
    partition: str | None = None
    """Of the cluster."""
    account: str | None = None
    """Which pays."""
    qos: str | None = None
    """Quality of service."""
    cpus_per_process: int | None = None
    """Cores of a process, which are also its threads; unset leaves that to the cluster, with one thread."""
    sbatch: Annotated[tuple[str, ...], tyro.conf.UseAppendAction] = ()
    """One more option for sbatch: --sbatch=--constraint=h100; may be repeated."""
    chain: int = 1
    """Jobs of each run, each to begin when the one before has ended."""
    requeue: bool = True
    """Whether a job that nears its limit goes back into the queue."""
    signal_before: int = 300
    """Seconds before the limit at which the run is told to save; a save must fit."""
    template: str | None = None
    """A job script of your own, with {{fields}} as in the one that --print-template prints."""
    print_template: bool = False
    """Print the template of a job script."""

    def __post_init__(self) -> None:
        for name in ("gpus_per_node", "nodes", "chain", "signal_before", "cpus_per_process"):
            value = getattr(self, name)
            require(value is None or value >= 1, f"--{name.replace('_', '-')}", value, "at least 1")
        for name in ("time", "partition", "account", "qos"):
            value = getattr(self, name)
            fine = value is None or (bool(value) and not set(value) & set(" \t\r\n'\""))
            require(fine, f"--{name}", value, "one word")
        require(bool(self.folder) or self.print_template, "the folder", self.folder, "given: llama-train submit FOLDER")


def main(arguments: list[str]) -> int:
    """Hand in, print or show; the exit status."""
    description = (SubmitConfig.__doc__ or "") + "\n" + _EXAMPLES
    asked = tyro.cli(SubmitConfig, args=arguments, prog="llama-train submit", description=description)

    from .manage.job_script import Cluster, default_template, job_fields, options_of, render
    from .manage.jobs import CHOICES, look, submit, wanted

    if asked.print_template:
        print(default_template(), end="")
        return 0
    for state in asked.only:
        if state not in CHOICES:
            raise ValueError(f"--only is {state!r}; it must be one of {', '.join(CHOICES)}")
    cpus = None if asked.cpus_per_process is None else str(asked.cpus_per_process)
    pairs = {"partition": asked.partition, "account": asked.account, "qos": asked.qos, "cpus-per-task": cpus}
    cluster = Cluster(
        processes_per_node=asked.gpus_per_node,
        nodes=asked.nodes,
        time=asked.time,
        signal_before=asked.signal_before,
        requeue=asked.requeue,
        options=options_of(pairs, asked.sbatch),
    )
    template = default_template() if asked.template is None else _read(Path(asked.template))
    jobs = look(Path(asked.folder), cluster)
    if asked.status:
        _show(jobs)
        return 0
    chosen = [job for job in jobs if wanted(job, asked.only)]
    scripts = {job.file: render(template, job_fields(job.config, job.file, cluster)) for job in chosen if job.config}
    for job in jobs:
        if job not in chosen:
            print(f"passed over {job.name} ({job.file}): {job.state}{f', {job.reason}' if job.reason else ''}")
            continue
        if asked.dry_run:
            chain = "1 job" if asked.chain == 1 else f"{asked.chain} jobs"
            print(f"# ---- {job.name}, {job.state}: {job.size} processes, {chain}\n{scripts[job.file]}")
            continue
        ids = submit(job, template, cluster, asked.chain)
        print(f"handed in   {job.name} ({job.file}): {job.size} processes, job {', then '.join(ids)}")
    if not chosen:
        print(f"nothing to hand in; --only takes {', '.join(CHOICES)}")
    return 2 if all(job.state == "invalid" for job in jobs) else 0


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--template {path} cannot be read: {error}") from None


def _show(jobs: Sequence[Job]) -> None:
    from rich.table import Table
    from rich.text import Text

    from .manage.collect import COLOURS, table_console

    table = Table(box=None, pad_edge=False, header_style="bold")
    for name in ("run", "state", "job", "nodes", "step", "file", ""):
        table.add_column(name, no_wrap=name != "")
    for job in jobs:
        reason = job.reason.splitlines()[0] if job.reason else ""
        state = Text(job.state, style=COLOURS.get(job.state, "red"))
        cells = (job.jobs[-1] if job.jobs else "", job.size, job.step, str(job.file), reason)
        table.add_row(Text(job.name), state, *map(Text, cells))
    table_console().print(table)
