"""Whether the env server in a box lives.

Worlds compute in the server's own event loop, so that one long step silences it, for all that play there. That is no
reason to end the box: a thread beside the loop tells that the process runs. One that was stopped, or that hangs as a
whole, says nothing by either way.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import anyio

from envkit import clock
from envkit.clock import forgiven
from envkit.errors import EnvkitError
from envkit.fleet.env_worker import EnvWorker, WorkerClient
from envkit.types import Cause, CauseKind


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """When a box whose env server does not answer counts as lost.

    Attributes:
        interval_s: Seconds from an answer to the next probe.
        timeout_s: See `lost_s`.
        misses: See `lost_s`.
        longest_step_s: Seconds of silence of its event loop after which a server is lost although its process runs.
    """

    interval_s: float = 5.0
    timeout_s: float = 2.0
    misses: int = 3
    longest_step_s: float = 300.0

    @property
    def lost_s(self) -> float:
        """Seconds without any sign of life after which it is lost."""
        return self.interval_s * self.misses + self.timeout_s

    @property
    def quiet_s(self) -> float:
        """Seconds of silence of its event loop after which its process is felt, and new episodes go elsewhere."""
        return self.lost_s / 2


async def watch_server(box: EnvWorker, client: WorkerClient, probing: HeartbeatTimes) -> Cause:
    """Listen to the server in a box, and return how long it was silent once that was too long."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_ask, box, client, probing)
        tasks.start_soon(_feel, box, client, probing)
        cause = await _judge(box, probing)
        tasks.cancel_scope.cancel()
    return cause


async def _judge(box: EnvWorker, probing: HeartbeatTimes) -> Cause:
    """What our own event loop slept too long is not the server's silence."""
    now = clock.now()
    while True:
        lost_at = max(box.answered_at, box.process_seen_at) + probing.lost_s
        hung_at = box.answered_at + max(probing.longest_step_s, probing.lost_s)
        if now >= lost_at:
            return Cause(CauseKind.UNRESPONSIVE, f"its env server was silent for {probing.lost_s:g} s")
        if now >= hung_at:
            said = f"its env server computed for {probing.longest_step_s:g} s, the longest that a step may take"
            return Cause(CauseKind.UNRESPONSIVE, said)
        due = min(lost_at, hung_at, now + probing.interval_s / 4)
        await anyio.sleep(max(0.0, due - now))
        now = clock.now()
        box.answered_at = forgiven(box.answered_at, now - due, now=now)
        box.process_seen_at = forgiven(box.process_seen_at, now - due, now=now)


async def _ask(box: EnvWorker, client: WorkerClient, probing: HeartbeatTimes) -> None:
    """Ask the server's event loop at intervals; an answer may take as long as it likes."""
    while True:
        await anyio.sleep(probing.interval_s)
        with suppress(EnvkitError):
            await client.health()
            box.answered_at = clock.now()


async def _feel(box: EnvWorker, client: WorkerClient, probing: HeartbeatTimes) -> None:
    """Feel for the server's process while its event loop is silent."""
    while True:
        if (rest_s := box.answered_at + probing.quiet_s - clock.now()) > 0:
            await anyio.sleep(rest_s)
            continue
        with suppress(EnvkitError, OSError):
            await client.heartbeat()
            box.process_seen_at = clock.now()
        await anyio.sleep(probing.interval_s)
