"""A player that counts the tokens which its engine samples, and the time in which the engine is busy."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from envkit import clock
from envkit.protocols import EpisodePlayer, Player
from envkit.types import Action, Observation, Reset, RolloutRequest

from .accounting import Ledger


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

    @property
    def repeats(self) -> bool:
        return self.player.repeats

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        return _Episode(self.player.begin(request, start), request.session, self)


@dataclass(frozen=True, slots=True)
class _Episode(EpisodePlayer):
    player: EpisodePlayer
    session: str
    counted: CountedPlayer

    async def act(self, observation: Observation) -> Action | str:
        with self.counted.busy.one():
            action = await self.player.act(observation)
        if isinstance(action, Action):
            self.counted.ledger.receive(self.session, len(action.completion.token_ids))
        return action

    def end(self) -> None:
        self.player.end()
