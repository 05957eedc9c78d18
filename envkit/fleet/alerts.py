"""Alerts for people: what a fleet says of itself, sent to an address."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable, Mapping
from urllib.parse import urlsplit

import anyio
import httpx
from anyio.streams.memory import MemoryObjectReceiveStream

from envkit import clock
from envkit.types import PoolEvent

_log = logging.getLogger(__name__)

NEAR = 2
"""A disk is near its floor when it has less than so many times of that free."""
LOOK_S = 15.0
"""Seconds between two looks at disks."""

TRIES = 4
_FIRST_DELAY_S = 0.5
_TIMEOUT_S = 10.0
_WAITING = 1_000
"""Alerts that may wait for an address that is slow; further ones are dropped, and their number is logged."""


async def warn_if_unreachable(address: str, warn: Callable[[str], None]) -> None:
    """Warn, in one line, if nothing answers at an address that alerts are to be sent to; it gets a HEAD request."""
    try:
        async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client:
            await client.head(address)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        where = urlsplit(address)
        said = str(error) or type(error).__name__
        # Without its path, which may be a secret.
        warn(f"alerts: the webhook at {where.scheme}://{where.hostname} does not answer: {said}")


async def send_alerts(events: AsyncIterator[PoolEvent], address: str) -> None:
    """Send each alert as a POST of JSON, in order, until the events end.

    One that cannot be delivered is tried `TRIES` times and then logged; the fleet goes on in any case.

    Args:
        events: What happens; other states of sandboxes are no alerts.
        address: Where to, such as ``"https://example.org/hooks/1"``.
    """
    sending, waiting = anyio.create_memory_object_stream[PoolEvent](_WAITING)
    async with httpx.AsyncClient(timeout=_TIMEOUT_S) as client, anyio.create_task_group() as tasks:
        tasks.start_soon(_deliver_all, client, address, waiting)
        with sending:
            async for event in events:
                if event.kind == "state":
                    continue
                try:
                    sending.send_nowait(event)
                except anyio.WouldBlock:
                    _log.warning("an alert was dropped, since %s is too slow: %s", address, event.text)


async def _deliver_all(client: httpx.AsyncClient, address: str, alerts: MemoryObjectReceiveStream[PoolEvent]) -> None:
    with alerts:
        async for alert in alerts:
            await _deliver(client, address, alert)


async def _deliver(client: httpx.AsyncClient, address: str, alert: PoolEvent) -> None:
    problem = ""
    for attempt in range(TRIES):
        if attempt:
            await anyio.sleep(_FIRST_DELAY_S * 2 ** (attempt - 1))
        try:
            response = await client.post(address, json=described(alert))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            problem = f"{type(error).__name__}: {error}"
            continue
        if response.is_success:
            break
        problem = f"status {response.status_code}"
    else:
        _log.warning("an alert could not be sent to %s (%s): %s", address, problem, alert.text)


async def watch_disks(
    look: Callable[[], Mapping[str, tuple[int, int]]], alert: Callable[[str, str], None], interval_s: float = LOOK_S
) -> None:
    """Raise an alert for as long as a disk has less than `NEAR` times of what must be free, until cancelled.

    Args:
        look: Returns, by the names of disks, how many MiB are free and how many must be.
        alert: Told the kind and one line for people.
        interval_s: Seconds between two looks.
    """
    while True:
        found = await clock.to_thread(look)
        near = [
            f"{disk} has {free:,} MiB free; with fewer than {least:,} no sandbox is started"
            for disk, (free, least) in sorted(found.items())
            if free < NEAR * least
        ]
        if near:
            alert("disk", "; ".join(near))
        await anyio.sleep(interval_s)


def described(event: PoolEvent) -> dict[str, object]:
    """Return an event as JSON."""
    return {
        "number": event.number,
        "at_s": event.at_s,
        "kind": event.kind,
        "sandbox_id": event.sandbox_id,
        "tenant": event.tenant,
        "text": event.text,
        "state": event.state,
    }
