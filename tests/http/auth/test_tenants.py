"""Tenants: each has its own names, and administrators see those of all."""

from __future__ import annotations

import json
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import anyio
from websockets.asyncio.client import connect

from envkit.http.client.env_client import EnvClient
from tests.http.guarded import COUNT, LONG, Stage, on_stage


def test_sessions_with_equal_ids_of_two_tenants_are_separate(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, umbrella = stage.token("acme"), stage.token("umbrella")
        for token, seed in ((acme, 1), (umbrella, 2)):
            created = await stage.ask("PUT", "/v1/sessions/a", token, json={**COUNT, "seed": seed})
            assert created.json()["observation"] == f"seed {seed}"
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
        listed = [(await stage.ask("GET", "/v1/sessions", token)).json()["sessions"] for token in (acme, umbrella)]
        assert [[one["session_id"] for one in sessions] for sessions in listed] == [["a", "only-acmes"], ["a"]]
        assert [one["turn"] for one in listed[0]] == [1, 0]

    on_stage(main, tmp_path)


def test_an_administrator_lists_plays_and_deletes_the_sessions_of_all_tenants(tmp_path: Path) -> None:
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


def test_errors_use_the_callers_names(tmp_path: Path) -> None:
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
        run = {"argv": ["true"], "timeout_s": 1}
        wrong += [
            await stage.ask("PUT", "/v1/sessions/a", token, json={**COUNT, "seed": 8}),
            await stage.ask("PUT", "/v1/sandboxes/a", token, json={"memory_mib": 1}),
            await stage.ask("GET", "/v1/sandboxes/a/files?path=/none", token),
        ]
        assert wrong[-1].json()["detail"] == "/none: there is no such file"
        await stage.ask("DELETE", "/v1/sandboxes/a", token)
        wrong.append(await stage.ask("POST", "/v1/sandboxes/a/exec", token, json=run))
        for answer in wrong:
            assert "acme:" not in answer.text
            assert "fake-" not in answer.text
        assert wrong[-1].json()["fields"]["sandbox_id"] == "a"

    on_stage(main, tmp_path, has_sandboxes=True)


def test_sandboxes_with_equal_ids_of_two_tenants_are_separate(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, umbrella = stage.token("acme", "sandbox"), stage.token("umbrella", "sandbox")
        for token, whose in ((acme, "acme"), (umbrella, "umbrella")):
            await stage.ask("PUT", "/v1/sandboxes/a", token, json={})
            path, headers = "/v1/sandboxes/a/files?path=whose", {"Idempotency-Key": "k"}
            written = await stage.ask("PUT", path, token, content=whose, headers=headers)
            assert written.json() == {"done": True}
        snapshot = (await stage.ask("POST", "/v1/sandboxes/a/snapshot", acme)).json()["snapshot"]
        assert (await stage.ask("GET", "/v1/snapshots", umbrella)).json() == {"snapshots": []}
        await stage.ask("DELETE", f"/v1/snapshots/{snapshot}", umbrella)
        assert len((await stage.ask("GET", "/v1/snapshots", acme)).json()["snapshots"]) == 1
        for token, whose in ((acme, "acme"), (umbrella, "umbrella")):
            assert (await stage.ask("GET", "/v1/sandboxes/a/files?path=whose", token)).text == whose
            listed = (await stage.ask("GET", "/v1/sandboxes", token)).json()["sandboxes"]
            assert [(one["sandbox_id"], one["tenant"]) for one in listed] == [("a", whose)]
        for name in ("acme:a", ":a", "::a", "::acme:a"):
            run = {"argv": ["true"], "timeout_s": 1}
            assert (await stage.ask("POST", f"/v1/sandboxes/{name}/exec", umbrella, json=run)).status_code in (400, 404)
            assert (await stage.ask("PUT", f"/v1/sandboxes/{name}", umbrella, json={})).status_code in (400, 404)
            await stage.ask("DELETE", f"/v1/sandboxes/{name}", umbrella)
        await stage.ask("DELETE", "/v1/sandboxes/a", umbrella)
        assert (await stage.ask("GET", "/v1/sandboxes/a", acme)).json()["state"] == "leased"
        admin = stage.token("ops", "admin")
        assert (await stage.ask("DELETE", "/v1/sandboxes/acme:a", admin)).json() == {"done": True}
        assert (await stage.ask("GET", "/v1/sandboxes/a", acme)).json()["state"] == "stopped"

    on_stage(main, tmp_path, has_sandboxes=True)


def test_the_socket_of_a_tenant_keeps_its_sessions_alive(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        async with EnvClient(stage.address, token=stage.token()) as client, client.lease(LONG) as episode:
            await episode.reset()
            await anyio.sleep(1.5)  # three times the ttl of an unused session
            assert (await episode.step("x")).observation.text == "1 x"

    on_stage(main, tmp_path, ttl_s=0.5)


def test_an_administrator_inspects_and_deletes_the_sessions_of_others_over_a_socket(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, admin = stage.token("acme"), stage.token("ops", "admin")

        async def ask_socket(token: str, method: str, session_id: str) -> dict[str, Any]:
            headers = {"Authorization": f"Bearer {token}"}
            async with connect(f"{stage.address.replace('http', 'ws')}/v1/ws", additional_headers=headers) as socket:
                params = {"session_id": session_id}
                await socket.send(json.dumps({"id": 1, "method": method, "params": params}))
                answer: dict[str, Any] = json.loads(await socket.recv())
                return answer

        await stage.ask("PUT", "/v1/sessions/a", acme, json=COUNT)
        assert (await ask_socket(admin, "session", "acme:a"))["result"]["session_id"] == "acme:a"
        assert (await ask_socket(admin, "session", "acme:a b"))["error"]["type"] == "bad_request"
        assert (await ask_socket(acme, "session", "acme:a"))["error"]["type"] == "session_not_found"
        assert "result" in await ask_socket(stage.token("umbrella"), "delete", "acme:a")
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).status_code == 200
        assert "result" in await ask_socket(admin, "delete", "acme:a")
        assert (await stage.ask("GET", "/v1/sessions/a", acme)).status_code == 404

    on_stage(main, tmp_path)


def test_a_client_gets_its_tenants_limit_as_its_capacity_and_waits_for_its_own_slots(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        acme, umbrella = stage.token("acme"), stage.token("umbrella")
        async with EnvClient(stage.address, token=acme) as client:
            assert client.capacity == 4  # half of the 8 slots
            async with AsyncExitStack() as leases:
                for _ in range(4):
                    await leases.enter_async_context(client.lease(LONG))
                ready = await client.ready()
                assert (ready.ready, ready.capacity, ready.leased, ready.limit) == (False, 8, 4, 4)
                assert ready.why == "this tenant uses 4 of 8 episode slots (its limit)"
                async with EnvClient(stage.address, token=umbrella) as other:
                    assert (await other.ready()).ready
                without_token = (await stage.ask("GET", "/v1/ready")).json()
                assert (without_token["ready"], without_token.get("limit")) == (True, None)
                with anyio.move_on_after(0.3) as waited:
                    async with client.lease(LONG):
                        pass
                assert waited.cancelled_caught
                assert client.queued == 0
            async with client.lease(LONG):
                pass

    on_stage(main, tmp_path, tenant_share=0.5)
