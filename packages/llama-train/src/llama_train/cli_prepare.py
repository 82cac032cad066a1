"""`llama-train prepare INPUT... --tokenizer PATH --output FOLDER`: text to token shards."""

from __future__ import annotations


def main(arguments: list[str]) -> int:
    """Run the command; the exit status.

    Raises:
        ValueError: wrong settings or unreadable input.
        OSError: the disk is full.
    """
    import tyro

    from .data.settings import PrepareConfig

    config = tyro.cli(PrepareConfig, args=arguments, prog="llama-train prepare")

    from .data.make_shards import run_prepare

    run_prepare(config)
    return 0
