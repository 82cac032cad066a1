"""Every endpoint against its own description: random requests that fit it, and such that don't."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest
import schemathesis
from schemathesis import GenerationMode
from schemathesis.checks import CHECKS, load_all_checks

from llama_infer import LLM

from .conftest import Running, Serving

NAMES = ("not_a_server_error", "status_code_conformance", "content_type_conformance", "response_schema_conformance")


@pytest.fixture(scope="module")
def small(tiny: Callable[..., LLM], serving: Serving) -> Iterator[Running]:
    """With a context so short that nothing takes long."""
    with serving(tiny(max_model_len=48)) as running:
        yield running
        assert running.is_idle(), "a slot is stuck"


@pytest.fixture(scope="module")
def description(small: Running) -> Any:
    load_all_checks()
    return schemathesis.openapi.from_url(f"{small.url}/openapi.json")


ENDPOINTS = [
    ("/v1/chat/completions", "POST"),
    ("/v1/completions", "POST"),
    ("/tokenize", "POST"),
    ("/detokenize", "POST"),
    ("/v1/models/{name}", "GET"),
    ("/v1/models", "GET"),
    ("/health", "GET"),
    ("/ready", "GET"),
    ("/metrics", "GET"),
]


def test_all_endpoints_are_tried(description: Any) -> None:
    found = [(result.ok().path, result.ok().method.upper()) for result in description.get_all_operations()]
    assert sorted(found) == sorted(ENDPOINTS)


CASES = [(*endpoint, True) for endpoint in ENDPOINTS]
CASES += [(path, method, False) for path, method in ENDPOINTS if method == "POST"]  # a GET has nothing to be wrong


@pytest.mark.parametrize(("path", "method", "fits"), CASES)
def test_as_described(description: Any, path: str, method: str, fits: bool) -> None:
    mode = GenerationMode.POSITIVE if fits else GenerationMode.NEGATIVE
    checks = [CHECKS.get_one(name) for name in NAMES]
    checks += [] if fits else [CHECKS.get_one("negative_data_rejection")]

    @hypothesis.given(case=description[path][method].as_strategy(generation_mode=mode))
    @hypothesis.settings(max_examples=30 if method == "POST" else 5, derandomize=True, deadline=None, database=None)
    def answers(case: schemathesis.Case) -> None:
        case.call_and_validate(checks=checks)

    answers()
