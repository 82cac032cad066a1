"""What a run was made with: a line of RUN/starts.jsonl for every start."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, distribution, version
from pathlib import Path
from typing import Any

import torch

from .config import TrainConfig

_PACKAGES = (
    "llama-train", "llama-parallel", "llama-kernels", "llama-core", "torch", "triton", "numpy", "tokenizers",
)  # fmt: skip
_PATIENCE = 10.0  # seconds for git, on a slow file system


def write_start(path: Path, config: TrainConfig, argv: list[str] | None = None) -> None:
    """Append what is known of this start: time, command, folder, versions, revision, devices.

    Args:
        path: of starts.jsonl.
        config: resolved.
        argv: the command; that of the process by default.
    """
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(describe_start(config, sys.argv if argv is None else argv)) + "\n")


def describe_start(config: TrainConfig, argv: list[str]) -> dict[str, Any]:
    """What `write_start` writes."""
    settings = config.parallel
    processes = settings.dp_replicate * max(1, settings.dp_shard) * settings.cp * settings.tp * settings.pp
    on_gpu = config.device == "cuda" and torch.cuda.is_available()
    return {
        "time": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": argv,
        "working_directory": str(Path.cwd()),
        "revision": revision(),
        "versions": {"python": platform.python_version(), **{name: _version(name) for name in _PACKAGES}},
        "platform": platform.platform(),
        "cuda": torch.version.cuda if on_gpu else None,
        "device": torch.cuda.get_device_name() if on_gpu else platform.processor() or platform.machine(),
        "processes": processes,
        "restarts": int(os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")),
    }


def revision(source: Path = Path(__file__)) -> str | None:
    """The commit that this package runs from, with "+changes" where the checkout has others; None if nobody knows."""
    try:
        _git(source, "ls-files", "--error-unmatch", source.name)  # not an environment inside somebody's repository
        commit = _git(source, "rev-parse", "HEAD").strip()
        changed = _git(source, "status", "--porcelain", "--untracked-files=no", ".").strip()
        return commit + ("+changes" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return _installed_revision()


def _git(source: Path, *words: str) -> str:
    command = ["git", "-C", str(source.parent), *words]
    return subprocess.run(command, check=True, capture_output=True, text=True, timeout=_PATIENCE).stdout


def _installed_revision() -> str | None:
    """As pip and uv note it when they install from a repository."""
    try:
        text = distribution("llama-train").read_text("direct_url.json")
        return None if text is None else json.loads(text)["vcs_info"]["commit_id"]
    except (PackageNotFoundError, ValueError, KeyError):
        return None


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:  # triton on a CPU; a package on PYTHONPATH
        return None
