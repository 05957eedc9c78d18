"""The described API: its document, and what is told of paths, methods and queries that it does not have."""

from __future__ import annotations

import json

import httpx
import pytest

from envkit.errors import UnknownPathError, from_problem
from tests.http.stage import over_http


def test_the_document_describes_every_route_and_every_type_that_it_names() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        document = (await client.get("/openapi.json")).json()
        assert {path: sorted(verbs) for path, verbs in document["paths"].items()} == {
            "/v1/sessions/{session_id}": ["delete", "get", "put"],
            "/v1/sessions/{session_id}/step": ["post"],
            "/v1/sessions:step": ["post"],
            "/v1/sessions": ["get"],
            "/v1/envs": ["get"],
            "/v1/health": ["get"],
            "/v1/ready": ["get"],
            "/metrics": ["get"],
            "/v1": ["get"],
        }
        schemas = document["components"]["schemas"]
        text = json.dumps(document)
        named = {part.split('"')[0] for part in text.split("#/components/schemas/")[1:]}
        assert named <= set(schemas)
        assert schemas["StepBody"]["required"] == ["turn", "action"]
        assert "422" not in document["paths"]["/v1/sessions/{session_id}"]["put"]["responses"]

    over_http(main)


@pytest.mark.parametrize("path", ["/", "/v1", "/v1/health", "/v1/ready", "/metrics", "/openapi.json"])
def test_what_is_watched_can_be_asked_for_its_head(path: str) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        head, whole = await client.head(path), await client.get(path)
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-type"] == whole.headers["content-type"]
        assert (await client.get("/v1/health")).json()["status"] == "alive"  # on the same connection

    over_http(main)


def test_a_path_at_which_there_is_nothing_has_an_error_of_its_own() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for verb, path in (("GET", "/v1/sesions"), ("POST", "/nothing"), ("PUT", "/v1/sessions/a/b/c")):
            answer = await client.request(verb, path)
            assert (answer.status_code, answer.json()["type"], answer.json()["status"]) == (404, "not_found", 404)
            error = from_problem(answer.json())
            assert isinstance(error, UnknownPathError)
            assert str(error) == f"{verb} {path}: Not Found"

    over_http(main)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/docs/oauth2-redirect"])
def test_there_is_no_page_that_runs_scripts_of_others_here(path: str) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        assert (await client.get(path)).status_code == 404
        assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.")

    over_http(main)


@pytest.mark.parametrize(
    ("verb", "path", "allowed"),
    [
        ("POST", "/v1/health", "GET, HEAD"),
        ("HEAD", "/v1/sessions/a", "DELETE, GET, PUT"),
        ("OPTIONS", "/v1/sessions/a", "DELETE, GET, PUT"),
        ("PATCH", "/v1/sessions/a", "DELETE, GET, PUT"),
        ("GET", "/v1/sessions/a/step", "POST"),
        ("GET", "/v1/sessions:step", "POST"),
    ],
)
def test_a_wrong_method_is_told_all_that_the_path_takes(verb: str, path: str, allowed: str) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        answer = await client.request(verb, path)
        assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
        assert answer.headers["content-type"] == "application/problem+json"
        assert verb == "HEAD" or answer.json()["detail"] == f"{verb} {path}: Method Not Allowed"

    over_http(main)


@pytest.mark.parametrize(
    "path", ["/v1/health/", "/v1/sessions/", "/v1/sessions/a/", "/v1/sessions/a/step/", "/openapi.json/"]
)
def test_a_slash_too_many_is_not_sent_elsewhere_with_its_token(path: str) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for verb in ("GET", "PUT", "POST", "DELETE"):
            answer = await client.request(verb, path)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
            assert "location" not in answer.headers

    over_http(main)


@pytest.mark.parametrize(
    ("verb", "path"),
    [
        ("GET", "/v1/envs?of=all"),
        ("POST", "/v1/sessions/a/step?turn=1"),
        ("GET", "/metrics?name[]=x"),
        ("GET", "/v1/health?"),
    ],
)
def test_what_no_query_is_for_is_refused_as_unknown_keys_are(verb: str, path: str) -> None:
    async def main(client: httpx.AsyncClient) -> None:
        answer = await client.request(verb, path, content=b'{"turn":0,"action":"x"}')
        if path.endswith("?"):
            assert answer.status_code == 200
        else:
            name = path.partition("?")[2].partition("=")[0]
            assert (answer.status_code, answer.json()["detail"]) == (400, f"unknown query parameter {name!r}")

    over_http(main)
