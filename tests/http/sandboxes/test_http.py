"""Sandboxes over plain HTTP."""

from __future__ import annotations

import json
from functools import partial

import anyio
import httpx
import pytest

from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.pool import Pool
from envkit.types import SandboxSpec
from tests.http.remote_sandboxes import A, over_http, run
from tests.http.stage import over_http as without_pool


def test_a_sandbox_is_created_used_inspected_and_stopped() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        made = await client.put(A, json={"memory_mib": 64, "env": {"SIZE": "5"}})
        assert (made.status_code, made.json()["state"], made.json()["backend_id"]) == (200, "leased", "fake-0")
        assert (made.json()["spec"]["memory_mib"], made.json()["spec"]["env"]) == (64, {"SIZE": "5"})
        again = await client.put(A, json={"memory_mib": 64, "env": {"SIZE": "5"}})
        assert again.json() | {"expires_at_s": 0} == made.json() | {"expires_at_s": 0}
        other = await client.put(A, json={"memory_mib": 65})
        assert (other.status_code, other.json()["type"]) == (409, "sandbox_conflict")
        done = await client.post(f"{A}/exec", json=run("echo", "hi", stdin="Z28="))
        assert (done.status_code, done.json()["exit_code"], done.json()["stdout"]) == (200, 0, "echo higo")
        assert [one["sandbox_id"] for one in (await client.get("/v1/sandboxes")).json()["sandboxes"]] == ["a"]
        for _ in range(2):
            assert (await client.delete(A)).json() == {"done": True}
        looked = (await client.get(A)).json()
        assert [phase["state"] for phase in looked["phases"]] == ["starting", "leased", "stopped"]
        stopped = {"kind": "stopped", "detail": "stopped", "by_agent": False}
        assert [phase["cause"] for phase in looked["phases"]] == [None, None, stopped]
        lost = await client.post(f"{A}/exec", json=run("echo"))
        assert (lost.status_code, lost.json()["type"], lost.json()["fields"]["cause"]) == (
            503,
            "sandbox_lost",
            stopped,
        )
        assert (await client.get("/v1/sandboxes/b")).status_code == 404

    over_http(main)


def test_clients_see_the_servers_own_sandboxes_but_cannot_use_or_stop_them() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await pool.create(":envs-shared-1", SandboxSpec())
        path = "/v1/sandboxes/:envs-shared-1"
        for call in (
            client.post(f"{path}/exec", json=run("echo")),
            client.post(f"{path}/exec", json=run("echo"), headers={"Idempotency-Key": "k"}),
            client.get(f"{path}/files?path=a"),
            client.delete(path),
        ):
            answer = await call
            assert (answer.status_code, answer.json()["type"]) == (404, "sandbox_not_found")
        assert (await client.get(path)).json()["state"] == "leased"

    over_http(main)


def test_utf8_output_is_sent_as_text_and_other_output_as_base64() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        done = (await client.post(f"{A}/exec", json=run("bytes"))).json()
        assert (done["exit_code"], done["stdout"], done["stderr"]) == (3, "text \N{SNOWMAN}", {"base64": "/wA="})
        assert (done["is_out_of_memory"], done["timed_out"]) == (True, False)
        odd = await client.post(f"{A}/exec", json=run("echo", {"base64": "/w=="}))
        assert odd.json()["stdout"] == {"base64": "ZWNobyD/"}

    over_http(main)


def test_the_same_key_with_the_same_body_runs_once() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        post = partial(client.post, headers={"Idempotency-Key": "k-1"})
        for _ in range(3):
            assert (await post(f"{A}/exec", json=run("count"))).json()["stdout"] == "1"
        other = await post(f"{A}/exec", json=run("count", "0"))
        assert (other.status_code, other.json()["type"]) == (409, "sandbox_conflict")
        assert (await post(f"{A}/shells/main", json={"command": "count", "timeout_s": 5})).status_code == 409
        assert (await client.post(f"{A}/exec", json=run("count"))).json()["stdout"] == "2"
        answers = []

        async def call() -> None:
            headers = {"Idempotency-Key": "k-2"}
            answers.append((await client.post(f"{A}/exec", json=run("count", "0.2"), headers=headers)).text)

        async with anyio.create_task_group() as tasks:
            for _ in range(5):
                tasks.start_soon(call)
        assert len(set(answers)) == 1
        kept = [await post(f"{A}/snapshot", headers={"Idempotency-Key": "k-3"}) for _ in range(2)]
        assert kept[0].json() == kept[1].json()
        bad = await client.post(f"{A}/exec", json=run("count"), headers={"Idempotency-Key": "two words"})
        assert bad.status_code == 400

    over_http(main)


