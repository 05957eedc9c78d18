"""Liveness of sandboxes: the pool probes each sandbox at intervals. A sandbox that does not answer in time is lost.

A sandbox that exits is noticed immediately, without a probe. A sandbox gets one probe at a time, and the probe times
out only when the sandbox counts as lost: on a busy machine, several probes with short timeouts would all fail, while
one late answer suffices. Answers to other calls also count. Lag of this process's event loop does not count as silence.
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import anyio

from envkit import clock
from envkit.clock import compensate_loop_lag
from envkit.errors import DeadlineError, EnvkitError, SandboxLostError
from envkit.types import JSON, Cause, CauseKind, SandboxState
from envkit.types.sandboxes import Blocked

from .instance import Instance

_log = logging.getLogger(__name__)

CLOSED = Cause(CauseKind.STOPPED, "the pool was closed")
SLOW_PROBE_S = 1.0
MEMORY_SHARE = 0.9
DISK_PERCENT = 90

_DIAGNOSIS_S = 0.5
"""Timeout in seconds for the diagnosis of a sandbox that does not answer."""
_STATS_S = 10.0
_NODE_POLL_S = 0.1
_STOP_S = 15.0
"""Timeout in seconds for stopping a sandbox."""

Alert: TypeAlias = Callable[[str, Instance, str], None]
"""Function that emits an alert. Its arguments are the kind of the alert, the sandbox and a message."""


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """Liveness settings of a pool.

    Attributes:
        interval_s: Seconds from an answer to the next probe.
        suspect_s: Seconds without an answer after which a sandbox is suspect.
        lost_s: Seconds without an answer after which a sandbox is lost.
    """

    interval_s: float = 1.0
    suspect_s: float = 1.5
    lost_s: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.suspect_s < self.lost_s:
            raise ValueError(f"{self} violates 0 < interval_s < suspect_s < lost_s")

    @property
    def tick_s(self) -> float:
        """Seconds between two liveness checks of all sandboxes."""
        return self.interval_s / 4


@runtime_checkable
class Diagnosable(Protocol):
    """A sandbox that can be diagnosed, and whose silence may be excused."""

    @property
    def is_excused(self) -> bool:
        """Whether missing answers do not count, because this process does not read its output or its node is silent."""
        ...

    async def diagnose(self) -> Blocked:
        """Return why the sandbox does not answer."""
        ...


async def monitor(instance: Instance, times: LivenessTimes, alert: Alert) -> None:
    """Monitor a running sandbox until the pool records its end, then stop whatever still runs in it.

    The stop is shielded from cancellation and takes at most 15 s.
    """
    assert instance.sandbox is not None
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_loss, instance, instance.sandbox.wait)
        tasks.start_soon(_probe, instance, times, alert)
        try:
            await instance.gone.wait()
        finally:
            instance.end(CLOSED)
            # Stop the sandbox before the tasks are cancelled, because a cancelled call waits for its program to end.
            await _stop(instance, alert)
        tasks.cancel_scope.cancel()


def is_silent(instance: Instance, times: LivenessTimes, *, now: float, late_s: float) -> bool:
    """Return whether a sandbox has not answered for `times.lost_s`; after `times.suspect_s`, set its state to suspect.

    `late_s` is how many seconds the event loop lagged since the last call: they do not count as time without an answer.
    """
    instance.answered_at = compensate_loop_lag(instance.answered_at, late_s, now=now)
    silent_s = now - instance.answered_at
    if silent_s < times.suspect_s:
        return False
    if _is_excused(instance):
        instance.answered_at = now
        return False
    if instance.state is not SandboxState.SUSPECT:
        instance.enter(SandboxState.SUSPECT, f"no answer for {times.suspect_s:g} s")
    return silent_s >= times.lost_s


async def declare_lost(instance: Instance, times: LivenessTimes) -> None:
    """Diagnose a sandbox that does not answer, and declare it lost unless it answers during the diagnosis."""
    cause = f"{instance.silence} for {times.lost_s:g} s"
    diagnosis: Blocked | str = Blocked.UNKNOWN
    answered_at = instance.answered_at
    sandbox: object = instance.sandbox
    try:
        if isinstance(sandbox, Diagnosable):
            with anyio.move_on_after(_DIAGNOSIS_S):
                try:
                    diagnosis = await sandbox.diagnose()
                except Exception as error:
                    diagnosis = str(_cause_of(instance, error))
                if diagnosis:
                    cause = f"{diagnosis}, {cause}"
        if instance.answered_at == answered_at:
            instance.lose(Cause(CauseKind.UNRESPONSIVE, cause, by_agent=diagnosis is Blocked.PROCESS_LIMIT))
    finally:
        instance.is_diagnosing = False


async def _await_loss(instance: Instance, wait: Callable[[], Awaitable[Cause]]) -> None:
    """Declare the sandbox lost with the cause that `wait` returns."""
    try:
        cause = await wait()
    except Exception as error:
        cause = _cause_of(instance, error)
    # Wait while its node is silent: if the node is lost, that is the cause. Unread output ends with the connection.
    while _is_excused(instance):  # noqa: ASYNC110 - nothing announces it
        await anyio.sleep(_NODE_POLL_S)
    instance.lose(cause)


def _is_excused(instance: Instance) -> bool:
    sandbox: object = instance.sandbox
    return isinstance(sandbox, Diagnosable) and sandbox.is_excused


async def _probe(instance: Instance, times: LivenessTimes, alert: Alert) -> None:
    sandbox = instance.sandbox
    assert sandbox is not None
    stats_at = clock.now() + _STATS_S
    while True:
        if (rest_s := instance.answered_at + times.interval_s - clock.now()) > 0:
            await anyio.sleep(rest_s)
            continue
        asked_at, began, instance.silence = clock.now(), clock.precise(), "no answer"
        try:
            if asked_at >= stats_at:
                stats_at = asked_at + _STATS_S
                _check_bounds(instance, await sandbox.stats(), alert)
            else:
                await sandbox.probe(times.lost_s)
            latency_s = clock.precise() - began
            if instance.check is not None:
                instance.silence = "env server did not answer"
                await instance.check(times.lost_s)
        except SandboxLostError as error:
            return instance.lose(error.cause)
        except DeadlineError:
            continue
        except (EnvkitError, OSError):
            await anyio.sleep(times.interval_s)
            continue
        except Exception as error:
            return instance.lose(_cause_of(instance, error))
        instance.latency_s = latency_s
        instance.answered()
        if latency_s > SLOW_PROBE_S:
            alert("probe", instance, f"slow probe: {latency_s:.1f} s")


def _cause_of(instance: Instance, error: Exception) -> Cause:
    """Return an error as the cause of the sandbox's end. The pool continues even after an unexpected error."""
    if isinstance(error, (EnvkitError, OSError)):
        return Cause(CauseKind.UNKNOWN, str(error))
    _log.error("unhandled exception in sandbox %s", instance.id, exc_info=error)
    return Cause(CauseKind.UNKNOWN, f"{type(error).__name__}: {error}")


def _check_bounds(instance: Instance, stats: Mapping[str, JSON], alert: Alert) -> None:
    used, bound = stats.get("memory_bytes"), instance.demand.memory_mib << 20
    if isinstance(used, int) and used >= MEMORY_SHARE * bound:
        alert("memory", instance, f"{used >> 20} of {bound >> 20} MiB of memory in use")
    percent = stats.get("disk_percent")
    if isinstance(percent, int) and percent >= DISK_PERCENT:
        alert("disk", instance, f"{percent} % of the disk limit at {stats.get('disk_place')} in use")


async def _stop(instance: Instance, alert: Alert) -> None:
    assert instance.sandbox is not None
    with anyio.move_on_after(_STOP_S, shield=True) as limit:
        try:
            await instance.sandbox.stop()
        except Exception as error:
            alert("stop", instance, f"sandbox may be left behind: {_cause_of(instance, error)}")
    if limit.cancelled_caught:
        alert("stop", instance, f"sandbox may be left behind: it did not stop within {_STOP_S:g} s")
