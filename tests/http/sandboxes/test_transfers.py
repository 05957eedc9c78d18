"""Concurrent transfers of a tenant."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import anyio
import httpx

from envkit import clock
from envkit.errors import RateLimitError
from envkit.http.auth.caller import Caller
from envkit.http.protocol.asgi import HttpCall
from envkit.http.protocol.file_messages import UploadTree
from envkit.http.sandboxes.transfers import AT_ONCE, MAX_WAITING, FileTransfers
from envkit.sandbox.pool import Pool
from envkit.sandbox.process.backend import ProcessBackend
from tests.http.remote_sandboxes import over_http
from tests.http.stage import settle


def test_transfers_of_a_tenant_run_queue_and_are_rejected_by_its_limits() -> None:
    async def main() -> None:
        running: list[None] = []
        refused: list[str] = []

        @asynccontextmanager
        async def slow() -> AsyncIterator[Path]:
            running.append(None)
            await anyio.sleep_forever()
            yield Path("nowhere")

        transfers = FileTransfers(Mock(), AsyncMock(), Mock(staging_folder=slow))
        upload_tree = UploadTree("a", "t")

        async def upload(tenant: str) -> None:
            try:
                await transfers.upload_tree(upload_tree, HttpCall(Caller(tenant), {}, AsyncMock(), AsyncMock()))
            except RateLimitError:
                refused.append(tenant)

        async with anyio.create_task_group() as tasks:
            for tenant, begun in (("acme", 4), ("umbrella", 8)):  # each tenant has limits of its own
                for _ in range(4 + 60 + 7):
                    tasks.start_soon(upload, tenant)
                await settle()
                assert (len(running), refused.count(tenant)) == (begun, 7)
            tasks.cancel_scope.cancel()

    clock.run(main, virtual=True)


def test_transfers_above_the_limit_are_rejected_with_retry_after_until_others_end() -> None:
    async def main(client: httpx.AsyncClient, pool: Pool) -> None:
        await client.put("/v1/sandboxes/a", json={})
        is_over = anyio.Event()

        async def endless() -> AsyncGenerator[bytes, None]:
            yield b"x"
            await is_over.wait()

        async def take() -> None:
            async with aclosing(endless()) as pieces:
                await client.put("/v1/sandboxes/a/tree?path=t", content=pieces)

        async with anyio.create_task_group() as tasks:
            for _ in range(AT_ONCE + MAX_WAITING):
                tasks.start_soon(take)
            answer = None
            while answer is None or answer.status_code == 404:  # until all have arrived
                with anyio.move_on_after(0.5):
                    answer = await client.get("/v1/sandboxes/a/tree?path=t")
            assert (answer.status_code, answer.json()["type"]) == (429, "rate_limit")
            assert answer.headers["retry-after"] == "1"
            is_over.set()
        assert (await client.get("/v1/sandboxes/a/tree?path=t")).status_code == 404  # all slots are free again

    over_http(main, ProcessBackend())
