"""Whether sandboxes are alive: each is asked now and then, and who says nothing for too long is lost.

An exit is seen at once, since the sandbox says it itself. For the rest there is one probe under way at a time, which
may take as long as it likes: on a busy machine one late answer is an answer, where several short probes would all have
failed. A call that was answered counts as well. What our own event loop slept too long is not the sandbox's silence.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Protocol, TypeAlias, runtime_checkable

import anyio

from envkit import clock
from envkit.clock import forgiven
from envkit.errors import DeadlineError, EnvkitError, SandboxLostError
from envkit.types import JSON, Cause, CauseKind, SandboxState

from .instance import Instance

_log = logging.getLogger(__name__)

CLOSED = Cause(CauseKind.STOPPED, "the pool was closed")
SLOW_PROBE_S = 1.0
MEMORY_SHARE = 0.9
DISK_PERCENT = 90
MANY = 500
"""Sandboxes of a pool from which each is asked less often."""

_LOOK_S = 0.5
"""Seconds that finding out why a sandbox is silent may take."""
_STATS_S = 10.0
_STOP_S = 15.0
"""Seconds until a sandbox that does not stop is left alone."""

Alert: TypeAlias = Callable[[str, Instance, str], None]
"""Told of what is to be looked at: its kind, whose it is, and one line for people."""


@dataclass(frozen=True, slots=True)
class LivenessTimes:
    """When a sandbox that does not answer counts as what.

    Attributes:
        interval_s: Seconds from an answer to the next probe.
        suspect_s: Seconds of silence after which it is suspect.
        lost_s: Seconds of silence after which it is lost.
    """

    interval_s: float = 1.0
    suspect_s: float = 1.5
    lost_s: float = 4.0

    def __post_init__(self) -> None:
        if not 0 < self.interval_s < self.suspect_s < self.lost_s:
            raise ValueError(f"0 < interval_s < suspect_s < lost_s does not hold of {self}")

    def among(self, boxes: int) -> LivenessTimes:
        """Return what holds among so many sandboxes.

        From 500 on each is asked later, up to a quarter of an interval, since probes take the processors' time; it has
        as long to answer as ever, so what is silent is seen as much later.
        """
        later_s = self.interval_s * min(max(boxes / MANY - 1, 0.0), 0.25)
        if not later_s:
            return self
        return LivenessTimes(self.interval_s + later_s, self.suspect_s + later_s, self.lost_s + later_s)

    @property
    def tick_s(self) -> float:
        """Seconds between two looks at all sandboxes."""
        return self.interval_s / 4


class Liveness(Enum):
    """What a silence means."""

    WELL = "well"
    SUSPECT = "suspect"
    LOST = "lost"


def liveness(silent_s: float, watch: LivenessTimes) -> Liveness:
    """Say what a silence of `silent_s` seconds means."""
    if silent_s >= watch.lost_s:
        return Liveness.LOST
    return Liveness.SUSPECT if silent_s >= watch.suspect_s else Liveness.WELL


@runtime_checkable
class Diagnosable(Protocol):
    """A sandbox of which can be seen from outside why it is silent."""

    async def look(self) -> str:
        """Return in one line what holds it up, such as ``"paused"``; empty where nothing is to be seen."""
        ...


@runtime_checkable
class Backpressured(Protocol):
    """A sandbox that may wait for us to take what it has said."""

    @property
    def is_unread(self) -> bool:
        """Whether nothing more is taken from it because somebody here does not."""
        ...


@runtime_checkable
class ReportsStats(Protocol):
    """A sandbox that knows figures about itself."""

    async def stats(self) -> dict[str, JSON]:
        """Return ``memory_bytes`` among others, where that is known."""
        ...


async def monitor(member: Instance, watch: LivenessTimes, alert: Alert) -> None:
    """Watch a sandbox that is up until it is over, and then stop it.

    Not cancelled before it has stopped; that is bounded (15 s).
    """
    member.interval_s = watch.interval_s
    async with anyio.create_task_group() as tasks:
        tasks.start_soon(_await_exit, member)
        tasks.start_soon(_probe, member, watch, alert)
        try:
            await member.gone.wait()
        finally:
            member.end(CLOSED)
            # Before its watchers: a call that is cancelled waits for what it had started, unless the box is gone.
            await _stop(member, alert)
        tasks.cancel_scope.cancel()


def check(member: Instance, watch: LivenessTimes, *, now: float, late_s: float) -> Liveness:
    """Say how a sandbox that is up does, and keep in mind that we were late, and how often it is to be asked."""
    member.interval_s = watch.interval_s
    member.heard_at = forgiven(member.heard_at, late_s, now=now)
    found = liveness(now - member.heard_at, watch)
    if found is Liveness.WELL:
        return found
    sandbox: object = member.sandbox
    if isinstance(sandbox, Backpressured) and sandbox.is_unread:
        member.heard_at = now
        return Liveness.WELL
    if member.state is not SandboxState.SUSPECT:
        member.enter(SandboxState.SUSPECT, f"silent for {watch.suspect_s:g} s")
    return found


async def declare_lost(member: Instance, watch: LivenessTimes) -> None:
    """Find out, quickly, why a sandbox is silent, and count it as lost unless it answers meanwhile."""
    cause = f"silent for {watch.lost_s:g} s"
    heard_at = member.heard_at
    sandbox: object = member.sandbox
    try:
        if isinstance(sandbox, Diagnosable):
            with anyio.move_on_after(_LOOK_S):
                if seen := await _seen(member, sandbox):
                    cause = f"{seen}, {cause}"
        if member.heard_at == heard_at:
            member.lose(Cause(CauseKind.UNRESPONSIVE, cause))
    finally:
        member.is_judged = False


async def _seen(member: Instance, sandbox: Diagnosable) -> str:
    try:
        return await sandbox.look()
    except (EnvkitError, OSError):
        return ""
    except Exception as error:
        return str(_unforeseen(member, error))


async def _await_exit(member: Instance) -> None:
    assert member.sandbox is not None
    try:
        cause = await member.sandbox.wait()
    except (EnvkitError, OSError) as error:
        cause = Cause(CauseKind.UNKNOWN, str(error))
    except Exception as error:
        cause = _unforeseen(member, error)
    member.lose(cause)


async def _probe(member: Instance, watch: LivenessTimes, alert: Alert) -> None:
    sandbox = member.sandbox
    assert sandbox is not None
    figures = sandbox.stats if isinstance(sandbox, ReportsStats) else None
    stats_at = clock.now() + _STATS_S
    while True:
        if (rest_s := member.heard_at + member.interval_s - clock.now()) > 0:
            await anyio.sleep(rest_s)
            continue
        asked_at, began = clock.now(), clock.precise()
        try:
            if figures is not None and asked_at >= stats_at:
                stats_at = asked_at + _STATS_S
                _check_bounds(member, await figures(), alert)
            else:
                await sandbox.probe(watch.lost_s)
        except SandboxLostError as error:
            return member.lose(error.cause)
        except DeadlineError:
            continue
        except (EnvkitError, OSError):
            await anyio.sleep(watch.interval_s)
            continue
        except Exception as error:
            return member.lose(_unforeseen(member, error))
        member.latency_s = latency_s = clock.precise() - began
        member.hear()
        if latency_s > SLOW_PROBE_S:
            alert("probe", member, f"an answer took {latency_s:.1f} s")


def _unforeseen(member: Instance, error: Exception) -> Cause:
    """Log what is the end of one sandbox and not of all the others, such as an answer that no agent of ours gives."""
    _log.error("sandbox %s failed in a way that nobody foresaw", member.id, exc_info=error)
    return Cause(CauseKind.UNKNOWN, f"{type(error).__name__}: {error}")


def _check_bounds(member: Instance, stats: dict[str, JSON], alert: Alert) -> None:
    used, bound = stats.get("memory_bytes"), member.demand.memory_mib << 20
    if isinstance(used, int) and used >= MEMORY_SHARE * bound:
        alert("memory", member, f"{used >> 20} of {bound >> 20} MiB of memory are in use")
    percent = stats.get("disk_percent")
    if isinstance(percent, int) and percent >= DISK_PERCENT:
        alert("disk", member, f"{percent} % of what it may write to {stats.get('disk_place')} are used")


async def _stop(member: Instance, alert: Alert) -> None:
    assert member.sandbox is not None
    with anyio.move_on_after(_STOP_S, shield=True) as limit:
        try:
            await member.sandbox.stop()
        except (EnvkitError, OSError) as error:
            alert("stop", member, f"it may be left behind: {error}")
        except Exception as error:
            alert("stop", member, f"it may be left behind: {_unforeseen(member, error)}")
    if limit.cancelled_caught:
        alert("stop", member, f"it may be left behind: it did not stop within {_STOP_S:g} s")
