"""`generation_config.json`: how the model's makers want it sampled, and where it stops."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .errors import CheckpointError

FILE = "generation_config.json"


@dataclass(frozen=True)
class GenerationConfig:
    """The settings we know, None where the file is silent. `other` holds the rest of the file, untouched."""

    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()
    pad_token_id: int | None = None
    do_sample: bool | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    max_new_tokens: int | None = None
    other: dict[str, Any] = field(default_factory=dict)


def read_json_object(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        CheckpointError: unreadable, not JSON, or not an object; the message gives line and column.
    """
    try:
        value = json.loads(path.read_text("utf-8"))
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: is not UTF-8 at byte {error.start}") from None
    except json.JSONDecodeError as error:
        place = f"line {error.lineno} column {error.colno}"
        raise CheckpointError(f"{path}: is not valid JSON, {place}: {error.msg}") from None
    except RecursionError:
        raise CheckpointError(f"{path}: nests too deep") from None
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: must hold a JSON object, not a {type(value).__name__}")
    return value


def token_ids(value: Any, where: str) -> tuple[int, ...]:
    """Ids from an int, a list of ints, or null.

    Raises:
        CheckpointError: anything else.
    """
    ids = () if value is None else value if isinstance(value, list) else (value,)
    for token_id in ids:
        if type(token_id) is not int or token_id < 0:
            raise CheckpointError(f"{where} must be a token id, a list of them, or null; got {value!r}")
    return tuple(dict.fromkeys(ids))


def _number(values: dict[str, Any], name: str, kinds: tuple[type, ...], where: str) -> Any:
    value = values.pop(name, None)
    if value is not None and type(value) not in kinds:
        raise CheckpointError(f"{where}: {name} must be {' or '.join(k.__name__ for k in kinds)}, got {value!r}")
    return value


def _pad(values: dict[str, Any], where: str) -> int | None:
    value = _number(values, "pad_token_id", (int,), where)
    return None if value is None or value < 0 else int(value)  # old Llama files say -1 for none


def load_generation_config(path: str | os.PathLike[str]) -> GenerationConfig:
    """Reads `generation_config.json`, given the file or its folder. A folder without one gives the defaults.

    Raises:
        CheckpointError: the file is there but is not valid; the message says where. (Llama 3.2 was first published with
            invalid JSON here. A caller that wants to go on without it may catch this and say so.)
    """
    path = Path(path)
    if path.is_dir():
        path = path / FILE
        if not path.exists():
            return GenerationConfig()
    values = read_json_object(path)
    where = str(path)
    real = (float, int)
    return GenerationConfig(
        bos_token_id=next(iter(token_ids(values.pop("bos_token_id", None), f"{where}: bos_token_id")), None),
        eos_token_ids=token_ids(values.pop("eos_token_id", None), f"{where}: eos_token_id"),
        pad_token_id=_pad(values, where),
        do_sample=_number(values, "do_sample", (bool,), where),
        temperature=_number(values, "temperature", real, where),
        top_k=_number(values, "top_k", (int,), where),
        top_p=_number(values, "top_p", real, where),
        min_p=_number(values, "min_p", real, where),
        repetition_penalty=_number(values, "repetition_penalty", real, where),
        max_new_tokens=_number(values, "max_new_tokens", (int,), where),
        other=values,
    )
