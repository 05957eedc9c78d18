"""Alerts for people: what a fleet says of itself, sent to an address."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator

import anyio
import httpx
from anyio.streams.memory import MemoryObjectReceiveStream

from envkit.types import FleetEvent

_log = logging.getLogger(__name__)

TRIES = 4
_FIRST_DELAY_S = 0.5
_TIMEOUT_S = 10.0
_WAITING = 1_000
"""Alerts that may wait for an address that is slow; further ones are dropped, and their number is logged."""


async def send_alerts(events: AsyncIterator[FleetEvent], address: str) -> None:
    """Send each alert as a POST of JSON, in order, until the events end.

    One that cannot be delivered is tried `TRIES` times and then logged; the fleet goes on in any case.

    Args:
        events: What happens; other states of sandboxes are no alerts.
        address: Where to, such as ``"https://example.org/hooks/1"``.
    """
    sending, waiting = anyio.create_memory_object_stream[FleetEvent](_WAITING)
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


async def _deliver_all(client: httpx.AsyncClient, address: str, alerts: MemoryObjectReceiveStream[FleetEvent]) -> None:
    with alerts:
        async for alert in alerts:
            await _deliver(client, address, alert)


async def _deliver(client: httpx.AsyncClient, address: str, alert: FleetEvent) -> None:
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


def described(event: FleetEvent) -> dict[str, object]:
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
