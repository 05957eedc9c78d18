"""Health of the env server in a worker.

Environments compute in the server's event loop, so one long step blocks the loop for all episodes of the worker. The
worker then does not count as lost, because a separate thread of the server still answers heartbeats. If the server's
process is stopped or hangs, neither the event loop nor the thread answers.
"""

from __future__ import annotations

from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass
from typing import Protocol

import anyio

from envkit import clock
from envkit.clock import compensate_loop_lag
from envkit.errors import EnvkitError
from envkit.protocols import Episode
from envkit.types import Cause, CauseKind, Task


@dataclass(frozen=True, slots=True)
class HeartbeatTimes:
    """Heartbeat settings of an env server.

    Attributes:
        interval_s: Seconds between an answer and the next health check.
        lost_s: Seconds after which a server is lost if neither its event loop nor its heartbeat thread answers.
        longest_step_s: Seconds after which a server is lost if its event loop does not answer, even if its heartbeat
            thread still does. Limits the duration of a step.
    """

    interval_s: float = 5.0
    lost_s: float = 17.0
    longest_step_s: float = 300.0

    @property
    def unresponsive_s(self) -> float:
        """Seconds without an answer of the event loop until heartbeats are sent and other workers get new episodes."""
        return self.lost_s / 2


class WorkerClient(Protocol):
    """Client of the env server in one worker."""

    def lease(self, task: Task, *, id: str | None = None) -> AbstractAsyncContextManager[Episode]:
        """Lease an episode of `task`; if the server has one with this id and task, resume it."""
        ...

    async def health(self) -> object:
        """Return once the server's event loop has answered.

        Raises:
            UnreachableError: The server does not answer.
        """
        ...

    async def heartbeat(self) -> None:
        """Return once the server's heartbeat thread has answered, which it does even if the event loop is busy.

        Raises:
            UnreachableError: The thread does not answer.
        """
        ...


class ServerMonitor:
    """Checks the health of one env server until the server is lost."""

    def __init__(self, client: WorkerClient, times: HeartbeatTimes) -> None:
        self._client = client
        self._times = times
        self._answered_at = self._process_seen_at = clock.now()
        self._is_lost = anyio.Event()
        self._cause = Cause(CauseKind.UNKNOWN, "not lost")

    @property
    def is_unresponsive(self) -> bool:
        """Whether the event loop has not answered for `unresponsive_s` seconds; other workers then get new episodes."""
        return clock.now() - self._answered_at >= self._times.unresponsive_s

    async def run(self) -> Cause:
        """Check the server until it is lost; return why it is lost."""
        async with anyio.create_task_group() as tasks:
            for check in (self._poll_health, self._request_heartbeats, self._check_deadlines):
                tasks.start_soon(check)
            await self._is_lost.wait()
            tasks.cancel_scope.cancel()
        return self._cause

    def report_lost(self, cause: Cause) -> None:
        """Make `run` return `cause`, because the caller found that the server is lost."""
        self._cause = cause
        self._is_lost.set()

    async def _check_deadlines(self) -> None:
        """Report the server as lost when it is silent for too long, not counting delays of this process's own loop."""
        times, now = self._times, clock.now()
        while True:
            lost_at = max(self._answered_at, self._process_seen_at) + times.lost_s
            hung_at = self._answered_at + max(times.longest_step_s, times.lost_s)
            if now >= lost_at:
                why = f"env server did not answer for {times.lost_s:g} s"
                return self.report_lost(Cause(CauseKind.UNRESPONSIVE, why))
            if now >= hung_at:
                why = f"env server computed for {times.longest_step_s:g} s, the limit for one step"
                return self.report_lost(Cause(CauseKind.UNRESPONSIVE, why))
            due = min(lost_at, hung_at, now + times.interval_s / 4)
            await anyio.sleep(max(0.0, due - now))
            now = clock.now()
            self._answered_at = compensate_loop_lag(self._answered_at, now - due, now=now)
            self._process_seen_at = compensate_loop_lag(self._process_seen_at, now - due, now=now)

    async def _poll_health(self) -> None:
        """Send requests to the server's event loop at intervals, without a timeout, and record when it answers."""
        while True:
            await anyio.sleep(self._times.interval_s)
            with suppress(EnvkitError):
                await self._client.health()
                self._answered_at = clock.now()

    async def _request_heartbeats(self) -> None:
        """Request heartbeats from the server's heartbeat thread while the server's event loop does not answer."""
        while True:
            if (rest_s := self._answered_at + self._times.unresponsive_s - clock.now()) > 0:
                await anyio.sleep(rest_s)
                continue
            with suppress(EnvkitError, OSError):
                await self._client.heartbeat()
                self._process_seen_at = clock.now()
            await anyio.sleep(self._times.interval_s)
