"""Every operation of the OpenAPI document, with valid and invalid requests."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from tests.e2e.serve.gateway import Gateway, gateway, memory

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("openapi")]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    with gateway(tmp_path_factory.mktemp("gateway")) as server:
        yield server


def test_every_operation_answers_as_the_document_says(served: Gateway) -> None:
    from tests.e2e.serve import openapi_cases  # imported late, because the import takes seconds

    token = served.token("research", "admin")
    with served.client(token) as client:
        document = client.get("/openapi.json").json()
        seen = []
        for operation in openapi_cases.operations(document):
            seen.append(f"{operation.method.upper()} {operation.path}")
            name = f"known-{len(seen)}"
            client.put(f"/v1/sandboxes/{name}", json={"disk_mib": 16, **memory(128)}).raise_for_status()
            client.put(f"/v1/sessions/{name}", json={"env_id": "FrozenLake-v0", "seed": 1}).raise_for_status()
            openapi_cases.try_operation(operation, name, partial(openapi_cases.check_case, served, token))
            client.delete(f"/v1/sessions/{name}").raise_for_status()
            for sandbox in client.get("/v1/sandboxes").json()["sandboxes"]:
                if sandbox["state"] not in ("stopped", "lost") and not sandbox["sandbox_id"].startswith(":"):
                    client.delete(f"/v1/sandboxes/{sandbox['sandbox_id']}").raise_for_status()
        assert len(seen) == sum(map(len, document["paths"].values()))
        assert client.get("/v1/ready").json()["ready"] is True