async def left(client: httpx.AsyncClient, path: str, body: object, **headers: str) -> None:
    """Send a request and disconnect."""
    with anyio.move_on_after(0.2):
        await client.post(path, json=body, headers=headers)


@pytest.mark.bwrap
def test_a_disconnect_kills_a_program_unless_it_has_a_key() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        slow = run("sh", "-c", "echo begun >> begun; sleep 1; echo done >> done")
        await left(client, f"{A}/exec", slow)
        await left(client, f"{A}/shells/main", {"command": "sleep 1 && echo done >> done", "timeout_s": 5})
        await left(client, f"{A}/exec", slow, **{"Idempotency-Key": "x"})
        again = await client.post(f"{A}/exec", json=slow, headers={"Idempotency-Key": "x"})
        assert (again.json()["exit_code"], again.json()["duration_s"] > 1) == (0, True)
        assert (await client.get(f"{A}/files?path=done")).content == b"done\n"
        assert (await client.get(f"{A}/files?path=begun")).content == b"begun\n" * 2

    over_http(main, LocalBackend())


def test_shells_keep_their_names_and_can_be_closed() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        done = await client.post(f"{A}/shells/one", json={"command": "echo hi", "timeout_s": 5, "user": "grader"})
        assert done.json()["stdout"] == "echo hi"
        assert (await client.delete(f"{A}/shells/one?user=grader")).json() == {"done": True}
        assert (await client.delete(f"{A}/shells/one?user=nobody")).status_code == 400
        for name in ("a b", "x" * 129, "%ff"):
            asked = await client.post(f"{A}/shells/{name}", json={"command": "echo", "timeout_s": 5})
            assert asked.status_code in (400, 404)

    over_http(main)


@pytest.mark.bwrap
def test_files_are_uploaded_and_downloaded_byte_for_byte() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        content = bytes(range(256)) * 20_000
        assert (await client.put(f"{A}/files?path=deep/file&mode=750", content=content)).json() == {"done": True}
        found = await client.get(f"{A}/files?path=deep/file")
        assert (found.content == content, found.headers["content-type"]) == (True, "application/octet-stream")
        mode = await client.post(f"{A}/exec", json=run("stat", "-c", "%a", "deep/file"))
        assert mode.json()["stdout"] == "750\n"
        assert (await client.put(f"{A}/files?path=%FF%20odd", content=b"x")).status_code == 200
        assert (await client.get(f"{A}/files?path=%FF%20odd")).content == b"x"
        refused = {
            "path=nothing": 404,
            "path=%FE": 404,
            "path=": 400,
            "x=y": 400,
            "path=a%00b": 400,
            "path=deep/file&max_bytes=10": 413,
            "path=deep/file&max_bytes=-1": 400,
        }
        for query, status in refused.items():
            assert (await client.get(f"{A}/files?{query}")).status_code == status, query
        for query, status in {"path=/etc/x": 403, "path=x&mode=1777": 400, "path=x&mode=8": 400}.items():
            assert (await client.put(f"{A}/files?{query}", content=b"x")).status_code == status, query
        assert (await client.put(f"{A}/files?path=x", content=bytes((64 << 20) + 1))).status_code == 413
        headers = {"Idempotency-Key": "w"}
        assert (await client.put(f"{A}/files?path=y", content=b"1", headers=headers)).status_code == 200
        assert (await client.put(f"{A}/files?path=y", content=b"2", headers=headers)).status_code == 409

    over_http(main, LocalBackend())


