"""An episode in progress, as the scheduler sees it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import anyio

from envkit.protocols import Gate
from envkit.types import RolloutRequest, StopReason, Trajectory

from ..rollout.episode import RunningEpisode


@dataclass(slots=True, eq=False)
class InFlight:
    """An episode in progress.

    Attributes:
        request: What is played.
        episode: Its record so far.
        version: Version of the weights when its first turn reached the engine, so that none of its tokens is older;
            None before its first turn.
        is_replaced: Whether another member was started because this one takes long.
        verdict: Why the scheduler aborts it; None if it does not.
        scope: Cancels it.
    """

    request: RolloutRequest
    episode: RunningEpisode
    version: int | None = None
    is_replaced: bool = False
    verdict: StopReason | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)

    def abort(self, verdict: StopReason) -> None:
        """End the episode at once. Its completion in progress is lost; its finished turns are in its record."""
        self.verdict = verdict
        self.scope.cancel()

    def aborted(self) -> Trajectory:
        """Return the record of an aborted episode, which is void."""
        assert self.verdict is not None, "only an aborted episode"
        reason = "its tokens would be too old" if self.verdict is StopReason.STALE else "its group did not need it"
        self.episode.void(self.verdict, f"aborted: {reason}")
        return self.episode.trajectory()


@dataclass(frozen=True, slots=True)
class VersionGate(Gate):
    """A gate that notes with which version of the weights an episode begins to act."""

    gate: Gate
    flight: InFlight
    version: Callable[[], int]

    def arrive(self) -> None:
        self.gate.arrive()

    async def together(self) -> None:
        await self.gate.together()
        if self.flight.version is None:
            self.flight.version = self.version()

    def leave(self, *, arrived: bool) -> None:
        self.gate.leave(arrived=arrived)
