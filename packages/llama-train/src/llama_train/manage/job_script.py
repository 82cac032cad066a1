"""A run's job script: how many nodes, which command, and the template that both are put into."""

from __future__ import annotations

import math
import os
import re
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path

from llama_train.config import TrainConfig
from llama_train.layout_choice import fill_in

from .run_files import JOBS, OUTCOME, run_path

_FIELD = re.compile(r"\{\{(\w+)\}\}")


@dataclass(frozen=True)
class Cluster:
    """What jobs ask of the cluster."""

    processes_per_node: int = 8
    """GPUs of a node, each of which gets a process."""
    nodes: int | None = None
    """For runs that leave parallel.dp_shard open; None means one."""
    time: str = "24:00:00"
    signal_before: int = 300
    """Seconds before the limit at which the run is told to save."""
    requeue: bool = True
    options: tuple[str, ...] = ()
    """More options of sbatch, such as --partition=gpu."""


@dataclass(frozen=True)
class Size:
    """Nodes, and processes of each."""

    nodes: int
    per_node: int


def size_of(config: TrainConfig, cluster: Cluster) -> Size:
    """How many nodes the layout takes.

    Raises:
        ValueError: the processes do not divide over nodes.
    """
    each = cluster.processes_per_node
    if config.parallel.dp_shard == 0:
        nodes = cluster.nodes or 1
        fill_in(config.parallel, nodes * each)
        return Size(nodes, each)
    settings = config.parallel
    processes = settings.dp_replicate * settings.dp_shard * settings.cp * settings.tp * settings.pp
    nodes = cluster.nodes or math.ceil(processes / each)
    if processes % nodes or processes // nodes > each:
        raise ValueError(
            f"the {processes} processes of [parallel] do not divide over {nodes} nodes of {each} GPUs: "
            "change --nodes, --gpus-per-node or the layout"
        )
    return Size(nodes, processes // nodes)


def resolved(config: TrainConfig, size: Size) -> TrainConfig:
    """The settings with dp_shard filled in."""
    return replace(config, parallel=fill_in(config.parallel, size.nodes * size.per_node))


def default_template() -> str:
    """The one that comes with the package."""
    return (files(__package__) / "job.sh").read_text(encoding="utf-8")


def job_fields(config: TrainConfig, file: Path, cluster: Cluster) -> dict[str, str]:
    """What a template may name as {{field}}. Paths and the command are quoted for the shell."""
    size = size_of(config, cluster)
    run = run_path(config).absolute()
    options = list(cluster.options)
    if config.device != "cpu":
        options.append(f"--gpus-per-node={size.per_node}")
    options.append("--requeue" if cluster.requeue else "--no-requeue")
    command = shlex.join([sys.executable, "-m", "llama_train", "run", str(file.absolute())])
    return {
        "name": re.sub(r"[^\w.-]", "_", config.name),
        "nodes": str(size.nodes),
        "processes_per_node": str(size.per_node),
        "processes": str(size.nodes * size.per_node),
        "time": cluster.time,
        "folder": shlex.quote(os.getcwd()),
        "log": shlex.quote(str(run / JOBS / "%j.out")),
        "outcome": shlex.quote(str(run / OUTCOME)),
        "run": shlex.quote(str(run)),
        "file": shlex.quote(str(file.absolute())),
        "signal_before": str(cluster.signal_before),
        "options": "\n".join(f"#SBATCH {option}" for option in options),
        "requeue": "yes" if cluster.requeue else "no",
        "command": command,
    }


def render(template: str, values: Mapping[str, str]) -> str:
    """The template with its {{fields}} filled in; everything else, the shell's $variables too, stays as it is.

    Raises:
        ValueError: a field that there is not.
    """

    def fill(match: re.Match[str]) -> str:
        if match[1] not in values:
            raise ValueError(f"the template names {{{{{match[1]}}}}}; there is: {', '.join(values)}")
        return values[match[1]]

    return _FIELD.sub(fill, template)


def options_of(pairs: Mapping[str, str | None], more: Sequence[str]) -> tuple[str, ...]:
    """Options of sbatch from flags that were given, then those that a user wrote out."""
    for option in more:
        if not option.startswith("--") or "\n" in option:
            raise ValueError(f"--sbatch is {option!r}; it must be an option such as --constraint=h100")
    return (*(f"--{name}={value}" for name, value in pairs.items() if value is not None), *more)
