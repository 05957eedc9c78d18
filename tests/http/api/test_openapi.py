"""The OpenAPI document, and the answers to unknown paths, methods and query parameters."""

from __future__ import annotations

import itertools

import httpx

from envkit.errors import UnknownPathError, from_problem
from tests.http.stage import over_http


def test_monitored_paths_answer_head_requests() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for path in ("/", "/v1", "/v1/health", "/v1/ready", "/metrics", "/openapi.json"):
            head, whole = await client.head(path), await client.get(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-type"] == whole.headers["content-type"]
            assert (await client.get("/v1/health")).json()["status"] == "alive"  # on the same connection

    over_http(main)


def test_an_unknown_path_has_its_own_error() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for verb, path in (("GET", "/v1/sesions"), ("POST", "/nothing"), ("PUT", "/v1/sessions/a/b/c")):
            answer = await client.request(verb, path)
            assert (answer.status_code, answer.json()["type"], answer.json()["status"]) == (404, "not_found", 404)
            error = from_problem(answer.json())
            assert isinstance(error, UnknownPathError)
            assert str(error) == f"{verb} {path}: Not Found"

    over_http(main)


def test_no_page_runs_third_party_scripts() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for path in ("/docs", "/redoc", "/docs/oauth2-redirect"):
            assert (await client.get(path)).status_code == 404
        assert (await client.get("/openapi.json")).json()["openapi"].startswith("3.")

    over_http(main)


def test_a_wrong_method_is_answered_with_all_allowed_methods() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for verb, path, allowed in (
            ("POST", "/v1/health", "GET, HEAD"),
            ("HEAD", "/v1/sessions/a", "DELETE, GET, PUT"),
            ("OPTIONS", "/v1/sessions/a", "DELETE, GET, PUT"),
            ("GET", "/v1/sessions:step", "POST"),
        ):
            answer = await client.request(verb, path)
            assert (answer.status_code, answer.headers["allow"]) == (405, allowed)
            assert answer.headers["content-type"] == "application/problem+json"
            assert verb == "HEAD" or answer.json()["detail"] == f"{verb} {path}: Method Not Allowed"

    over_http(main)


def test_a_trailing_slash_is_not_redirected() -> None:
    paths = ("/v1/health/", "/v1/sessions/", "/v1/sessions/a/", "/v1/sessions/a/step/", "/openapi.json/")

    async def main(client: httpx.AsyncClient) -> None:
        for verb, path in itertools.product(("GET", "PUT", "POST", "DELETE"), paths):
            answer = await client.request(verb, path)
            assert (answer.status_code, answer.headers["content-type"]) == (404, "application/problem+json")
            assert "location" not in answer.headers

    over_http(main)
