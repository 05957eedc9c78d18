"""Episodes in progress, as the scheduler sees them: when they began to act, and what the engine samples for them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import anyio

from envkit import clock
from envkit.protocols import Episode, EpisodePlayer, Player
from envkit.types import Action, Observation, Reset, RolloutRequest, StopReason, Trajectory

from ..rollout.episode import Phase, RunningEpisode
from .accounting import Ledger

_ABORT_S = 5.0
"""Maximum seconds that an engine may take to return the tokens of a completion that is aborted."""


@dataclass(slots=True, eq=False)
class InFlight(RunningEpisode):
    """An episode in progress.

    Attributes:
        weights: Returns the version of the engine's weights.
        version: This version when its first turn reached the engine, so that none of its tokens is older; None before
            its first turn.
        is_replaced: Whether another member was started because this one takes long.
        verdict: Why the scheduler aborts it; None if it does not.
    """

    weights: Callable[[], int] = field(kw_only=True)
    version: int | None = None
    is_replaced: bool = False
    verdict: StopReason | None = None
    scope: anyio.CancelScope = field(default_factory=anyio.CancelScope)
    ended: anyio.Event = field(default_factory=anyio.Event)

    def waits(self, doing: Phase) -> float:
        if doing == "engine" and self.version is None:
            self.version = self.weights()
        return RunningEpisode.waits(self, doing)

    async def abort(self) -> None:
        """End the episode at once. Its record has the tokens so far of a completion in progress."""
        self.is_aborted = True
        if self.doing == "engine" and self.player is not None:
            with anyio.move_on_after(_ABORT_S):
                await self.player.abort()
                await self.ended.wait()
        self.scope.cancel()

    def aborted(self) -> Trajectory:
        """Return the record of an aborted episode, which is void."""
        assert self.verdict is not None, "only an aborted episode"
        reason = "its tokens would be too old" if self.verdict is StopReason.STALE else "its group did not need it"
        self.void(self.verdict, f"aborted: {reason}")
        return self.trajectory()


@dataclass(slots=True)
class Busy:
    """The time in which something is in progress."""

    count: int = 0
    since_s: float = 0.0
    total_s: float = 0.0

    @contextmanager
    def one(self) -> Iterator[None]:
        """Something is in progress during the block."""
        if not self.count:
            self.since_s = clock.now()
        self.count += 1
        try:
            yield
        finally:
            self.count -= 1
            if not self.count:
                self.total_s += clock.now() - self.since_s

    def take(self) -> float:
        """Return the seconds since the last call."""
        now = clock.now()
        found = self.total_s + (now - self.since_s if self.count else 0.0)
        self.total_s, self.since_s = 0.0, now
        return found


@dataclass(frozen=True, slots=True)
class CountedPlayer(Player):
    """A player whose tokens are entered in the ledger as they come from the engine."""

    player: Player
    ledger: Ledger
    busy: Busy = field(default_factory=Busy)

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return _Episode(self.player.begin(request, start), request.session, self)


@dataclass(frozen=True, slots=True)
class _Episode(EpisodePlayer):
    player: EpisodePlayer
    session: str
    counted: CountedPlayer

    def enter(self, episode: Episode) -> None:
        if (enter := getattr(self.player, "enter", None)) is not None:  # a player of another package may lack it
            enter(episode)

    async def act(self, observation: Observation) -> Action | str:
        with self.counted.busy.one():
            action = await self.player.act(observation)
        if isinstance(action, Action):
            self.counted.ledger.receive(self.session, len(action.completion.token_ids))
        return action

    def calls(self) -> Sequence[Action]:
        found: Sequence[Action] = getattr(self.player, "calls", tuple)()
        for call in found:
            self.counted.ledger.receive(self.session, len(call.completion.token_ids))
        return found

    async def abort(self) -> None:
        await self.player.abort()

    def end(self) -> None:
        self.player.end()
