"""Checks of an operation of the OpenAPI document with requests that schemathesis makes of it.

Only one test loads this module: the import takes seconds, and each worker loads all modules of tests.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import pytest
import schemathesis
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from schemathesis import APIOperation, Case, GenerationMode, SerializationContext
from schemathesis.core.result import Ok
from schemathesis.specs.openapi.checks import (
    content_type_conformance,
    response_schema_conformance,
    status_code_conformance,
)

from tests.e2e.serve.gateway import Gateway

Operation: TypeAlias = APIOperation[Any, Any, Any, Any]
Request: TypeAlias = Case[Any]

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
MAX_S = 30.0
UNAVAILABLE = {"no_capacity", "sandbox_lost", "sandbox_start", "unreachable"}
"""Errors beyond the caller's control, answered with 503."""


@schemathesis.serializer("application/x-tar")
def _as_it_is(context: SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


def operations(document: dict[str, Any]) -> Iterator[Operation]:
    """Yield the operations of a document."""
    for result in schemathesis.openapi.from_dict(document).get_all_operations():
        assert isinstance(result, Ok), result
        yield result.ok()


def try_operation(operation: Operation, name: str, check: Callable[[Request], None]) -> None:
    """Check an operation with many requests, half of them about existing resources."""
    modes = [operation.as_strategy(generation_mode=mode) for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE)]

    @settings(
        max_examples=EXAMPLES,
        derandomize=True,
        database=None,
        deadline=None,
        phases=[Phase.explicit, Phase.generate],
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.data_too_large],
    )
    @given(case=st.one_of(modes), is_known=st.booleans())
    def run(case: Request, is_known: bool) -> None:
        for parameter in case.path_parameters or {}:
            if is_known and parameter.endswith("_id"):
                case.path_parameters[parameter] = name
        check(case)

    run()


def check_case(served: Gateway, token: str, case: Request) -> None:
    answer = case.call(base_url=served.url, headers={"Authorization": f"Bearer {token}"}, timeout=MAX_S)
    case.validate_response(answer, checks=CHECKS)
    assert answer.elapsed < MAX_S
    if answer.status_code == 503 and case.path != "/v1/ready":
        assert answer.json()["type"] in UNAVAILABLE
    elif answer.status_code >= 500:
        pytest.fail(f"{answer.status_code} {answer.text}: {case.as_curl_command()}")
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == ["application/problem+json"]
