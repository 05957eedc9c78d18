"""Starts of sandboxes over HTTP: slow and failed ones, and reuse of names."""

from __future__ import annotations

import anyio
import httpx

from envkit.sandbox.pool import Pool
from tests.causes import cause
from tests.http.remote_sandboxes import A, over_http, run, scripted


def test_a_slow_start_is_202_until_the_sandbox_is_up() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        first = await client.put(A, json={})
        assert (first.status_code, first.headers["retry-after"]) == (202, "1")
        assert first.json() == {"sandbox_id": "a", "state": "starting"}
        statuses: list[int] = []
        while not statuses or statuses[-1] == 202:
            statuses.append((await client.put(A, json={})).status_code)
        assert statuses[-1] == 200
        assert (await client.post(f"{A}/exec", json=run("echo"))).status_code == 200

    over_http(main, scripted(start_s=0.5), slow_reset_s=0.2)


def test_a_failed_start_is_raised_by_the_next_call() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        assert (await client.put(A, json={})).status_code == 202
        await anyio.sleep(1)
        failed = await client.put(A, json={})
        assert (failed.status_code, failed.json()["fields"]["cause"]) == (
            503,
            {"kind": "start_failed", "detail": "no image", "by_agent": False},
        )
        assert (await client.get(A)).json()["phases"][-1]["reason"] == "no image"
        assert (await client.put(A, json={})).status_code == 202  # a new attempt
        await anyio.sleep(1)
        assert (await client.put(A, json={})).json()["fields"]["sandbox_id"] == "a"
        assert pool.counts().failed_starts == 2

    over_http(main, scripted(start_s=0.8, start_failure="no image"), slow_reset_s=0.05)


def test_an_invalid_network_host_is_rejected_before_the_start() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        for host in ("http://example.org", "not a host", "*"):
            refused = await client.put(A, json={"network": ["example.org", host]})
            assert (refused.status_code, refused.json()["type"]) == (422, "bad_option")
            assert refused.json()["detail"].startswith(f"network: {host!r} is not a host name, such as example.org")
        assert (await client.get("/v1/sandboxes")).json()["sandboxes"] == []
        assert (await client.put(A, json={"network": ["example.org", "*.example.org"]})).status_code == 200

    over_http(main)


def test_a_sandbox_stopped_during_its_start_leaves_nothing() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        assert (await client.put(A, json={})).status_code == 202
        assert (await client.delete(A)).status_code == 200
        assert (await client.get(A)).status_code == 404
        assert pool.counts().states == {}

    over_http(main, scripted(start_s=30), slow_reset_s=0.05)


def test_a_name_is_free_after_its_sandbox_was_deleted() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        key = {"Idempotency-Key": "k"}
        backend_ids = []
        for seconds, spec in enumerate(({}, {}, {"memory_mib": 64})):
            made = await client.put(A, json=spec)
            assert (made.status_code, made.json()["state"]) == (200, "leased")
            backend_ids.append(made.json()["backend_id"])
            done = await client.post(f"{A}/exec", json=run("count", f"{seconds}e-3"), headers=key)
            assert done.json()["stdout"] == "1"  # its key is free, too
            await client.delete(A)
            assert (await client.get(A)).json()["state"] == "stopped"
        assert backend_ids == ["fake-0", "fake-1", "fake-2"]

    over_http(main)


def test_the_name_of_a_lost_sandbox_is_in_use_until_it_is_deleted() -> None:
    backend = scripted()

    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put(A, json={})
        backend.sandboxes[0].die(cause("killed by signal 9"))
        await pool.get("a").wait()
        for _ in range(2):
            refused = await client.put(A, json={})
            assert (refused.status_code, refused.json()["type"]) == (409, "sandbox_conflict")
            assert refused.json()["detail"] == (
                "sandbox a has ended: killed by signal 9; send DELETE to free its id, or choose another id"
            )
        assert (await client.delete(A)).status_code == 200
        assert (await client.get(A)).json()["state"] == "lost"
        assert (await client.put(A, json={})).json()["backend_id"] == "fake-1"

    over_http(main, backend)
