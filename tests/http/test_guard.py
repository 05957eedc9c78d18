"""The guard, before a real server: who is let in, to what, how often, and until when."""

from __future__ import annotations

import json
import logging
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidStatus

from envkit import clock
from envkit.errors import ForbiddenError, RateLimitError, UnauthorizedError
from envkit.http.access_log import AccessLog
from envkit.http.asgi import Message, Receive, Scope, Send
from envkit.http.client import EnvClient
from envkit.http.guard import Guard, scope_for
from envkit.http.rates import Rate
from envkit.http.server import serve
from envkit.http.tokens import TokenStore
from envkit.types import Task
from tests.http.guarded import Stage, on_stage

COUNT = {"env_id": "Count-v0", "seed": 7}
LONG = Task("Count-v0", 1, {"end": 10_000})


@pytest.mark.parametrize(
    ("path", "scope"),
    [
        ("/v1/health", None),
        ("/v1/ready", None),
        ("/v1/sessions", "play"),
        ("/v1/sessions/a/step", "play"),
        ("/v1/sessions:step", "play"),
        ("/v1/ws", ""),
        ("/v1/envs", "play"),
        ("/v1/sandboxes", "sandbox"),
        ("/v1/sandboxes/a/exec", "sandbox"),
        ("/v1/sandboxes:exec", "sandbox"),
        ("/v1/events", "admin"),
        ("/v1/health/", "admin"),
        ("/v1/what-comes-next-year", "admin"),
        ("/metrics", "metrics"),
        ("/openapi.json", None),
        ("/docs", ""),
        ("/openapi.json/more", ""),
        ("/", ""),
    ],
)
def test_each_path_has_its_scope_and_what_nobody_thought_of_is_for_administrators(path: str, scope: str | None) -> None:
    assert scope_for(path) == scope