@pytest.mark.bwrap
def test_folders_are_uploaded_and_downloaded_as_tar_streams() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        await client.post(f"{A}/exec", json=run("sh", "-c", "mkdir -p t/deep; echo x > t/deep/x; ln -s /etc t/out"))
        leads_out = await client.get(f"{A}/tree?path=t")
        assert (leads_out.status_code, leads_out.json()["type"]) == (403, "refused_file")
        stream = (await client.get(f"{A}/tree?path=t/deep")).content
        assert (await client.put(f"{A}/tree?path=copy/deep", content=stream)).json() == {"done": True}
        assert (await client.get(f"{A}/files?path=copy/deep/x")).content == b"x\n"
        assert (await client.put(f"{A}/tree?path=bad", content=b"junk" * 1000)).status_code == 403
        assert (await client.put(f"{A}/tree?path=bad", content=stream[:600])).status_code == 403
        assert (await client.get(f"{A}/tree?path=nothing")).status_code == 404
        assert (await client.get(f"{A}/tree?path=t/deep&max_bytes=1")).status_code == 413

    over_http(main, LocalBackend())


def test_every_call_has_a_timeout() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        late = await client.post(f"{A}/exec", json=run("sleep", "60") | {"timeout_s": 0.2})
        assert (late.json()["timed_out"], late.json()["exit_code"]) == (True, None)
        for timeout_s in (3601, 0, -1, "1", 1e400):
            body = json.dumps({"argv": ["echo"], "timeout_s": timeout_s}).replace("Infinity", "1e999")
            assert (await client.post(f"{A}/exec", content=body)).status_code == 400
        assert (
            "timeout_s must be at most 3600"
            in (await client.post(f"{A}/exec", json=run("x") | {"timeout_s": 3601})).text
        )

    over_http(main)


def test_a_server_without_a_pool_has_no_sandboxes() -> None:
    async def main(client: httpx.AsyncClient) -> None:
        for verb, path in (("PUT", A), ("GET", "/v1/sandboxes"), ("POST", f"{A}/exec")):
            asked = await client.request(verb, path)
            assert asked.status_code == 404
            assert asked.json()["detail"] == "this server lends no sandboxes"
        assert "/v1/sandboxes" not in (await client.get("/openapi.json")).json()["paths"]

    without_pool(main)


def test_snapshots_are_listed_with_their_sizes_and_removed() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        await client.put(f"{A}/files", params={"path": "f"}, content=b"0123456789")
        name = (await client.post(f"{A}/snapshot")).json()["snapshot"]
        (listed,) = (await client.get("/v1/snapshots")).json()["snapshots"]
        seen = {key: listed[key] for key in ("snapshot", "tenant", "sandbox_id", "bytes")}
        assert seen == {"snapshot": name, "tenant": "", "sandbox_id": "a", "bytes": 10}
        for _ in range(2):
            assert (await client.delete(f"/v1/snapshots/{name}")).json() == {"done": True}
        assert (await client.get("/v1/snapshots")).json() == {"snapshots": []}
        assert (await client.put("/v1/sandboxes/b", json={"snapshot": name})).status_code == 404

    over_http(main)


def test_a_misspelt_query_is_rejected_not_ignored() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        for verb, path, hint in (
            ("PUT", "files?path=/x&modus=755", "'modus'; did you mean 'mode'?"),
            ("GET", "files?path=/x&max_byte=1", "'max_byte'; did you mean 'max_bytes'?"),
            ("POST", "exec?timeout_s=5", "'timeout_s'"),
            ("POST", "shells/main?user=grader", "'user'"),
            ("POST", "/v1/sessions/a/step?turn=1", "'turn'"),
            ("GET", "/metrics?name[]=x", "'name[]'"),
        ):
            answer = await client.request(
                verb, f"{A}/{path}" if path[0] != "/" else path, content=b'{"argv":["count"],"timeout_s":5}'
            )
            assert (answer.status_code, answer.json()["detail"]) == (400, f"unknown query parameter {hint}")
        assert (await client.get(f"{A}/files?path=/runs")).status_code == 404
        assert (await client.get("/v1/health?")).status_code == 200

    over_http(main)


def test_outputs_full_of_control_characters_do_not_grow_when_encoded() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        answer = await client.post(f"{A}/exec", json=run("say", "1000000", "\x07"))
        assert set(answer.json()["stdout"]) == {"base64"}
        assert len(answer.content) < 1_500_000
        for count, text in ((100, "\x07"), (100_000, "\r\n\t")):
            answer = await client.post(f"{A}/exec", json=run("say", str(count), text))
            assert answer.json()["stdout"] == text * count

    over_http(main)
