"""What form a request's output must have: a JSON schema, a regular expression, a grammar or one of several texts.

The names are vLLM's. Imports nothing heavy, so that the command line can show it in `--help`.
"""

from __future__ import annotations

import dataclasses
import json as json_module
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

FORMS = ("json", "json_object", "regex", "choice", "grammar")


@dataclass(frozen=True)
class StructuredOutputsParams:
    """Exactly one of these five forms; whatever is drawn, an output with the finish reason "stop" has it.

    `SamplingParams(structured_outputs=…)` takes it, or a mapping of the same names. Needs the extra `guided`.

    >>> StructuredOutputsParams(json={"type": "object", "properties": {"city": {"type": "string"}}})
    >>> StructuredOutputsParams(regex="[A-Z][a-z]{2,9}")
    >>> StructuredOutputsParams(choice=("yes", "no"))

    Raises:
        ValueError: none or several forms, or one of another type. What only the grammar's compiler can know (an unknown
            keyword of a schema, an unfinished group of an expression) is a ValueError where the request begins.
    """

    json: str | Mapping[str, Any] | bool | None = None
    """A JSON schema, as an object or as its text."""
    json_object: bool | None = None
    """True: any JSON object."""
    regex: str | None = None
    """A regular expression for the whole output, in the syntax of Rust's regex package: no look-around, no
    back-references; \\d, \\w and \\s are Unicode's, [0-9] is ASCII."""
    choice: tuple[str, ...] | None = None
    """The output is one of these texts."""
    grammar: str | None = None
    """A context-free grammar, in llama.cpp's GBNF (it begins at `root`) or in Lark's syntax (at `start`)."""
    whitespace_pattern: str | None = None
    """For JSON: what may stand between its tokens, as a regular expression; "" for nothing. None: up to 20 spaces,
    tabs and newlines, enough to indent and too few to run away in."""

    def __post_init__(self) -> None:
        given = [name for name in FORMS if getattr(self, name) is not None]
        if len(given) != 1:
            told = "none of them" if not given else ", ".join(given)
            raise ValueError(f"structured_outputs takes one of {', '.join(FORMS)}; got {told}")
        if isinstance(self.json, Mapping | bool):
            object.__setattr__(self, "json", _schema_text(self.json))  # frozen to the bottom, and hashable
        if self.choice is not None:
            object.__setattr__(self, "choice", _texts(self.choice))
        if self.json_object is not None and self.json_object is not True:
            raise ValueError(f"structured_outputs: json_object must be True or left out, got {self.json_object!r}")
        for name in ("json", "regex", "grammar", "whitespace_pattern"):
            value = getattr(self, name)
            if value is not None and not isinstance(value, str):
                raise ValueError(f"structured_outputs: {name} must be a text, got {value!r}")
        if self.whitespace_pattern is not None and self.json is None and self.json_object is None:
            raise ValueError("structured_outputs: whitespace_pattern belongs to json or json_object")


def as_structured_outputs(value: object) -> StructuredOutputsParams:
    """The same from a mapping of its fields.

    Raises:
        ValueError: something else, or a name that there is not.
    """
    if isinstance(value, StructuredOutputsParams):
        return value
    names = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
    if not isinstance(value, Mapping):
        raise ValueError(
            f"structured_outputs must be StructuredOutputsParams, or a mapping of its names, got {value!r}"
        )
    for name in value:
        if name not in names:
            raise ValueError(f"structured_outputs has no {name!r}; there are {', '.join(names)}")
    return StructuredOutputsParams(**value)


def _schema_text(schema: Mapping[str, Any] | bool) -> str:
    try:
        return json_module.dumps(schema, ensure_ascii=False)  # the order of properties is the output's
    except (TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"structured_outputs: the JSON schema is no JSON: {error}") from None


def _texts(choice: object) -> tuple[str, ...]:
    texts = tuple(choice) if isinstance(choice, Iterable) and not isinstance(choice, str) else ()
    if not texts or not all(isinstance(text, str) and text for text in texts):
        raise ValueError(f"structured_outputs: choice must be a list of texts of at least 1 character, got {choice!r}")
    return texts
