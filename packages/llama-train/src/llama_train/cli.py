"""The command line. Nothing here imports torch before work starts, so that help and mistakes answer at once."""

from __future__ import annotations

import importlib.metadata
import io
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module

_HELP = """usage: llama-train COMMAND ...

Train a Llama, on one process or on many.

commands:
  init RUN.toml     the settings of a new run, every key explained; batch arithmetic and predicted memory
  run CONFIG.toml   train as the file says; flags override its keys
  submit FOLDER     a Slurm job for every run that has a TOML file there; their states; failed ones again
  collect FOLDER    table of all runs below a folder, on the terminal and as CSV
  plot RUN...       curves of runs as a page and a picture, compared by steps, tokens or time
  export RUN        a checkpoint of a run as a model: Hugging Face's, Meta's or GGUF format, or a LoRA adapter
  prepare INPUT...  text, JSON lines, Parquet or a data set to token shards, on all cores, resumable
  parity            does a layout of processes train the same model as one? largest differences of a small run
  plan              which layout of so many GPUs to train a model with: memory, communication, time; needs no GPU
  bench sweep       the fastest layout and batch size on this machine, measured case by case
  bench scaling     speed-up and efficiency over numbers of processes, strong and weak

Each explains itself: llama-train run --help. On several processes torchrun starts them:
  torchrun --nproc-per-node 8 -m llama_train run CONFIG.toml
  torchrun --nproc-per-node 8 --no-python llama-train run CONFIG.toml
--version prints the version.
"""

# A command is a module of its name with a function `main(arguments) -> exit status`.
_COMMANDS = {
    "init": "cli_init",
    "run": "cli_run",
    "submit": "cli_submit",
    "collect": "cli_collect",
    "plot": "cli_plot",
    "export": "cli_export",
    "prepare": "cli_prepare",
    "parity": "cli_parity",
    "plan": "cli_plan",
    "bench": "cli_bench",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit status: 0 done or stopped on request, 1 the run failed, 2 wrong input, 130 interrupted,
        141 the reader of our output went away.
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
    # Gathering a parameter that is cut twice takes torch two steps; it is done for exports and comparisons alone.
    logging.getLogger("torch.distributed.tensor._redistribute").setLevel(logging.ERROR)
    command, *rest = arguments
    if command not in _COMMANDS:
        known = ", ".join(_COMMANDS)
        return _fail(ValueError(f"unknown command {command!r}; there is: {known}"), None, 2)
    try:
        status: int = import_module(f".{_COMMANDS[command]}", __package__).main(rest)
        return status
    except ValueError as error:
        return _fail(error, None, 2)
    except KeyboardInterrupt as error:
        return _fail(error, "interrupted", 130)
    except BrokenPipeError:  # who reads our output has seen enough, as `head` does; a run itself goes on without
        return 141
    except OSError as error:  # a folder that is closed to us, a full disk
        where = "" if error.filename is None else f"{error.filename}: "
        return _fail(error, f"{where}{error.strerror or error}", 1)
    except RuntimeError as error:
        if type(error).__module__.partition(".")[0] != __package__:
            raise  # not one of ours: a fault, whose traceback is wanted
        return _fail(error, None, 1)
    finally:
        _let_go_of_output()


def _let_go_of_output() -> None:
    """Standard output whose disk is full would fail once more when the interpreter flushes it at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except AttributeError:  # started without one: None
        pass


def _fail(error: BaseException, message: str | None, status: int) -> int:
    """Say what went wrong, once however many processes there are."""
    rank = ""
    if os.environ.get("WORLD_SIZE", "1") != "1":
        from llama_parallel import Process, read_process

        from .failures import is_mine_to_tell, wait_to_be_ended

        try:
            process = read_process(os.environ)
        except ValueError:  # that is what went wrong
            process = Process()
        if not is_mine_to_tell(error, process):
            wait_to_be_ended()
            return status
        rank = f"rank {process.rank}: " if process.rank else ""
    print(f"llama-train: {rank}{str(error) if message is None else message}", file=sys.stderr, flush=True)
    return status