def test_without_a_token_only_signs_of_life_and_the_document_are_given(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        for path in ("/v1/health", "/v1/ready", "/openapi.json"):
            assert (await stage.ask("GET", path)).status_code == 200
        for path in ("/v1/sessions", "/v1/envs", "/metrics", "/docs", "/redoc", "/nothing"):
            refused = await stage.ask("GET", path)
            assert (refused.status_code, refused.headers["www-authenticate"]) == (401, "Bearer")
            assert refused.headers["content-type"] == "application/problem+json"
            assert refused.json()["type"] == "unauthorized"

    on_stage(main, tmp_path)


@pytest.mark.parametrize("value", ["", "Bearer", "Basic {}", "{}", "Bearer {}A", "Bearer  x y", "Bearer \xe9"])
def test_a_header_that_is_not_quite_right_opens_nothing(tmp_path: Path, value: str) -> None:
    async def main(stage: Stage) -> None:
        header = value.format(stage.token()).encode("latin-1")
        answer = await stage.http.get("/v1/envs", headers=[(b"authorization", header)])
        assert answer.status_code == 401

    on_stage(main, tmp_path)


def test_a_token_opens_what_it_is_for_and_nothing_else(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        paths = ("/v1/envs", "/v1/sandboxes", "/metrics", "/v1/events", "/openapi.json")
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
            "this needs a token with the scope metrics; this one has play",
        )

    on_stage(main, tmp_path)


def test_tenants_play_sessions_of_the_same_name_and_never_meet(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, umbrella = stage.token("acme"), stage.token("umbrella")
        for token, seed in ((acme, 1), (umbrella, 2)):
            made = await stage.ask("PUT", "/v1/sessions/a", token, json={**COUNT, "seed": seed})
            assert made.json()["observation"] == f"seed {seed}"
        step = await stage.ask("POST", "/v1/sessions/a/step", acme, json={"turn": 0, "action": "x"})
        assert step.json()["turn"] == 1
        batch = [{"session_id": "a", "turn": 0, "action": "x"}]
        assert (await stage.ask("POST", "/v1/sessions:step", umbrella, json=batch)).json()[0]["result"]["turn"] == 1
        await stage.ask("PUT", "/v1/sessions/only-acmes", acme, json=COUNT)
        for id in ("only-acmes", "acme:only-acmes", "acme:a"):
            for verb, rest in (("GET", ""), ("POST", "/step")):
                answer = await stage.ask(verb, f"/v1/sessions/{id}{rest}", umbrella, json={"turn": 0, "action": "x"})
                assert (answer.status_code, answer.json()["type"]) == (404, "session_not_found")
            await stage.ask("DELETE", f"/v1/sessions/{id}", umbrella)
        seen = [(await stage.ask("GET", "/v1/sessions", token)).json()["sessions"] for token in (acme, umbrella)]
        assert [[one["session_id"] for one in sessions] for sessions in seen] == [["a", "only-acmes"], ["a"]]
        assert [one["turn"] for one in seen[0]] == [1, 0]

    on_stage(main, tmp_path)


def test_an_administrator_sees_ends_and_plays_the_sessions_of_all(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, admin = stage.token("acme"), stage.token("ops", "admin")
        await stage.ask("PUT", "/v1/sessions/a", acme, json=COUNT)
        await stage.ask("PUT", "/v1/sessions/a", admin, json=COUNT)
        sessions = (await stage.ask("GET", "/v1/sessions", admin)).json()["sessions"]
        assert [one["session_id"] for one in sessions] == ["acme:a", "a"]
        step = await stage.ask("POST", "/v1/sessions/acme:a/step", admin, json={"turn": 0, "action": "x"})
        assert step.json()["turn"] == 1
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).json()["turn"] == 1
        await stage.ask("DELETE", "/v1/sessions/acme:a", admin)
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).status_code == 404
        assert (await stage.ask("GET", "/v1/sessions/a", admin)).status_code == 200

    on_stage(main, tmp_path)


def test_errors_call_things_as_their_caller_does(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token("acme", "play,sandbox")
        wrong = [
            await stage.ask("GET", "/v1/sessions/x", token),
            await stage.ask("POST", "/v1/sessions/x/step", token, json={"turn": 0, "action": "x"}),
            await stage.ask("GET", "/v1/sandboxes/x", token),
            await stage.ask("POST", "/v1/sandboxes/x/exec", token, json={"argv": ["true"], "timeout_s": 1}),
        ]
        await stage.ask("PUT", "/v1/sessions/a", token, json=COUNT)
        await stage.ask("PUT", "/v1/sandboxes/a", token, json={})
        run = {"argv": ["true"], "timeout_s": 1, "sandbox_id": "a"}
        wrong += [
            await stage.ask("PUT", "/v1/sessions/a", token, json={**COUNT, "seed": 8}),
            await stage.ask("PUT", "/v1/sandboxes/a", token, json={"memory_mib": 1}),
            await stage.ask("GET", "/v1/sandboxes/a/files?path=/none", token),
        ]
        assert wrong[-1].json()["detail"] == "a: /none: there is no such file"
        await stage.ask("DELETE", "/v1/sandboxes/a", token)
        wrong.append(await stage.ask("POST", "/v1/sandboxes/a/exec", token, json=run | {"sandbox_id": "a"}))
        wrong.append(await stage.ask("POST", "/v1/sandboxes:exec", token, json=[run]))
        for answer in wrong:
            assert "acme:" not in answer.text
            assert "fake-" not in answer.text
        assert wrong[-1].json()[0]["error"]["fields"]["sandbox_id"] == "a"

    on_stage(main, tmp_path, has_sandboxes=True)


def test_sandboxes_that_were_made_without_tokens_are_an_administrators(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        await stage.ask("PUT", "/v1/sandboxes/x", json={})
        admin = stage.token("ops", "admin")
        await anyio.sleep(0.1)
        await stage.ask("PUT", "/v1/sandboxes/x", admin, json={})
        seen = (await stage.ask("GET", "/v1/sandboxes", admin)).json()["sandboxes"]
        assert [one["sandbox_id"] for one in seen] == [":x", "x"]
        run = {"argv": ["echo"], "timeout_s": 1}
        assert (await stage.ask("POST", "/v1/sandboxes/:x/exec", admin, json=run)).json()["exit_code"] == 0
        assert (await stage.ask("DELETE", "/v1/sandboxes/:x", admin)).json() == {"done": True}
        seen = (await stage.ask("GET", "/v1/sandboxes", admin)).json()["sandboxes"]
        assert [(one["sandbox_id"], one["state"]) for one in seen] == [(":x", "stopped"), ("x", "leased")]
        async with stage.http.stream("GET", "/v1/events", headers={"Authorization": f"Bearer {admin}"}) as events:
            async for line in events.aiter_lines():
                if line.startswith("data:"):
                    assert json.loads(line[5:])["sandbox_id"] == ":x"
                    break

    on_stage(main, tmp_path, has_tokens=False, has_sandboxes=True)


def test_errors_of_a_tenants_session_know_its_turn_and_world(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        await stage.ask("PUT", "/v1/sessions/a", token, json=COUNT)
        await stage.ask("POST", "/v1/sessions/a/step", token, json={"turn": 0, "action": "x"})
        late = await stage.ask("POST", "/v1/sessions/a/step", token, json={"turn": 5, "action": "x"})
        assert (late.status_code, late.json()["turn"]) == (409, 1)
        odd = await stage.ask("POST", "/v1/sessions/a/step", token, json={"turn": 1, "action": "odd"})
        assert odd.json()["fields"]["env_id"] == "Count-v0"

    on_stage(main, tmp_path)


def test_clients_play_over_sockets_as_their_tenants_and_keep_their_sessions_alive(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with (
            EnvClient(stage.address, token=stage.token("acme")) as acme,
            EnvClient(stage.address, token=stage.token("umbrella")) as umbrella,
            acme.lease(LONG) as first,
            umbrella.lease(LONG) as second,
        ):
            await first.reset()
            await second.reset()
            await anyio.sleep(1.5)  # three times what a session lives that nobody uses
            assert (await first.step("x")).observation.text == "1 x"
            assert (await second.step("y")).observation.text == "1 y"
            admin = stage.token("ops", "admin")
            sessions = (await stage.ask("GET", "/v1/sessions", admin)).json()["sessions"]
            assert [one["session_id"].partition(":")[0] for one in sessions] == ["acme", "umbrella"]

    on_stage(main, tmp_path, ttl_s=0.5)


def test_a_client_with_a_wrong_token_is_told_at_once(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        began = clock.now()
        for token, error in ((None, "this needs a token"), ("ek_x", "the token is not valid")):
            with pytest.raises(UnauthorizedError, match=f"{stage.address}: {error}"):
                async with EnvClient(stage.address, token=token):
                    pass
        assert clock.now() - began < 10

    on_stage(main, tmp_path)


def test_over_a_socket_each_frame_needs_its_scope(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address, token=stage.token("acme", "sandbox")) as client:
            assert (await client.health()).status == "alive"
            with pytest.raises(ForbiddenError, match="the scope play; this one has sandbox"):
                await client.envs()
            with pytest.raises(ForbiddenError, match="the scope play; this one has sandbox"):
                async with client.lease(LONG):
                    pass
        async with EnvClient(stage.address, token=stage.token("ops", "admin")) as client, client.lease(LONG) as episode:
            await episode.reset()
            assert (await episode.step("x")).observation.text == "1 x"

    on_stage(main, tmp_path)


def test_a_revoked_token_ends_requests_and_open_sockets(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        async with EnvClient(stage.address, token=token) as client:
            await client.health()
            stage.tokens.revoke(token.split("_")[1])
            await anyio.sleep(0.1)
            assert (await stage.ask("GET", "/v1/envs", token)).status_code == 401
            for _ in range(2):
                with pytest.raises(UnauthorizedError, match="the token is not valid"):
                    await client.health()

    on_stage(main, tmp_path)


def test_an_administrator_looks_at_and_ends_the_sessions_of_others_over_a_socket(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, admin = stage.token("acme"), stage.token("ops", "admin")

        async def said(token: str, method: str, session_id: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            async with connect(f"{stage.address.replace('http', 'ws')}/v1/ws", additional_headers=headers) as socket:
                params = {"session_id": session_id}
                await socket.send(json.dumps({"id": 1, "method": method, "params": params}))
                answer: dict[str, Any] = json.loads(await socket.recv())
                return answer

        await stage.ask("PUT", "/v1/sessions/a", acme, json=COUNT)
        assert (await said(admin, "session", "acme:a"))["result"]["session_id"] == "acme:a"
        assert (await said(admin, "session", "acme:a b"))["error"]["type"] == "bad_request"
        assert (await said(acme, "session", "acme:a"))["error"]["type"] == "session_not_found"
        assert "result" in await said(stage.token("umbrella"), "delete", "acme:a")
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).status_code == 200
        assert "result" in await said(admin, "delete", "acme:a")
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).status_code == 404

    on_stage(main, tmp_path)


def test_requests_beyond_the_rate_of_a_tenant_are_told_when_to_come_again(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, same, umbrella = stage.token("acme"), stage.token("acme"), stage.token("umbrella")
        statuses = [(await stage.ask("GET", "/v1/envs", token)).status_code for token in (acme, same, acme, umbrella)]
        assert statuses == [200, 200, 200, 200]
        refused = await stage.ask("GET", "/v1/envs", same)
        assert (refused.status_code, refused.json()["type"], refused.json()["retry"]) == (429, "rate_limit", True)
        assert 9 <= int(refused.headers["retry-after"]) <= 10
        assert (await stage.ask("GET", "/v1/health")).status_code == 200

    on_stage(main, tmp_path, rate=Rate(per_s=0.1, burst=3))


def test_a_batch_counts_as_many_calls_as_it_has_steps(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        await stage.ask("PUT", "/v1/sessions/a", token, json=COUNT)
        batch = [{"session_id": "a", "turn": 0, "action": "x"}] * 8
        assert (await stage.ask("POST", "/v1/sessions:step", token, json=batch)).status_code == 200
        refused = await stage.ask("POST", "/v1/sessions:step", token, json=batch[:2])
        assert (refused.status_code, int(refused.headers["retry-after"]) > 5) == (429, True)

    on_stage(main, tmp_path, rate=Rate(per_s=0.1, burst=10))


def test_who_runs_too_many_programs_at_once_is_told_how_long_to_wait(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token(scopes="sandbox")
        await stage.ask("PUT", "/v1/sandboxes/a", token, json={})
        programs = [{"sandbox_id": "a", "argv": ["true"], "timeout_s": 5}] * 8
        assert (await stage.ask("POST", "/v1/sandboxes:exec", token, json=programs)).status_code == 200
        refused = await stage.ask("POST", "/v1/sandboxes:exec", token, json=programs[:3])
        assert (refused.status_code, int(refused.headers["retry-after"]) > 5) == (429, True)

    on_stage(main, tmp_path, has_sandboxes=True, rate=Rate(per_s=0.1, burst=10))


def test_a_socket_that_sends_too_fast_is_slowed_and_nothing_is_refused(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address, token=stage.token()) as client, client.lease(LONG) as episode:
            await episode.reset()
            began = clock.now()
            for turn in range(40):
                assert (await episode.step("x")).observation.text == f"{turn + 1} x"
            assert 0.2 < clock.now() - began < 15

    on_stage(main, tmp_path, rate=Rate(per_s=100, burst=10))


def test_a_tenant_may_have_so_many_sockets_and_others_theirs(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme = stage.token("acme")
        async with EnvClient(stage.address, token=acme), EnvClient(stage.address, token=acme):
            with pytest.raises(RateLimitError, match="2 sockets are open"):
                async with EnvClient(stage.address, token=acme):
                    pass
            async with EnvClient(stage.address, token=stage.token("umbrella")):
                pass
        while True:  # that they are closed is seen a moment later
            with suppress(RateLimitError):
                async with EnvClient(stage.address, token=acme):
                    return

    on_stage(main, tmp_path, max_sockets=2)


def test_a_tenant_has_no_more_requests_under_way_than_it_may(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, slow = stage.token(), {"env_id": "Sleeper-v0", "seed": 1}
        for name in ("a", "b"):
            await stage.ask("PUT", f"/v1/sessions/{name}", acme, json=slow)
        async with anyio.create_task_group() as tasks:

            async def step(name: str) -> None:
                path = f"/v1/sessions/{name}/step"
                answer = await stage.ask("POST", path, acme, json={"turn": 0, "action": "sleep 2"})
                assert answer.status_code == 200

            for name in ("a", "b"):
                tasks.start_soon(step, name)
            states: list[str] = []
            while states != ["stepping"] * 2:
                seen = (await stage.ask("GET", "/v1/sessions", stage.token("ops", "admin"))).json()["sessions"]
                states = [one["state"] for one in seen]
            refused = await stage.ask("GET", "/v1/envs", acme)
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert (await stage.ask("GET", "/v1/envs", stage.token("umbrella"))).status_code == 200
        assert (await stage.ask("GET", "/v1/envs", acme)).status_code == 200

    on_stage(main, tmp_path, max_requests=2)


def test_without_tokens_everybody_may_do_everything(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        await stage.ask("PUT", "/v1/sessions/a", json=COUNT)
        assert (await stage.ask("GET", "/v1/sessions", "ek_whatever")).json()["sessions"][0]["session_id"] == "a"
        assert (await stage.ask("GET", "/metrics")).status_code == 200
        async with EnvClient(stage.address) as client:
            assert (await client.ready()).leased == 1

    on_stage(main, tmp_path, has_tokens=False)


def test_every_answer_names_its_request(tmp_path: Path) -> None:
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


def test_each_request_and_each_socket_is_a_line_without_secrets(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "access.log"
    log = AccessLog.to(path)

    async def main(stage: Stage) -> None:
        token = stage.token()
        await stage.ask("PUT", "/v1/sessions/a?secret=1", token, json=COUNT, headers={"X-Request-Id": "one"})
        await stage.ask("GET", "/v1/envs?token=" + token, headers={"X-Request-Id": "two"})
        async with EnvClient(stage.address, token=token) as client:
            await client.health()
        with pytest.raises(UnauthorizedError):
            async with EnvClient(stage.address, token="ek_nobody"):
                pass
        await anyio.sleep(0.1)

    on_stage(main, tmp_path, log=log)
    log.close()
    text = path.read_text()
    assert "ek_" not in text
    assert "secret" not in text
    lines = [json.loads(line) for line in text.splitlines()]
    lines.sort(key=lambda line: line["method"] == "WS")  # a socket's line comes when the server has seen it close
    assert [(line["method"], line["path"], line["status"], line["tenant"]) for line in lines] == [
        ("PUT", "/v1/sessions/a", 400, "acme"),
        ("GET", "/v1/envs", 401, ""),
        ("WS", "/v1/ws", 101, "acme"),
        ("WS", "/v1/ws", 401, ""),
    ]
    assert [line["id"] for line in lines[:2]] == ["one", "two"]
    assert (lines[0]["session"], lines[0]["in"]) == ("a", len(json.dumps(COUNT, separators=(",", ":"))))
    assert lines[0]["out"] > 50
    assert (lines[2]["messages_in"], lines[2]["messages_out"]) == (2, 2)
    assert lines[2]["in"] > 50
    assert lines[3]["out"] > 50
    assert caplog.messages == []


class Stream:
    """An application that streams without end, until its client goes."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            while True:
                await send({"type": "http.response.body", "body": bytes(1 << 14), "more_body": True})
        except OSError as error:
            raise RuntimeError("gone") from error  # as frameworks do

    async def drain(self, timeout_s: float) -> None:
        pass


def test_a_stream_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    async def main() -> None:
        sent: list[Message] = []
        with TokenStore(tmp_path / "tokens.sqlite", fresh_s=0) as tokens:
            token = tokens.create("ops", ["admin"], "ops")

            async def send(message: Message) -> None:
                sent.append(message)
                if len(sent) == 5:
                    tokens.revoke("ops")

            async def receive() -> Message:
                raise AssertionError("a stream reads nothing")

            headers = [(b"authorization", f"Bearer {token}".encode())]
            scope: Scope = {"type": "http", "path": "/v1/events", "method": "GET", "headers": headers}
            await Guard(Stream(), tokens)(scope, receive, send)
        assert [message.get("more_body", False) for message in sent] == [
            False,
            True,
            True,
            True,
            True,
        ]  # no end, so it breaks off

    clock.run(main)


def test_who_follows_the_events_with_a_revoked_token_is_left_without_a_word(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(stage: Stage) -> None:
        follower, admin = stage.token("ops", "admin", name="follower"), stage.token("ops", "admin")
        headers = {"Authorization": f"Bearer {follower}"}
        async with stage.http.stream("GET", "/v1/events", headers=headers) as stream:
            assert stream.status_code == 200
            stage.tokens.revoke("follower")
            await anyio.sleep(0.1)
            await stage.ask("PUT", "/v1/sandboxes/a", admin, json={})
            with pytest.raises(httpx.RemoteProtocolError):
                await stream.aread()

    on_stage(main, tmp_path, has_sandboxes=True)
    assert caplog.messages == []


def test_a_stream_that_is_cut_does_not_look_complete(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Served(Stream):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http":
                await super().__call__(scope, receive, send)
                return
            for phase in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{phase}.complete"})

    async def main() -> None:
        addresses: list[str] = []
        is_ready = anyio.Event()

        def on_ready(address: str) -> None:
            addresses.append(address)
            is_ready.set()

        with TokenStore(tmp_path / "tokens.sqlite", fresh_s=0.05) as tokens:
            headers = {"Authorization": f"Bearer {tokens.create('ops', ['admin'], 'ops')}"}
            async with anyio.create_task_group() as tasks:
                run = partial(serve, port=0, on_ready=on_ready, handle_signals=False, drain_s=1)
                tasks.start_soon(run, Guard(Served(), tokens))
                await is_ready.wait()
                async with (
                    httpx.AsyncClient(base_url=addresses[0], trust_env=False) as client,
                    client.stream("GET", "/v1/events", headers=headers) as stream,
                ):
                    pieces = stream.aiter_raw()
                    await anext(pieces)
                    tokens.revoke("ops")
                    with pytest.raises(httpx.RemoteProtocolError, match="incomplete chunked read"):
                        async for _ in pieces:
                            pass
                tasks.cancel_scope.cancel()

    clock.run(main)
    assert caplog.messages == []


PAGES = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://evil.example", "Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
]


@pytest.mark.parametrize("headers", PAGES, ids=str)
def test_without_tokens_no_web_page_of_others_is_heard(tmp_path: Path, headers: dict[str, str]) -> None:
    async def main(stage: Stage) -> None:
        refused = await stage.ask("PUT", "/v1/sessions/a", json=COUNT, headers=headers)
        assert (refused.status_code, refused.json()["type"]) == (403, "forbidden")
        assert "envkit token create" in refused.json()["detail"]
        with pytest.raises(InvalidStatus) as caught:
            await _socket(stage, headers)
        assert caught.value.response.status_code == 403
        assert (await stage.ask("GET", "/v1/sessions")).json() == {"sessions": []}

    on_stage(main, tmp_path, has_tokens=False)


def test_without_tokens_our_own_pages_and_programs_of_the_machine_are_heard(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        port = stage.address.rpartition(":")[2]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}", "127.1.2.3", f"[::1]:{port}"):
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                assert (await stage.ask("GET", "/v1/envs", headers=headers)).status_code == 200, headers
        async with await _socket(stage, {"Origin": stage.address}):
            pass

    on_stage(main, tmp_path, has_tokens=False)


def test_with_a_token_any_page_and_name_will_do(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        for headers in PAGES:
            assert (await stage.ask("GET", "/v1/envs", token, headers=headers)).status_code == 200
            assert (await stage.ask("GET", "/v1/envs", headers=headers)).status_code == 401

    on_stage(main, tmp_path)


async def _socket(stage: Stage, headers: dict[str, str]) -> ClientConnection:
    """Open a socket as a page or program that sends such headers."""
    host = headers.get("Host", stage.address.removeprefix("http://"))
    more = {name: value for name, value in headers.items() if name != "Host"}
    port = int(stage.address.rpartition(":")[2])
    return await connect(f"ws://{host}/v1/ws", host="127.0.0.1", port=port, additional_headers=more, proxy=None)


def test_from_the_first_token_on_everybody_needs_one(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address) as client, client.lease(LONG) as episode:
            await episode.reset()
            await stage.ask("PUT", "/v1/sessions/mine", json=COUNT)
            admin = stage.token("ops", "admin", name="ops")
            await anyio.sleep(0.1)
            assert (await stage.ask("GET", "/v1/sessions")).status_code == 401
            with pytest.raises(UnauthorizedError):
                await episode.step("x")
            names = {one["session_id"] for one in (await stage.ask("GET", "/v1/sessions", admin)).json()["sessions"]}
            assert ":mine" in names
            step = await stage.ask("POST", "/v1/sessions/:mine/step", admin, json={"turn": 0, "action": "x"})
            assert step.json()["turn"] == 1
            await stage.ask("DELETE", "/v1/sessions/:mine", admin)
            assert (await stage.ask("GET", "/v1/sessions/:mine", admin)).status_code == 404
            stage.tokens.revoke("ops")
            await anyio.sleep(0.1)
            assert (await stage.ask("GET", "/v1/sessions")).status_code == 401

    on_stage(main, tmp_path, has_tokens=False)


def test_a_revoked_token_ends_a_socket_over_which_nothing_goes(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        async with await _socket(stage, {"Authorization": f"Bearer {token}"}) as socket:
            stage.tokens.revoke(token.split("_")[1])
            with anyio.fail_after(10), pytest.raises(ConnectionClosed, match="the token was revoked"):
                await socket.recv()

    on_stage(main, tmp_path)


def test_what_the_guard_refuses_is_counted(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token("acme", "metrics")
        await stage.ask("GET", "/v1/envs")
        await stage.ask("GET", "/v1/envs", token)
        await stage.ask("GET", "/v1/envs", token)
        await stage.ask("GET", "/v1/envs", token)
        lines = (await stage.ask("GET", "/metrics", stage.token("ops", "metrics"))).text.splitlines()
        assert {line for line in lines if line.startswith("envkit_errors_total")} == {
            'envkit_errors_total{code="forbidden"} 3.0',
            'envkit_errors_total{code="unauthorized"} 1.0',
        }

    on_stage(main, tmp_path)


def test_a_list_of_nothing_is_a_call_like_any_other(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        statuses = [(await stage.ask("POST", "/v1/sessions:step", token, json=[])).status_code for _ in range(4)]
        assert statuses == [200, 200, 200, 429]

    on_stage(main, tmp_path, rate=Rate(per_s=0.1, burst=3))


def test_an_application_that_breaks_is_written_down_and_its_error_is_not_hidden(tmp_path: Path) -> None:
    class Broken(Stream):
        async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
            raise RuntimeError("broken")

    lines: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(self.format(record))

    async def main() -> None:
        async def receive() -> Message:
            raise AssertionError("it reads nothing")

        async def send(message: Message) -> None:
            raise AssertionError("it sends nothing")

        scope: Scope = {"type": "http", "path": "/v1/envs", "method": "GET", "headers": []}
        with AccessLog(Kept()) as log, pytest.raises(RuntimeError, match="broken"):
            await Guard(Broken(), log=log)(scope, receive, send)

    clock.run(main)
    assert json.loads(*lines)["status"] == 500
