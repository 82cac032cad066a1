"""`llama-train run`."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Iterator


def main(arguments: list[str]) -> int:
    """Train; the exit status is 0 where the run ended or was asked to stop."""
    import tyro

    from .config import TrainConfig
    from .config_file import load_config

    file = arguments.pop(0) if arguments and not arguments[0].startswith("-") else None
    asks_help = "-h" in arguments or "--help" in arguments
    if file is None and not asks_help:
        raise ValueError("which run? Give a TOML file first: llama-train run CONFIG.toml")
    default = TrainConfig() if file is None else load_config(file)
    program = f"llama-train run {file or 'CONFIG.toml'}"
    with _once():
        config = tyro.cli(TrainConfig, args=arguments, default=default, prog=program)

    from .loop import train
    from .manage.run_state import noted_outcome

    with noted_outcome(config) as reached_its_end:
        reached_its_end.append(train(config).finished)
    return 0


@contextlib.contextmanager
def _once() -> Iterator[None]:
    """Of several processes that print the same help or the same mistake, let rank 0 print it."""
    if os.environ.get("RANK", "0") == "0":
        yield
        return
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            yield
        except SystemExit:
            from .failures import wait_to_be_ended

            wait_to_be_ended()
            raise
