"""A group of episodes in progress: which members are played, which are valid, and when the group is complete."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from envkit.types import Group, RolloutRequest, StopReason, Task, Trajectory, stable_hash

from .cursor import Place
from .in_flight import InFlight


@dataclass(slots=True, eq=False)
class GroupState:
    """A group of episodes to play, and what is played for it.

    Attributes:
        place: Its place in the run. Those with lower numbers are played first.
        members: Request of each episode, all of one task.
        size: Number of valid episodes that the group needs. The other members are extra: as soon as `size` are valid,
            the rest is aborted.
        least: Number of valid episodes that the group needs at least to be of use, when retries are used up.
        queued: Members that wait for a place, by key.
        playing: Members in progress, by key.
        last: Latest attempt of each member that ended, by member.
        versions: Version at which each of these attempts began to act; none if it never did.
        replacements: Number of members that were added for stragglers.
        took_s: Seconds until it was complete.
    """

    place: Place
    members: tuple[RolloutRequest, ...]
    size: int
    least: int = 1
    queued: dict[str, RolloutRequest] = field(default_factory=dict)
    playing: dict[str, InFlight] = field(default_factory=dict)
    last: dict[int, Trajectory] = field(default_factory=dict)
    versions: dict[int, int] = field(default_factory=dict)
    replacements: int = 0
    opened_s: float = 0.0
    took_s: float = 0.0

    @property
    def task(self) -> Task:
        """The task of all episodes."""
        return self.members[0].task

    def end(
        self, request: RolloutRequest, trajectory: Trajectory, version: int | None, retries: int
    ) -> RolloutRequest | None:
        """Enter an attempt that ended, and return the next attempt at this member, if there is one."""
        self.last[request.member] = trajectory
        self.versions.pop(request.member, None)
        if version is not None:
            self.versions[request.member] = version
        if trajectory.is_void and request.attempt < retries:
            attempt, seed = request.attempt + 1, request.seed
            if trajectory.outcome.stop in (StopReason.TIMEOUT, StopReason.NO_COMPLETION):
                seed = stable_hash(seed, "attempt", attempt)  # an action that hangs is not simply repeated
            return replace(request, attempt=attempt, seed=seed)
        return None

    @property
    def is_complete(self) -> bool:
        """Whether it has enough valid episodes, or nothing more is played for it."""
        return len(self.valid) >= self.size or not (self.queued or self.playing)

    def another(self, request: RolloutRequest) -> RolloutRequest:
        """Return a request for one more member, which may take the place of that of `request`."""
        member = len(self.members) + self.replacements
        self.replacements += 1
        key, seed = f"{request.group}/{member:04d}", stable_hash(request.seed, "replacement", member)
        return replace(request, key=key, member=member, seed=seed, attempt=0)

    @property
    def valid(self) -> list[Trajectory]:
        """The valid episodes, by member."""
        return [one for _, one in sorted(self.last.items()) if not one.is_void]

    @property
    def is_void(self) -> bool:
        """Whether the group is complete, but has too few valid episodes."""
        return len(self.valid) < self.least

    @property
    def oldest(self) -> int | None:
        """A version that none of its tokens is older than; None without tokens."""
        playing = [one.version for one in self.playing.values() if one.version is not None]
        valid = [version for member, version in self.versions.items() if not self.last[member].is_void]
        return min([*playing, *valid], default=None)

    def group(self) -> Group:
        """Return the valid episodes if there are enough; otherwise the last attempt of each member, void or not."""
        valid = self.valid
        chosen = valid if len(valid) >= self.size else [one for _, one in sorted(self.last.items())]
        return Group(self.task, tuple(chosen))
