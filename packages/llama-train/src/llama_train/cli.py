"""The command line. Nothing here imports torch before a run starts, so that help and mistakes answer at once."""

from __future__ import annotations

import importlib.metadata
import io
import os
import sys
from collections.abc import Sequence

_HELP = """usage: llama-train run CONFIG.toml [--section.key VALUE ...]

Train a Llama.

commands:
  run CONFIG.toml   train as the file says; flags override its keys (llama-train run --help lists them)

The same under torchrun: torchrun --nproc-per-node 1 -m llama_train run CONFIG.toml
--version prints the version.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 done or stopped on request, 1 the run failed, 2 wrong input, 130 interrupted.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")  # a sample may hold what an old terminal cannot show
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_HELP, end="")
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"llama-train {importlib.metadata.version('llama-train')}")
        return 0
    command, *rest = arguments
    if command != "run":
        return _fail(f"unknown command {command!r}; the one there is: run", 2)
    try:
        return _run(rest)
    except ValueError as error:
        return _fail(str(error), 2)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)
    except OSError as error:  # a folder that is closed to us, a full disk
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(f"{where}{error.strerror or error}", 1)
    finally:
        _let_go_of_output()


def _run(arguments: list[str]) -> int:
    import tyro

    from .config import TrainConfig
    from .config_file import load_config

    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    asks_help = "-h" in arguments or "--help" in arguments
    if file is None and not asks_help:
        raise ValueError("which run? Give a TOML file first: llama-train run CONFIG.toml")
    default = TrainConfig() if file is None else load_config(file)
    config = tyro.cli(TrainConfig, args=arguments, default=default, prog=f"llama-train run {file or 'CONFIG.toml'}")

    from .checkpoint import SaveError
    from .loop import NonFiniteLoss, train

    try:
        train(config)
    except (NonFiniteLoss, SaveError) as error:
        return _fail(str(error), 1)
    return 0


def _let_go_of_output() -> None:
    """Standard output whose disk is full would fail once more when the interpreter flushes it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:  # started without one: None
        pass


def _fail(message: str, status: int) -> int:
    print(f"llama-train: {message}", file=sys.stderr)
    return status
