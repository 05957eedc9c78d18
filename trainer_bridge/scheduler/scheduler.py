"""The scheduler: opens the groups of a plan, and plays each of their episodes as soon as there is a place for it.

Each member of a group is a task of its own, and the oldest group comes first. An episode that is being graded needs
neither the engine nor a place among the episodes that act.
"""

from __future__ import annotations

import heapq
from collections import Counter, defaultdict, deque
from statistics import median
from typing import Protocol

import anyio
from anyio.abc import TaskGroup

from envkit import clock
from envkit.protocols import EnvHost, Gate, Player
from envkit.types import RolloutRequest, StopReason, Trajectory

from ..rollout.episode import RolloutLimits, play
from ..rollout.gates import Lockstep, OpenGate
from .groups import GroupState
from .hangs import hangs_again, hung_in_step
from .in_flight import InFlight

_DURATIONS, _LEAST_DURATIONS = 200, 20
"""Number of latest episodes of an environment whose median duration counts, and the least number."""


class Plan(Protocol):
    """Decides which groups are opened when, and receives what ends."""

    in_lockstep: bool
    """Whether episodes begin in waves, whose turns reach the engine together."""
    version: int
    """Version of the engine's weights."""

    def next_group(self) -> GroupState | None:
        """Return the next group to open; None if none is to be opened at present."""
        ...

    def asked(self, request: RolloutRequest) -> None:
        """An attempt was put into the queue."""
        return

    def began(self, request: RolloutRequest) -> None:
        """An attempt began."""
        ...

    def ended(self, trajectory: Trajectory, *, is_needed: bool) -> None:
        """An attempt ended; its group needs it no longer if `is_needed` is false."""
        ...

    def unasked(self, request: RolloutRequest) -> None:
        """An attempt was taken out of the queue, because its group needs it no longer."""
        return

    def completed(self, group: GroupState) -> None:
        """A group is complete."""
        ...


