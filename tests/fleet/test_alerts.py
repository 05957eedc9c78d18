"""Alerts: which events reach the webhook."""

from __future__ import annotations

import json
import logging
from collections.abc import AsyncIterator

import anyio
import pytest

from envkit import clock
from envkit.fleet.alerts import log_events, send_alerts, watch_disks
from envkit.http.protocol.asgi import ASGIApp, Receive, Scope, Send, read_body, respond
from envkit.types import Cause, CauseKind, PoolEvent, SandboxState
from tests.http.envs import listening


class Site:
    """An application without startup and shutdown."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            await self._app(scope, receive, send)
        else:
            for step in ("startup", "shutdown"):
                await receive()
                await send({"type": f"lifespan.{step}.complete"})

    async def drain(self, timeout_s: float) -> None:
        pass


async def stream(*events: PoolEvent) -> AsyncIterator[PoolEvent]:
    for event in events:
        yield event


def event(number: int, kind: str) -> PoolEvent:
    return PoolEvent(number, 1.5, kind, "sandbox-1", "team", f"text {number}")


def test_alerts_are_sent_in_order_and_retried_after_a_failure() -> None:
    got: list[dict[str, object]] = []
    statuses = [500] * 2

    async def hook(scope: Scope, receive: Receive, send: Send) -> None:
        content = await read_body(scope, receive, 10_000)
        status = statuses.pop() if statuses else 200
        if status == 200:
            got.append(json.loads(content))
        await respond(send, b"", status=status)

    async def main() -> None:
        async with listening(Site(hook)) as address:
            state = PoolEvent(2, 1.5, "state", "sandbox-1", "team", "lost", SandboxState.LOST)
            await send_alerts(stream(event(1, "memory"), state, event(3, "probe")), f"{address}/hook")

    clock.run(main)
    assert [(one["number"], one["kind"], one["text"]) for one in got] == [
        (1, "memory", "text 1"),
        (3, "probe", "text 3"),
    ]
    assert got[0] == {
        "number": 1,
        "at_s": 1.5,
        "kind": "memory",
        "sandbox_id": "sandbox-1",
        "tenant": "team",
        "text": "text 1",
        "state": None,
    }


def test_an_alert_that_cannot_be_sent_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        clock.run(send_alerts, stream(event(1, "memory")), "http://127.0.0.1:9/hook")
    assert [record.message[:54] for record in caplog.records] == [
        "cannot send alert to http://127.0.0.1:9/hook (ConnectE"
    ]


def test_disks_that_are_almost_full_are_reported_in_one_alert_at_each_check() -> None:
    alerts: list[tuple[float, str, str]] = []
    free = {"the disk of /tmp": (1023, 512), "Docker's disk": (2047, 1024), "another": (2048, 1024)}

    async def main() -> None:
        with anyio.move_on_after(20):
            await watch_disks(lambda: free, lambda kind, text: alerts.append((clock.now(), kind, text)))

    clock.run(main, virtual=True)
    text = (
        "Docker's disk has 2,047 MiB free; below 1,024 MiB no sandbox is started; "
        "the disk of /tmp has 1,023 MiB free; below 512 MiB no sandbox is started"
    )
    assert alerts == [(0, "disk", text), (15, "disk", text)]


def test_losses_and_alerts_are_logged_in_one_line_each(caplog: pytest.LogCaptureFixture) -> None:
    lost, exited = Cause(CauseKind.KILLED, "killed\n\x1b[2J"), Cause(CauseKind.EXITED, "exit code 0")
    found = [
        PoolEvent(1, 0.0, "state", ":envs-1", "", str(lost), SandboxState.LOST, lost),
        PoolEvent(2, 0.0, "state", "a", "lab", str(exited), SandboxState.LOST, exited),
        PoolEvent(3, 0.0, "state", "b", "lab", "started on here", SandboxState.LEASED),
        PoolEvent(4, 0.0, "memory", "b", "lab", "91 of 100 MiB of memory in use"),
        PoolEvent(5, 0.0, "ledger", "", "", "disk full"),
    ]
    clock.run(log_events, stream(*found))
    assert [record.getMessage() for record in caplog.records] == [
        f"sandbox :envs-1 lost: {str(lost).encode('unicode_escape').decode()}",
        "alert (memory): sandbox b of lab: 91 of 100 MiB of memory in use",
        "alert (ledger): disk full",
    ]
