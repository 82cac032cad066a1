"""The tokenizing processes: tasks out, results back in the order of the tasks."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from .encode import Encoded, Encoder
from .items import Item
from .settings import PrepareConfig

_AHEAD = 3  # tasks per process that are under way: enough that none waits, few enough to stay in memory
Task = tuple[str, list[Item]]
Result = tuple[list[Item], list[Encoded | str]]

_encoder: Encoder | None = None  # of a worker process, made once when it starts


def encode_all(tasks: Iterable[Task], encoder: Encoder, tokenizer: Path, config: PrepareConfig) -> Iterator[Result]:
    """Encode all tasks, in processes of their own (none with workers = 0), and yield the results in order.

    The processes are started afresh ("spawn"), so threads and locks of this one do no harm.

    Args:
        tasks: (kind of record, records); read only as far as the processes have work.
        encoder: for this process.
        tokenizer: folder from which the processes load the same tokenizer.
        config: for them, too.

    Raises:
        ValueError: a process was killed.
    """
    count = config.workers if config.workers is not None else available_cores()
    if count == 0:
        for kind, items in tasks:
            yield items, encoder.encode([_packed(item) for item in items], kind)
        return
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(count, context, initializer=_start, initargs=(str(tokenizer), config))
    try:
        under_way: deque[tuple[list[Item], Future[list[Encoded | str]]]] = deque()
        for kind, items in tasks:
            under_way.append((items, pool.submit(_encode, kind, [_packed(item) for item in items])))
            if len(under_way) >= _AHEAD * count:
                first, future = under_way.popleft()
                yield first, future.result()
        while under_way:
            first, future = under_way.popleft()
            yield first, future.result()
    except BrokenProcessPool:
        raise ValueError(
            "a tokenizing process was ended from outside, most likely for want of memory; finished shards are kept: "
            f"start the same command again with fewer than --workers {count}"
        ) from None
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


def available_cores() -> int:
    """Cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _packed(item: Item) -> tuple[Any, bool, bool]:
    return item.data, item.begins, item.ends


def _start(tokenizer: str, config: PrepareConfig) -> None:
    global _encoder
    from llama_core import load_tokenizer

    # This process is one of many, so the tokenizers package shall not use all cores in each.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _encoder = Encoder(load_tokenizer(tokenizer), config)


def _end_with_parent() -> None:
    # A parent that is killed cannot tell its pool, whose processes would wait for ever.
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _encode(kind: str, records: list[tuple[Any, bool, bool]]) -> list[Encoded | str]:
    assert _encoder is not None
    return _encoder.encode(records, kind)
