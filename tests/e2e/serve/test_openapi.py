"""Every operation of the OpenAPI document, with valid and invalid requests."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import httpx
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

from tests.e2e.serve.gateway import Gateway, gateway, memory

Operation: TypeAlias = APIOperation[Any, Any, Any, Any]
Request: TypeAlias = Case[Any]

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("openapi")]

CHECKS = [status_code_conformance, content_type_conformance, response_schema_conformance]
EXAMPLES = 6
MAX_S = 30.0
STREAMS = {"/v1/events"}
UNAVAILABLE = {"no_capacity", "sandbox_lost", "sandbox_start", "unreachable"}
"""Errors beyond the caller's control, answered with 503."""


@schemathesis.serializer("application/x-tar")
def _as_it_is(context: SerializationContext, value: Any) -> bytes:
    return value if isinstance(value, bytes) else str(value).encode(errors="replace")


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as server:
        yield server


def test_every_operation_answers_as_the_document_says(served: Gateway) -> None:
    token = served.token("research", "admin")
    with served.client(token) as client:
        document = client.get("/openapi.json").json()
        schema = schemathesis.openapi.from_dict(document)
        seen = []
        for result in schema.get_all_operations():
            assert isinstance(result, Ok), result
            operation = result.ok()
            if operation.path in STREAMS:
                continue
            seen.append(f"{operation.method.upper()} {operation.path}")
            name = f"known-{len(seen)}"
            client.put(f"/v1/sandboxes/{name}", json={"disk_mib": 16, **memory(128)}).raise_for_status()
            client.put(f"/v1/sessions/{name}", json={"env_id": "FrozenLake-v0", "seed": 1}).raise_for_status()
            _try(operation, name, partial(_check, served, token))
            client.delete(f"/v1/sessions/{name}").raise_for_status()
            for sandbox in client.get("/v1/sandboxes").json()["sandboxes"]:
                if sandbox["state"] not in ("stopped", "lost") and not sandbox["sandbox_id"].startswith(":"):
                    client.delete(f"/v1/sandboxes/{sandbox['sandbox_id']}").raise_for_status()
        assert len(seen) == sum(map(len, document["paths"].values())) - len(STREAMS)
        assert client.get("/v1/ready").json()["ready"] is True


def _try(operation: Operation, name: str, check: Callable[[Request], None]) -> None:
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


def _check(served: Gateway, token: str, case: Request) -> None:
    answer = case.call(base_url=served.url, headers={"Authorization": f"Bearer {token}"}, timeout=MAX_S)
    case.validate_response(answer, checks=CHECKS)
    assert answer.elapsed < MAX_S
    if answer.status_code == 503 and case.path != "/v1/ready":
        assert answer.json()["type"] in UNAVAILABLE
    elif answer.status_code >= 500:
        pytest.fail(f"{answer.status_code} {answer.text}: {case.as_curl_command()}")
    if answer.status_code >= 400:
        assert answer.headers["content-type"] == ["application/problem+json"]


def test_the_event_stream_starts_at_once(served: Gateway) -> None:
    with served.client(served.token("ops", "admin")) as client, client.stream("GET", "/v1/events") as answer:
        assert answer.headers["content-type"] == "text/event-stream; charset=utf-8"
        assert next(answer.iter_text()).startswith("id: 1\nevent: state\n")


@pytest.mark.parametrize("path", ["/v1/sessions", "/v1/sandboxes", "/v1/events", "/v1/envs", "/metrics"])
def test_every_call_needs_a_token(served: Gateway, path: str) -> None:
    answer = httpx.get(f"{served.url}{path}", trust_env=False)
    assert (answer.status_code, answer.json()["type"]) == (401, "unauthorized")
