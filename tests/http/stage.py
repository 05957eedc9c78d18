"""Runners for tests of the protocol: on a table in virtual time, over HTTP, with the client."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeAlias

import anyio
import httpx

from envkit import clock
from envkit.http.client.env_client import EnvClient
from envkit.http.sessions.table import SessionTable
from envkit.registry import EnvSpec
from tests.http.envs import Lender, serving, slots

OnTable: TypeAlias = Callable[[SessionTable, Lender], Awaitable[None]]


def on_table(main: OnTable, *, capacity: int = 4, step_timeout_s: float = 60, **settings: float) -> Lender:
    """Run `main` with a table on virtual time; all leases must be released at its end."""

    async def run() -> Lender:
        lender = Lender(slots(capacity))
        async with SessionTable(lender, step_timeout_s=step_timeout_s, **settings) as table:
            await main(table, lender)
        assert lender.open == 0
        return lender

    return clock.run(run, virtual=True)


async def settle() -> None:
    """Run all ready tasks without advancing time."""
    for _ in range(20):
        await anyio.lowlevel.checkpoint()


OverHttp: TypeAlias = Callable[[httpx.AsyncClient], Awaitable[None]]


def over_http(main: OverHttp, *, capacity: int = 4, envs: Sequence[EnvSpec] = (), **settings: Any) -> None:
    """Run `main` with a client of a running server."""

    async def run() -> None:
        async with (
            slots(capacity) as host,
            serving(host, envs=lambda: envs, **settings) as address,
            httpx.AsyncClient(base_url=address, trust_env=False, verify=False) as client,
        ):
            await main(client)

    clock.run(run)


ByClient: TypeAlias = Callable[[EnvClient, Lender], Awaitable[None]]


def by_client(
    main: ByClient, *, capacity: int = 4, timeout_s: float = 20, grade_timeout_s: float = 20, **settings: Any
) -> None:
    """Run `main` with a client of a running server; all leases must be released at its end."""

    async def run() -> None:
        lender = Lender(slots(capacity))
        async with serving(lender, **settings) as address:
            with anyio.fail_after(30):
                async with EnvClient(address, timeout_s=timeout_s, grade_timeout_s=grade_timeout_s) as client:
                    await main(client, lender)
        assert lender.open == 0

    clock.run(run)
