"""Authorization on a real server: tokens, scopes, request ids and the access log."""

from __future__ import annotations

import json
from contextlib import closing
from datetime import datetime
from pathlib import Path

import anyio
import pytest

from envkit.errors import ForbiddenError, UnauthorizedError
from envkit.http.client.env_client import EnvClient
from envkit.http.server.logs import access_log
from tests.http.guarded import COUNT, LONG, Stage, on_stage


def test_two_authorization_headers_are_refused_even_if_one_is_valid(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        good, bad = f"Bearer {stage.token()}", "Bearer ek_000000000000_" + "x" * 43
        for pair in ((good, bad), (bad, good), (good, good)):
            answer = await stage.http.get("/v1/health", headers=[("Authorization", one) for one in pair])
            assert answer.status_code == 400
            assert answer.json()["detail"] == "the request has 2 Authorization headers; send only one"

    on_stage(main, tmp_path)


def test_without_a_token_only_the_index_health_ready_and_the_document_are_answered(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        for path in ("/v1", "/v1/health", "/v1/ready", "/openapi.json"):
            assert (await stage.ask("GET", path)).status_code == 200
        for path in ("/v1/sessions", "/v1/envs", "/metrics", "/docs", "/nothing", "/v1/"):
            refused = await stage.ask("GET", path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["type"] == "unauthorized"

    on_stage(main, tmp_path)


def test_a_malformed_authorization_header_is_refused(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        for value in ("", "Bearer", "Basic {}", "{}", "Bearer {}A", "Bearer  x y", "Bearer \xe9"):
            header = value.format(stage.token()).encode("latin-1")
            answer = await stage.http.get("/v1/envs", headers=[(b"authorization", header)])
            assert answer.status_code == 401, value

    on_stage(main, tmp_path)


def test_a_token_allows_its_scopes_and_nothing_else(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        paths = ("/v1/envs", "/v1/sandboxes", "/metrics", "/v1/not-yet", "/openapi.json")
        for scopes, statuses in {
            "play": [200, 403, 403, 403, 200],
            "sandbox": [403, 404, 403, 403, 200],
            "metrics": [403, 403, 200, 403, 200],
            "admin": [200, 404, 200, 404, 200],
        }.items():
            token = stage.token("acme", scopes)
            assert [(await stage.ask("GET", path, token)).status_code for path in paths] == statuses, scopes
        refused = await stage.ask("GET", "/metrics", stage.token("acme", "play"))
        assert (refused.json()["type"], refused.json()["detail"]) == (
            "forbidden",
            "this call needs a token with the scope metrics; the token sent has play",
        )

    on_stage(main, tmp_path)


def test_each_frame_of_a_socket_needs_its_scope(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address, token=stage.token("acme", "sandbox")) as client:
            assert (await client.health()).status == "alive"
            with pytest.raises(ForbiddenError, match="the scope play; the token sent has sandbox"):
                await client.envs()
            with pytest.raises(ForbiddenError, match="the scope play; the token sent has sandbox"):
                async with client.lease(LONG):
                    pass
        async with EnvClient(stage.address, token=stage.token("ops", "admin")) as client, client.lease(LONG) as episode:
            await episode.reset()
            assert (await episode.step("x")).observation.text == "1 x"

    on_stage(main, tmp_path)


def test_without_tokens_everybody_may_do_everything(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        await stage.ask("PUT", "/v1/sessions/a", json=COUNT)
        assert (await stage.ask("GET", "/v1/sessions", "ek_whatever")).json()["sessions"][0]["session_id"] == "a"
        assert (await stage.ask("GET", "/metrics")).status_code == 200
        async with EnvClient(stage.address) as client:
            assert (await client.ready()).leased == 1

    on_stage(main, tmp_path, has_tokens=False)


def test_every_answer_has_a_request_id(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        for path, tokens in (("/v1/health", None), ("/v1/envs", token), ("/v1/envs", None), ("/v1/sessions/x", token)):
            named = await stage.ask("GET", path, tokens, headers={"X-Request-Id": "mine-1.2_3"})
            assert named.headers["x-request-id"] == "mine-1.2_3"
        made = []
        for odd in ("", "a b", "x" * 65, "a/b", "é"):
            answer = await stage.http.get("/v1/health", headers=[(b"x-request-id", odd.encode("latin-1"))])
            made.append(answer.headers["x-request-id"])
        assert len(set(made)) == 5
        assert not set(made) & {"", "a b", "x" * 65, "a/b", "é"}

    on_stage(main, tmp_path)


def test_each_request_and_each_socket_is_logged_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.log"

    async def main(stage: Stage) -> None:
        token = stage.token()
        await stage.ask("PUT", "/v1/sessions/a", token, json=COUNT, headers={"X-Request-Id": "one"})
        await stage.ask("GET", "/v1/envs?secret=1&token=" + token, headers={"X-Request-Id": "two"})
        async with EnvClient(stage.address, token=token) as client:
            await client.health()
        with pytest.raises(UnauthorizedError):
            async with EnvClient(stage.address, token="ek_nobody"):
                pass
        await anyio.sleep(0.1)

    with closing(access_log(path)) as log:
        on_stage(main, tmp_path, log=log)
    text = path.read_text()
    assert "ek_" not in text
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    lines.sort(key=lambda line: line["method"] == "WS")  # a socket is logged when the server notices its close
    assert [(line["method"], line["path"], line["status"], line["tenant"]) for line in lines] == [
        ("PUT", "/v1/sessions/a", 200, "acme"),
        ("GET", "/v1/envs", 401, ""),
        ("WS", "/v1/ws", 101, "acme"),
        ("WS", "/v1/ws", 401, ""),
    ]
    assert [line["id"] for line in lines[:2]] == ["one", "two"]
    assert {datetime.fromisoformat(line["time"]).timestamp() - line["at"] for line in lines} == {0}
    assert (lines[0]["session"], lines[0]["in"]) == ("a", len(json.dumps(COUNT, separators=(",", ":"))))
    assert lines[0]["out"] > 50
    assert lines[2]["in"] > 50
    assert lines[3]["out"] > 50
    assert caplog.messages == []
