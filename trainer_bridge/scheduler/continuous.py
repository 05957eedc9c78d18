"""The training plan: groups are played ahead of the trainer, within a bounded policy lag; see `pace`."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import anyio

from envkit import clock
from envkit.errors import EnvkitError
from envkit.protocols import EnvHost, Player
from envkit.types import (
    JSON,
    Group,
    RolloutRequest,
    StopReason,
    Task,
    Trajectory,
    stable_hash,
)

from ..rollout.episode import RolloutLimits
from ..samples import trained_parts
from . import staleness
from .accounting import Fate, Ledger, fate_before_training
from .cursor import Cursor, Schedule
from .filters import LearningFilter
from .groups import GroupState
from .in_flight import CountedPlayer
from .pace import Batch, LagPolicy, Pace
from .scheduler import Plan, Scheduler


class Continuous(Plan):
    """Plays the groups of a training run, and gives them to the trainer in batches.

    With `ahead` 0, groups are opened only while the trainer waits for a batch, and without filters the batch has all of
    them. Filters, extra members and replacements race, so that only runs without them repeat to the last digit.

    Args:
        task: Returns the task of an environment with a given number; always the same one.
        weights: Weight of each environment.
        version: Number of train steps that the run has made.
        state: What `state` returned when the checkpoint was saved; empty for a new run.
        counts: What `Ledger.counts` returned then.
        replay: Schedule of another run. Its groups are played and taken in the same order, whatever `pace` says about
            filters, extra members and replacements. None: the groups of the cursor.

    Attributes:
        ledger: Accounts for all attempts.
        problems: What was wrong with the accounts since the last batch.
    """

    def __init__(
        self,
        host: EnvHost,
        player: Player,
        limits: RolloutLimits,
        num_envs: int,
        pace: Pace,
        task: Callable[[int, int], Task],
        *,
        weights: Sequence[float] = (1.0,),
        version: int = 0,
        state: Mapping[str, JSON] | None = None,
        counts: Mapping[str, int] | None = None,
        replay: Schedule | None = None,
    ) -> None:
        if replay is not None:
            pace = dataclasses.replace(pace, filters=(), max_filtered=math.inf, group_extra=0, straggler=None)
        self.version = version
        races = pace.ahead or pace.group_extra or pace.straggler or pace.filters
        self.in_lockstep = player.repeats and not races
        self.pace = pace
        self._task = task
        self.ledger = Ledger(counts)
        self.problems: list[str] = []
        self._player = CountedPlayer(player, self.ledger)
        self._scheduler = Scheduler(
            host, self._player, limits, num_envs, self, straggler=pace.straggler, fails_hangs=pace.fails_hangs
        )
        self._cursor = Cursor(weights, pace.steps * pace.groups_per_step)
        self._kept = deque[bool](maxlen=32 * pace.groups_per_step)
        if state:
            self._cursor.restore(state)
            self._restore_filters(state)
        else:
            self._cursor.skip(version * pace.groups_per_step)
        self._replay = replay
        self._logged = deque(
            group for step, row in sorted((replay or {}).items()) if step > version for group in row.items()
        )
        self._buffer: list[GroupState] = []
        self._training: list[GroupState] = []
        self._void: list[Trajectory] = []
        self._aborted: list[Trajectory] = []
        self._filtered: list[Group] = []
        self._env_of: dict[int, int] = {}
        self._lost_groups = 0
        self._is_wanted = self._is_paused = False
        self._arrived = anyio.Event()

    async def run(self) -> None:
        """Play until cancelled; see `Scheduler.run`."""
        await self._scheduler.run()

    async def batch(self) -> Batch:
        """Wait for the next batch and take it.

        Raises:
            EnvkitError: Filters reject all groups, or all groups are void.
        """
        began = clock.now()
        self._is_wanted = True
        self._scheduler.wake()
        while (chosen := self._next_batch()) is None:
            arrived = self._arrived
            await arrived.wait()
        self._is_wanted = False
        chosen.sort(key=lambda group: group.place.number)
        taken = {group.place.number for group in chosen}
        self._buffer = [group for group in self._buffer if group.place.number not in taken]
        self._training = chosen
        batch = Batch(
            tuple(group.group() for group in chosen),
            tuple(sorted(self._void, key=lambda one: (one.attempt, one.key))),
            version=self.version,
            envs=self._env_of,
            aborted=tuple(self._aborted),
            filtered=tuple(self._filtered),
            wanted=sum(self._quota(self.version)),
            group_s=tuple(group.took_s for group in chosen),
            waited_s=clock.now() - began,
            engine_s=self._player.busy.take(),
        )
        still_open = {*self._scheduler.groups, *(group.place.number for group in self._buffer)}
        self._env_of = {number: env for number, env in self._env_of.items() if number in still_open}
        self._void, self._aborted, self._filtered, self._lost_groups = [], [], [], 0
        self._drop_stale(self.version + 1)
        self._check()
        return batch

    def published(self, version: int, trained: Sequence[str]) -> str:
        """The engine has the weights of `version`, which the last batch trained.

        Args:
            version: Number of train steps so far.
            trained: Session of each episode that was trained on; see `accounting.trained_sessions`.

        Returns:
            Why the accounts do not add up; empty if they do.
        """
        records = {one.session: one for group in self._training for one in group.last.values()}
        without = [session for session, one in records.items() if _is_open(one) and not _has_samples(one)]
        for session in [*trained, *without]:
            tokens, masked = 0, Counter[str]()
            if (one := records.get(session)) is not None:
                tokens, masked = staleness.num_tokens(one), trained_parts(one)[1]
                masked["lag"] = staleness.num_stale_tokens(one, self.version, self.pace.max_lag)
            fate = Fate.DROPPED if tokens and masked.total() == tokens else Fate.TRAINED
            self.ledger.end(session, fate, masked=masked)
        self.version = version
        self._training = []
        self._drop_stale(version)
        self._check()
        self._scheduler.wake()
        found, self.problems = self.problems, []
        return "; ".join(found)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Open no groups during the block, such as an evaluation, which needs the places."""
        self._is_paused = True
        try:
            yield
        finally:
            self._is_paused = False
            self._scheduler.wake()

    def state(self) -> dict[str, JSON]:
        """Return the state for a checkpoint of this moment, when no batch is in training."""
        return {
            **self._cursor.state(group.place for group in [*self._scheduler.groups.values(), *self._buffer]),
            "kept": [*self._kept],
            "filters": [one.state() if isinstance(one, LearningFilter) else None for one in self.pace.filters],
        }

    def _restore_filters(self, state: Mapping[str, JSON]) -> None:
        """Continue with what the filters had learned at the checkpoint; older checkpoints do not have it."""
        kept, filters = state.get("kept", []), state.get("filters", [])
        assert isinstance(kept, list), "state() wrote it"
        assert isinstance(filters, list), "state() wrote it"
        self._kept.extend(map(bool, kept))
        for one, learned in zip(self.pace.filters, filters, strict=False):
            if isinstance(one, LearningFilter):
                one.restore(learned)

    @property
    def schedule(self) -> dict[str, JSON]:
        """The batch in training, for ``schedule.jsonl``: number, environment, task and members of each group."""
        rows = [(group.place, group.group().trajectories) for group in self._training]
        return {
            "groups": [
                [place.number, place.env, place.index, [one.member for one in played if not one.is_void]]
                for place, played in rows
            ]
        }

    def waits_for(self) -> str:
        """Return what the trainer waits for, in one line: the open groups, and their oldest episode."""
        flights = sorted(self._scheduler.in_flight.values(), key=lambda one: one.request.key)
        doing = Counter(one.doing for one in flights)
        what = ", ".join(f"{count} in {name}" for name, count in doing.most_common()) or "no episode in progress"
        line = f"{len(self._buffer)} groups are ready and {len(self._scheduler.groups)} open; {what}"
        if flights:
            oldest = min(flights, key=lambda one: one.since_s)
            seconds = clock.now() - oldest.since_s
            line += f"; {oldest.request.session} is in {oldest.doing} for {seconds:.0f} s"
        return line

    def _check(self) -> None:
        """Compare the accounts with what there is."""
        groups = [*self._scheduler.groups.values(), *self._buffer, *self._training]
        self.problems += self.ledger.problems(
            queued=sum(len(group.queued) for group in groups),
            in_flight=len(self._scheduler.in_flight),
            finished=sum(_is_open(one) for group in groups for one in group.last.values()),
        )

    # --- Plan ---------------------------------------------------------------------------------------------------------

    def next_group(self) -> GroupState | None:
        pace = self.pace
        if self._is_paused or not (self._is_wanted or pace.ahead):
            return None
        members: Sequence[int] = range(pace.group_size + pace.group_extra)
        if self._replay is None:
            place = self._cursor.next(self._room())
        elif self._logged and sum(self._room()) > 0:
            place, members = self._logged.popleft()
        else:
            place = None
        if place is None:
            return None
        try:
            task = self._task(place.env, place.index)
        except Exception:  # ends the run, whose checkpoint must not lose the group
            self._cursor.give_back([place])
            raise
        batch, index = divmod(place.number, pace.groups_per_step)
        seed = stable_hash(pace.seed, batch + 1)
        name = f"train/{place.number:08d}" + (f".{place.round}" if place.round else "")
        self._env_of[place.number] = place.env
        requests = tuple(
            RolloutRequest(
                f"{name}/{member:04d}",
                task,
                member,
                stable_hash(seed, index, member),
                pace.temperature,
                group=name,
                index=place.number,
            )
            for member in members
        )
        return GroupState(place, requests, min(pace.group_size, len(requests)), pace.least)

    def asked(self, request: RolloutRequest) -> None:
        self.ledger.ask(request.session)

    def began(self, request: RolloutRequest) -> None:
        self.ledger.begin(request.session)

    def ended(self, trajectory: Trajectory, *, is_needed: bool) -> None:
        self.ledger.finish(trajectory.session, staleness.num_tokens(trajectory))
        fate = fate_before_training(trajectory)
        if fate is None and not is_needed:
            fate = Fate.ABORTED
        if fate is not None:
            self.ledger.end(trajectory.session, fate)
        if not is_needed:
            self._aborted.append(trajectory)
        elif trajectory.is_void:
            self._void.append(trajectory)

    def unasked(self, request: RolloutRequest) -> None:
        self.ledger.end(request.session, Fate.ABORTED)

    def completed(self, group: GroupState) -> None:
        pace = self.pace
        if group.is_void and pace.refills:
            self._lost_groups += 1
            self._end_unused(group, Fate.VOIDED)
        elif all(one.keeps(group.group()) for one in pace.filters):
            self._kept.append(True)
            self._buffer.append(group)
        else:
            self._kept.append(False)
            self._filtered.append(group.group())
            self._end_unused(group, Fate.FILTERED)
        self._arrive()

    # --- Decisions ----------------------------------------------------------------------------------------------------

    def _quota(self, version: int, batches: int = 1) -> list[int]:
        """Return the number of groups of each environment in the batches that train `version` and the next ones."""
        pace, planned = self.pace, self._cursor.planned
        last = min(version + batches, pace.steps) * pace.groups_per_step
        first = min(version, pace.steps) * pace.groups_per_step
        return [after - before for before, after in zip(planned(first), planned(last), strict=True)]

    def _room(self) -> list[int]:
        """Return how many groups of each environment may be opened."""
        pace, room = self.pace, self._quota(self.version, self.pace.ahead + 1)
        all_kept = Counter(group.place.env for group in [*self._buffer, *self._training])
        all_opened = Counter(group.place.env for group in self._scheduler.groups.values())
        for env, window in enumerate(room):
            kept, opened = all_kept[env], all_opened[env]
            if self._is_at_cap or kept >= window:
                room[env] = 0
            elif pace.filters and pace.ahead == 0:
                room[env] = window - opened  # as many in progress as a batch has, until a batch is kept
            elif pace.filters:
                room[env] = math.ceil((window - kept) / self._share_kept) - opened
            else:
                room[env] = window - kept - opened
        return room

    @property
    def _share_kept(self) -> float:
        """Share of the groups that the filters are expected to keep; 1 at first."""
        prior = self.pace.groups_per_step
        return (sum(self._kept) + prior) / (len(self._kept) + prior)

    @property
    def _is_at_cap(self) -> bool:
        """Whether too many groups were rejected for this batch to open others."""
        rejected = len(self._filtered) + self._lost_groups
        return rejected >= self.pace.max_filtered * self.pace.groups_per_step

    def _next_batch(self) -> list[GroupState] | None:
        """Return the groups of the batch that may be taken now; None if it must wait."""
        pace, quota = self.pace, self._quota(self.version)
        if self._replay is not None:
            wanted = {place.number for place in self._replay[self.version + 1]}
            waiting = {*self._scheduler.groups, *(place.number for place, _ in self._logged)}
            return None if wanted & waiting else [group for group in self._buffer if group.place.number in wanted]
        if not pace.refills:
            return [*self._buffer] if len(self._buffer) >= sum(quota) else None
        if len(self._buffer) < sum(quota) and not self._is_at_cap:
            return None
        by_age = sorted(self._buffer, key=lambda group: (self._oldest(group), group.place.number))
        chosen: list[GroupState] = []
        for env, size in enumerate(quota):
            chosen += [group for group in by_age if group.place.env == env][:size]
        if len(chosen) < sum(quota):
            if not self._is_at_cap or self._scheduler.groups:
                return None
            if not chosen:
                raise EnvkitError(self._why_no_batch())
        if pace.lag_policy is LagPolicy.WAIT:
            taken = {group.place.number for group in chosen}
            rest = [group for group in by_age if group.place.number not in taken]
            while rest and not self._can_wait(rest):  # more groups were kept than expected
                self._drop(rest.pop())
            opened = sorted(self._scheduler.groups.values(), key=self._oldest)
            expected = opened[:: max(1, round(1 / self._share_kept))] if pace.filters else opened
            if not self._can_wait([*rest, *expected]):
                return None
        return chosen

    def _can_wait(self, groups: Sequence[GroupState]) -> bool:
        pace = self.pace
        quotas = [self._quota(self.version + 1 + number) for number in range(pace.max_lag)]
        for env in range(len(quotas[0]) if quotas else 0):
            oldest = [one for group in groups if group.place.env == env and (one := group.oldest) is not None]
            if not staleness.can_wait(oldest, self.version, pace.max_lag, [quota[env] for quota in quotas]):
                return False
        return True

    def _drop_stale(self, version: int) -> None:
        """Drop the groups that must not train `version`, if any policy but `RESUME` is chosen."""
        pace = self.pace
        if pace.lag_policy is LagPolicy.RESUME and pace.max_lag:
            return
        for group in [*self._buffer, *self._scheduler.groups.values()]:
            if self._oldest(group) + pace.max_lag < version:
                self._drop(group)

    def _drop(self, group: GroupState) -> None:
        """Drop a group, and play its task again later."""
        if group in self._buffer:
            self._buffer.remove(group)
        self._scheduler.drop(group, StopReason.STALE)
        self._end_unused(group, Fate.STALE)
        self._cursor.give_back([group.place])

    def _end_unused(self, group: GroupState, fate: Fate) -> None:
        for one in group.last.values():
            if _is_open(one):
                self.ledger.end(one.session, fate)

    def _oldest(self, group: GroupState) -> int:
        return self.version if group.oldest is None else group.oldest

    def _why_no_batch(self) -> str:
        if not self._filtered:
            reason = f"; the last episode: {self._void[-1].outcome.error}" if self._void else ""
            return f"all {self._lost_groups} groups are void{reason}"
        names = ", ".join(one.name for one in self.pace.filters)
        return (
            f"the filters ({names}) rejected all {len(self._filtered)} groups since the last train step; the tasks may "
            "be too easy or too hard for the policy"
        )

    def _arrive(self) -> None:
        self._arrived.set()
        self._arrived = anyio.Event()


def _has_samples(trajectory: Trajectory) -> bool:
    """Whether the attempt has a token to train on: an agent may have called the policy only as a probe."""
    return not trajectory.turns or any(len(one.token_ids) for one in trained_parts(trajectory)[0])


def _is_open(trajectory: Trajectory) -> bool:
    """Whether the attempt has no fate before its group has one."""
    return fate_before_training(trajectory) is None
