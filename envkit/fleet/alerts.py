"""Events for operators: alerts are sent to a webhook, and they and losses are logged."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import asdict

import anyio
import httpx

from envkit import clock
from envkit.types import CauseKind, PoolEvent, SandboxState, TenantKey

_log = logging.getLogger(__name__)

NEAR = 2
"""A disk raises an alert when its free space is below this multiple of the space that sandboxes require."""
LOOK_S = 15.0
"""Seconds between two checks of the disks."""

TRIES = 4
_FIRST_DELAY_S = 0.5
_TIMEOUT_S = 10.0


async def send_alerts(events: AsyncIterator[PoolEvent], address: str) -> None:
    """POST each alert among `events` as JSON, in order, until there are no more events.

    An alert that cannot be sent after `TRIES` attempts is logged and dropped. Events of the kind ``"state"`` are no
    alerts. A gap in the numbers of the events, which a slow webhook causes, is logged.
    """
    last = 0
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
        async for event in events:
            if event.number > last + 1:
                _log.warning("the webhook %s is too slow: %d events were not sent", address, event.number - last - 1)
            last = event.number
            if event.kind != "state":
                await _deliver(client, address, event)


async def _deliver(client: httpx.AsyncClient, address: str, alert: PoolEvent) -> None:
    content = {name: value for name, value in asdict(alert).items() if name != "cause"}
    problem = ""
    for attempt in range(TRIES):
        if attempt:
            await anyio.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
        try:
            response = await client.post(address, json=content)
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if response.is_success:
            return
        problem = f"status {response.status_code}"
    _log.warning("cannot send alert to %s (%s): %s", address, problem, alert.text)


async def log_events(events: AsyncIterator[PoolEvent]) -> None:
    """Log each lost sandbox with its cause, and each alert, until there are no more events.

    A sandbox of a client that ends because its own command exited is not lost.
    """
    async for event in events:
        sandbox = f" {event.sandbox_id}" if event.sandbox_id else ""
        tenant = f" of {event.tenant}" if event.tenant else ""
        if event.kind != "state":
            what = f"alert ({event.kind}){f': sandbox{sandbox}{tenant}' if sandbox else ''}"
        elif event.state is SandboxState.LOST and event.cause is not None:
            if event.cause.kind is CauseKind.EXITED and not TenantKey(event.tenant, event.sandbox_id).is_own:
                continue
            what = f"sandbox{sandbox}{tenant} lost"
        else:
            continue
        # Escape the text, because parts of it may come from programs in sandboxes.
        _log.warning("%s: %s", what, event.text.encode("unicode_escape").decode())


async def watch_disks(
    look: Callable[[], Mapping[str, tuple[int, int]]], alert: Callable[[str, str], None], interval_s: float = LOOK_S
) -> None:
    """Check the disks until cancelled, and emit an alert whenever one has less than `NEAR` times the required space.

    `look` returns, for each disk by name, its free MiB and the MiB that must stay free.
    """
    while True:
        found = await clock.to_thread(look)
        near = [
            f"{disk} has {free:,} MiB free; below {least:,} MiB no sandbox is started"
            for disk, (free, least) in sorted(found.items())
            if free < NEAR * least
        ]
        if near:
            alert("disk", "; ".join(near))
        await anyio.sleep(interval_s)
