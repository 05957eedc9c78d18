"""Concurrent transfers of one tenant, in virtual time."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from pathlib import Path
from typing import cast

import anyio
import httpx

from envkit import clock
from envkit.errors import RateLimitError
from envkit.http.protocol.asgi import Message
from envkit.http.sandboxes.transfers import AT_ONCE, MAX_WAITING, FolderTransfers
from envkit.protocols import Sandbox
from envkit.sandbox.pool import Pool
from envkit.sandbox.process.backend import ProcessBackend
from tests.http.remote_sandboxes import over_http
from tests.http.stage import settle


class SlowTrees:
    """Takes ten seconds for each stream, and counts concurrent ones."""

    def __init__(self) -> None:
        self.now = 0
        self.most = 0

    async def packed(self, source: Path, name: str) -> AsyncGenerator[bytes, None]:
        yield b""

    async def unpacked(
        self, pieces: AsyncIterator[bytes], target: Path, *, max_bytes: int, allows_any_link: bool = False
    ) -> None:
        async for _ in pieces:
            pass

    def staging_folder(self) -> AbstractAsyncContextManager[Path]:
        return self._staging_folder()

    @asynccontextmanager
    async def _staging_folder(self) -> AsyncIterator[Path]:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            await anyio.sleep(10)
            yield Path("nowhere")
        finally:
            self.now -= 1


class NoSandbox:
    """Accepts all transfers."""

    async def upload(self, source: Path, target: str, *, user: str) -> None:
        pass

    async def download(self, source: str, target: Path, *, max_bytes: int, user: str) -> None:
        pass


async def nothing() -> Message:
    return {"type": "http.request", "body": b"", "more_body": False}


async def nowhere(message: Message) -> None:
    pass


def test_transfers_of_a_tenant_run_queue_and_are_rejected_by_its_limits() -> None:
    async def main() -> None:
        trees = SlowTrees()
        folders, sandbox = FolderTransfers(trees), cast("Sandbox", NoSandbox())
        outcomes: Counter[tuple[str, str]] = Counter()

        async def move(tenant: str, is_upload: bool) -> None:
            try:
                if is_upload:
                    await folders.upload(sandbox, "t", "agent", nothing, tenant=tenant)
                else:
                    await folders.download(sandbox, "t", "agent", 1, nowhere, tenant=tenant)
            except RateLimitError:
                outcomes[tenant, "refused"] += 1
            else:
                outcomes[tenant, "done"] += 1

        async with anyio.create_task_group() as tasks:
            for number in range(AT_ONCE + MAX_WAITING + 7):
                tasks.start_soon(move, "acme", number % 2 == 0)
            await settle()
            assert (trees.now, outcomes) == (AT_ONCE, {("acme", "refused"): 7})
            tasks.start_soon(move, "umbrella", True)
            await anyio.sleep(11)
            assert outcomes["umbrella", "done"] == 1  # each tenant has its own queue
        assert trees.most == AT_ONCE + 1
        assert outcomes["acme", "done"] == AT_ONCE + MAX_WAITING
        await move("acme", True)
        assert outcomes["acme", "refused"] == 7

    clock.run(main, virtual=True)


def test_a_rejected_transfer_has_a_retry_after_header() -> None:
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

    over_http(main, ProcessBackend())
