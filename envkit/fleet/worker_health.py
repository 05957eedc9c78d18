"""Health of the env server in a worker.

Environments compute in the server's event loop, so one long step blocks the loop for all episodes of the worker. The
worker is not considered lost in that case, because a separate thread of the server still answers heartbeats. If the
server's process is stopped or hangs, neither the event loop nor the thread answers.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import anyio

from envkit import clock
from envkit.clock import compensate_loop_lag
from envkit.errors import EnvkitError
from envkit.fleet.env_worker import EnvWorker, WorkerClient
from envkit.types import Cause, CauseKind


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """Heartbeat settings of an env server.

    Attributes:
        interval_s: Seconds between an answer and the next probe.
        timeout_s: Seconds to wait for an answer after the last of `misses` intervals.
        misses: Number of intervals without an answer or a heartbeat after which the server is lost.
        longest_step_s: Seconds after which the server is lost if its event loop does not answer, even if its process
            still sends heartbeats.
    """

    interval_s: float = 5.0
    timeout_s: float = 2.0
    misses: int = 3
    longest_step_s: float = 300.0

    @property
    def lost_s(self) -> float:
        """Seconds without an answer or a heartbeat after which the server is lost."""
        return self.interval_s * self.misses + self.timeout_s

    @property
    def unresponsive_s(self) -> float:
        """Seconds without an answer after which heartbeats are requested and new episodes go to other workers."""
        return self.lost_s / 2


async def watch_server(worker: EnvWorker, client: WorkerClient, heartbeat: HeartbeatTimes) -> Cause:
    """Monitor a worker's server until it is lost; return the cause."""
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_poll_health, worker, client, heartbeat)
        tasks.start_soon(_send_heartbeats, worker, client, heartbeat)
        cause = await _await_loss(worker, heartbeat)
        tasks.cancel_scope.cancel()
    return cause


async def _await_loss(worker: EnvWorker, heartbeat: HeartbeatTimes) -> Cause:
    """Wait until the server is lost, and return the cause. Delays of our own event loop do not count as silence."""
    now = clock.now()
    while True:
        lost_at = max(worker.answered_at, worker.process_seen_at) + heartbeat.lost_s
        hung_at = worker.answered_at + max(heartbeat.longest_step_s, heartbeat.lost_s)
        if now >= lost_at:
            return Cause(CauseKind.UNRESPONSIVE, f"env server did not answer for {heartbeat.lost_s:g} s")
        if now >= hung_at:
            why = f"env server computed for {heartbeat.longest_step_s:g} s, the limit for one step"
            return Cause(CauseKind.UNRESPONSIVE, why)
        due = min(lost_at, hung_at, now + heartbeat.interval_s / 4)
        await anyio.sleep(max(0.0, due - now))
        now = clock.now()
        worker.answered_at = compensate_loop_lag(worker.answered_at, now - due, now=now)
        worker.process_seen_at = compensate_loop_lag(worker.process_seen_at, now - due, now=now)


async def _poll_health(worker: EnvWorker, client: WorkerClient, heartbeat: HeartbeatTimes) -> None:
    """Check at intervals whether the server's event loop answers. A check has no timeout."""
    while True:
        await anyio.sleep(heartbeat.interval_s)
        with suppress(EnvkitError):
            await client.health()
            worker.answered_at = clock.now()


async def _send_heartbeats(worker: EnvWorker, client: WorkerClient, heartbeat: HeartbeatTimes) -> None:
    """Request heartbeats from the thread in the server's process while the server's event loop does not answer."""
    while True:
        if (rest_s := worker.answered_at + heartbeat.unresponsive_s - clock.now()) > 0:
            await anyio.sleep(rest_s)
            continue
        with suppress(EnvkitError, OSError):
            await client.heartbeat()
            worker.process_seen_at = clock.now()
        await anyio.sleep(heartbeat.interval_s)