class Scheduler:
    """Plays the groups of a plan.

    Args:
        num_envs: Maximum number of concurrent episodes, unless the capacity of the host is lower. Episodes that are
            being graded do not count.
        straggler: An episode is replaced after this many times the median duration of its environment's episodes, once
            half of its group has ended: another one starts, and the first to end counts. None: never.
        fails_hangs: Whether an episode fails, and is not void, if its action makes the environment hang, and does so
            again in fresh places while other episodes of the environment go on.

    Attributes:
        groups: The groups that are open, by number.
        in_flight: The episodes in progress, by session; those of closed groups are in it until their abort has ended.
    """

    def __init__(
        self,
        host: EnvHost,
        player: Player,
        limits: RolloutLimits,
        num_envs: int,
        plan: Plan,
        *,
        straggler: float | None = None,
        fails_hangs: bool = False,
    ) -> None:
        self._host = host
        self._player = player
        self._limits = limits
        self._num_envs = num_envs
        self._plan = plan
        self._straggler = straggler
        self._fails_hangs = fails_hangs
        self._steps: Counter[str] = Counter()
        self._durations: defaultdict[str, deque[float]] = defaultdict(lambda: deque(maxlen=_DURATIONS))
        self._tasks: TaskGroup
        self._acting = 0
        self._queue: list[tuple[tuple[int, int, int, int], RolloutRequest, GroupState]] = []
        self._asked = 0
        self._changed = anyio.Event()
        self.groups: dict[int, GroupState] = {}
        self.in_flight: dict[str, InFlight] = {}

    async def run(self, *, until_idle: bool = False) -> None:
        """Play until cancelled, or until no group is open and the plan has no other one.

        Raises:
            ExceptionGroup: Errors of the player.
        """
        async with anyio.create_task_group() as tasks:
            self._tasks = tasks
            if self._straggler is not None:
                tasks.start_soon(self._replace_stragglers, self._straggler)
            while True:
                self._open()
                self._start(tasks)
                if until_idle and not self.groups:
                    return
                changed = self._changed
                await changed.wait()

    def wake(self) -> None:
        """Ask the plan again for groups to open."""
        self._changed.set()
        self._changed = anyio.Event()

    def drop(self, group: GroupState, verdict: StopReason) -> None:
        """Close a group and abort what is played for it."""
        self.groups.pop(group.place.number, None)
        self._abort_rest(group, verdict)

    def _open(self) -> None:
        while (group := self._plan.next_group()) is not None:
            self.groups[group.place.number], group.opened_s = group, clock.now()
            for member in group.members:
                self._ask(group, member)

    def _ask(self, group: GroupState, request: RolloutRequest) -> None:
        self._plan.asked(request)
        group.queued[request.key] = request
        # Waves repeat void episodes only after all others, so that these are in the same waves in any case.
        attempt = request.attempt if self._plan.in_lockstep else 0
        self._asked += 1
        order = (attempt, group.place.number, request.member, self._asked)
        heapq.heappush(self._queue, (order, request, group))

    def _start(self, tasks: TaskGroup) -> None:
        """Start as many episodes as there are places, or the next wave."""
        host, limits = self._host, self._limits
        if not self._plan.in_lockstep:
            while self._acting < self._places and (found := self._next()) is not None:
                self._begin(tasks, *found, OpenGate())
            return
        if self._acting:
            return
        wave = [found for _ in range(self._places) if (found := self._next()) is not None]
        # An episode with a slot arrives within the time that a reset and a step may take.
        timeout_s = limits.step_timeout_s + (limits.reset_timeout_s or limits.step_timeout_s)
        gate = Lockstep(len(wave), timeout_s=timeout_s, queued=lambda: host.queued)
        for request, group in wave:
            self._begin(tasks, request, group, gate)

    def _next(self) -> tuple[RolloutRequest, GroupState] | None:
        while self._queue:
            _, request, group = heapq.heappop(self._queue)
            if group.queued.pop(request.key, None) is not None:
                return request, group
        return None

    def _begin(self, tasks: TaskGroup, request: RolloutRequest, group: GroupState, gate: Gate) -> None:
        self._acting += 1
        self._plan.began(request)
        flight = InFlight(request, began_s=clock.now(), since_s=clock.now(), weights=lambda: self._plan.version)
        group.playing[request.key] = self.in_flight[request.session] = flight
        tasks.start_soon(self._play, flight, group, gate)

    async def _play(self, flight: InFlight, group: GroupState, gate: Gate) -> None:
        request, took_s = flight.request, 0.0
        with flight.scope:
            trajectory = await play(
                self._host, self._player, self._limits, request, gate, on_played=self._played, running=flight
            )
            took_s = clock.now() - flight.began_s
            if self._fails_hangs and hung_in_step(trajectory):
                flight.is_replaced = True  # no straggler: it has ended
                if await self._hangs(trajectory):
                    flight.stop, flight.failure = StopReason.HUNG, None
                    trajectory = flight.trajectory()
        flight.ended.set()
        if flight.scope.cancelled_caught or (flight.verdict is not None and trajectory.is_void):
            trajectory = flight.aborted()
        del group.playing[request.key], self.in_flight[request.session]
        if trajectory.start is not None:
            self._durations[request.task.env_id].append(took_s or clock.now() - flight.began_s)
            self._steps[request.task.env_id] += flight.steps
        self._plan.ended(trajectory, is_needed=flight.verdict is None)
        if flight.verdict is None:
            again = group.end(request, trajectory, flight.version, self._limits.retries)
            if again is not None:
                self._ask(group, again)
            elif group.is_complete:
                self._complete(group)
        self.wake()

    async def _hangs(self, trajectory: Trajectory) -> bool:
        """Return whether an episode hangs again, in a place of its own, while others of its environment go on."""
        while self._acting >= self._places:
            changed = self._changed
            await changed.wait()
        self._acting += 1
        try:
            before = self._steps_in(trajectory.task.env_id)
            is_alike = await hangs_again(trajectory, self._host, self._limits)
            return is_alike and self._steps_in(trajectory.task.env_id) > before
        finally:
            self._played()

    def _steps_in(self, env_id: str) -> int:
        """Return the number of steps that episodes of an environment have made."""
        playing = (one for one in self.in_flight.values() if one.request.task.env_id == env_id)
        return self._steps[env_id] + sum(one.steps for one in playing)

    @property
    def _places(self) -> int:
        """Number of episodes that may act at once. A fleet may shrink."""
        return max(1, min(self._num_envs, self._host.capacity))

    async def _replace_stragglers(self, factor: float) -> None:
        """Look for stragglers every second. A replacement is one more member of the group."""
        while True:
            await anyio.sleep(1.0)
            usual_s = {env: median(seen) for env, seen in self._durations.items() if len(seen) >= _LEAST_DURATIONS}
            for group in self.groups.values():
                env_id, size = group.task.env_id, group.size
                if env_id not in usual_s or 2 * len(group.valid) < size:
                    continue
                too_long_s = factor * usual_s[env_id]
                for flight in [*group.playing.values()]:
                    if not flight.is_replaced and clock.now() - flight.began_s > too_long_s:
                        flight.is_replaced = True
                        self._ask(group, group.another(flight.request))
            self.wake()

    def _played(self) -> None:
        self._acting -= 1
        self.wake()

    def _complete(self, group: GroupState) -> None:
        group.took_s = clock.now() - group.opened_s
        self._abort_rest(group, StopReason.ABORTED)
        self._plan.completed(group)
        self.groups.pop(group.place.number, None)

    def _abort_rest(self, group: GroupState, verdict: StopReason) -> None:
        for request in group.queued.values():
            self._plan.unasked(request)
        group.queued.clear()
        for flight in group.playing.values():
            flight.verdict = verdict
            self._tasks.start_soon(flight.abort)
