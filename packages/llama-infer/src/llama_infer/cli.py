"""The command line. Each command is a frozen dataclass: its fields are the flags, its docstrings the help."""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import version
from typing import Any

import tyro

from .cli_bench import Bench
from .cli_bench_serve import BenchServe
from .cli_chat import Chat
from .cli_convert import Convert
from .cli_eval import Eval
from .cli_generate import Generate
from .cli_inspect import Inspect
from .cli_serve import Serve

COMMANDS: dict[str, Callable[..., Any]] = {
    "generate": Generate,
    "chat": Chat,
    "convert": Convert,
    "inspect": Inspect,
    "bench": Bench,
    "eval": Eval,
    "serve": Serve,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 done, 1 the system refused something (a full disk), 2 wrong input, 130 interrupted,
        141 the reader of our output went away.
    """
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a terminal that lacks a character must not end the run
    arguments = sys.argv[1:] if argv is None else list(argv)
    if arguments == ["--version"]:
        print(f"llama-infer {version('llama-infer')}")
        return 0
    try:
        try:
            command = _parsed(arguments)
        except SystemExit as end:  # help was shown, or a mistake explained
            return end.code if isinstance(end.code, int) else 2
        return command.run()
    except ValueError as error:
        print(f"llama-infer: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return 130
    except BrokenPipeError:
        _abandon_output()
        return 141
    except OSError as error:
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"llama-infer: {where}{error.strerror or error}", file=sys.stderr)
        try:
            sys.stdout.flush()
        except OSError:  # it was standard output that failed
            _abandon_output()
        return 1


def _parsed(arguments: list[str]) -> Generate | Chat | Convert | Inspect | Bench | BenchServe | Eval | Serve:
    """The command that the arguments ask for, with its settings."""
    config = (tyro.conf.FlagCreatePairsOff,)
    if arguments[:2] == ["bench", "serve"]:
        return tyro.cli(BenchServe, prog="llama-infer bench serve", args=arguments[2:], config=config)
    command: Generate | Chat | Convert | Inspect | Bench | Eval | Serve = tyro.extras.subcommand_cli_from_dict(
        COMMANDS,
        prog="llama-infer",
        description="Generate text with Llama models, convert them, and see them work.",
        args=arguments,
        config=config,
    )
    return command


def _open_closed_streams() -> None:
    """A process may be started without one of its three streams; Python then has None in its place, and the first
    file that is opened would take its number."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode, encoding="utf-8"))  # noqa: SIM115 - as long as the process


def _abandon_output() -> None:
    """The interpreter flushes standard output once more at exit; give it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
