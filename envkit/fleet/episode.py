"""An episode of the fleet: it outlives the box that it began in, if its world can be rebuilt in another one."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from envkit.errors import EnvkitError, SandboxLostError
from envkit.fleet.env_worker import LostDuringCallError, WorkerUnresponsiveError
from envkit.fleet.suspect_queue import SuspectQueue
from envkit.protocols import ResumableEpisode, SplitStepEpisode
from envkit.types import JSON, Observation, Reset, Step

T = TypeVar("T")

Lease: TypeAlias = AbstractAsyncContextManager[ResumableEpisode]
Seat: TypeAlias = Callable[[], AbstractAsyncContextManager[Lease]]
"""Gives a place in a healthy box, and the lease of an episode there; entering that may reset its world."""

REBUILDS = 3
"""How often one episode may lose its box and be rebuilt, unless the caller says otherwise."""

_SILENCES = 1
"""How often of these its box may have fallen silent during a call of this very episode, which may be why it did."""


class EpisodeState(StrEnum):
    """Where an episode of the fleet is in its life."""

    PLAYING = "playing"
    REBUILDING = "rebuilding"
    """Its box is gone, and what was played is being played again in another one."""
    VOID = "void"
    """Its box is gone, and it cannot be rebuilt."""


@dataclass(slots=True)
class EpisodeTally:
    """What became of episodes that lost their box.

    Attributes:
        rebuilt: Times that one was rebuilt and went on.
        void: Episodes that could not be.
    """

    rebuilt: int = 0
    void: int = 0


class FleetEpisode:
    """Plays a task in one box, and after its loss in the next; entering it waits for a place.

    A world whose state is a function of task and actions is rebuilt by playing the same actions again; every answer has
    to be the one that was given before. The first answer after that says so: ``info["rebuilt"]`` is the cause of the
    loss. Otherwise the episode is void: the call raises `SandboxLostError`, as does every later one.

    A call during which its box was lost may be why it was, as may every other one that was under way there. They are
    made again one after the other, and one during which the next box is lost too makes its episode void. Who has waited
    for long goes on beside the others, and nobody is blamed for what happens then.

    Args:
        seat: Gives it a place, and another one after a loss.
        rebuilds: How often it may be rebuilt; 0 for a world that cannot be.
        tally: Where rebuilt and void episodes are counted.
        turns: Give those calls their turn; None where each episode has a box of its own.
        goes_on: Whether its place is one that another server gave it.

    Attributes:
        state: Where it is in its life.
    """

    def __init__(
        self,
        seat: Seat,
        *,
        rebuilds: int,
        tally: EpisodeTally,
        turns: SuspectQueue | None = None,
        goes_on: bool = False,
    ) -> None:
        self.state = EpisodeState.PLAYING
        self._seat = seat
        self._keeps_log = rebuilds > 0
        self._rebuilds_left = rebuilds
        self._silences_left = _SILENCES
        self._tally = tally
        self._turns = turns
        self._is_suspect = False
        """Whether a box was lost during the call that is made now, or again."""
        self._goes_on = goes_on
        self._seated = AsyncExitStack()
        self._episode: ResumableEpisode
        self._asking: SplitStepEpisode | None = None
        self._asked = ""
        """The action that was asked for last."""
        self._lost_asking: SandboxLostError | None = None
        """How its box was lost before it was answered, if it was."""
        self._start: int | None = None
        self._log: list[tuple[str, int]] = []
        self._loss: SandboxLostError | None = None
        self._news = ""

    @property
    def turn(self) -> int:
        return self._episode.turn

    async def reset(self) -> Reset:
        """Start the episode; see `envkit.protocols.Episode.reset`."""
        while True:
            episode = self._played()
            try:
                reset = await self._in_turn("reset", episode.reset)
            except SandboxLostError as loss:
                if self._goes_on and self._start is None:  # nobody knows how far it had come
                    self._rebuilds_left = 0
                await self._rebuild(loss)
            else:
                if episode.turn:  # it goes on where another server left it, and only that one knew what was played
                    self._rebuilds_left, self._keeps_log = 0, False
                self._start = _fingerprint(reset.observation)
                return Reset(reset.observation, self._told(reset.info))

    async def step(self, action: str) -> Step:
        """Play one action; see `envkit.protocols.Episode.step`."""
        loss, self._lost_asking = self._lost_asking, None
        self._is_suspect = isinstance(loss, LostDuringCallError)
        while True:
            if loss is not None:
                await self._rebuild(loss)
            episode = self._played()
            try:
                step = await self._in_turn("step", partial(episode.step, action))
            except SandboxLostError as error:
                loss = error
            else:
                self._keep(action, step)
                return step if not self._news else replace(step, info=self._told(step.info))

    def start_step(self, action: str) -> Future[Raw] | None:
        """Begin a step; see `envkit.protocols.AskingEpisode`."""
        if self._asking is None or self._news or self.state is not EpisodeState.PLAYING:
            return None
        self._asked = action
        return self._asking.start_step(action)

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Return the step that was asked for; see `envkit.protocols.AskingEpisode`."""
        assert self._asking is not None
        try:
            step = self._asking.finish_step(answer)
        except SandboxLostError as loss:
            self._lost_asking = loss
            raise
        self._keep(self._asked, step)
        return step

    async def repeat_step(self, action: str) -> Step:
        """Ask for the answer to the last step once more; see `envkit.protocols.LastingEpisode.repeat_step`."""
        try:
            return await self._played().repeat_step(action)
        except LostDuringCallError as loss:
            raise SandboxLostError(loss.sandbox_id, loss.cause) from None

    async def __aenter__(self) -> Self:
        try:
            await self._sit()
        except SandboxLostError as loss:
            if self._goes_on:  # where another server left it, and only that one knew what was played
                self._rebuilds_left = 0
            await self._rebuild(loss)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._seated.__aexit__(kind, error, trace)

    def _played(self) -> ResumableEpisode:
        if self.state is EpisodeState.VOID:
            assert self._loss is not None
            raise self._loss.with_traceback(None)
        return self._episode

    def _keep(self, action: str, step: Step) -> None:
        if self._keeps_log:
            self._log.append((action, _fingerprint_of_step(step)))

    def _told(self, info: dict[str, JSON]) -> dict[str, JSON]:
        news, self._news = self._news, ""
        return {**info, "rebuilt": news} if news else info

    async def _in_turn(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call of who plays, in turn if a box was lost during it before.

        Raises:
            SandboxLostError: The box is lost. If that is the second one during this very call, there is no other.
        """
        if not self._is_suspect:
            try:
                return await call()
            except LostDuringCallError:
                self._is_suspect = True
                raise
        if self._turns is None:
            return await self._again(name, call, lambda: True)
        async with self._turns.turn() as is_alone:
            return await self._again(name, call, is_alone)

    async def _again(self, name: str, call: Callable[[], Awaitable[T]], is_alone: Callable[[], bool]) -> T:
        try:
            return await call()
        except LostDuringCallError as loss:
            cause = loss.cause
            if is_alone():
                self._rebuilds_left = 0
                cause = cause.followed_by(f"the box before was lost during the same {name} too")
            raise SandboxLostError(loss.sandbox_id, cause) from None

    async def _rebuild(self, loss: SandboxLostError) -> None:
        """Bring the episode to where it was, in other boxes, until one of them lasts.

        Raises:
            SandboxLostError: It is void.
        """
        self.state = EpisodeState.REBUILDING
        try:
            await self._come_back(loss)
        except SandboxLostError as lost:
            self._end(lost)
            raise
        except BaseException:  # nobody knows how far it came
            self._end(SandboxLostError(loss.sandbox_id, loss.cause.followed_by("and its rebuild was interrupted")))
            raise
        self.state = EpisodeState.PLAYING
        self._tally.rebuilt += 1

    async def _come_back(self, loss: SandboxLostError) -> None:
        while self._may_try(loss):
            self._rebuilds_left -= 1
            try:
                await self._move()
                turn = await self._replay()
            except SandboxLostError as again:
                loss = again
                continue
            except EnvkitError as error:
                raise SandboxLostError(loss.sandbox_id, loss.cause.followed_by(f"and {error}")) from None
            if turn is not None:
                difference = f"when it was rebuilt, its world answered otherwise in turn {turn}"
                raise SandboxLostError(loss.sandbox_id, loss.cause.followed_by(difference))
            self._news = str(loss.cause)
            return
        raise SandboxLostError(loss.sandbox_id, loss.cause)

    def _may_try(self, loss: SandboxLostError) -> bool:
        if isinstance(loss, WorkerUnresponsiveError):
            if not self._silences_left:
                return False
            self._silences_left -= 1
        return self._rebuilds_left > 0

    def _end(self, loss: SandboxLostError) -> None:
        self.state, self._loss = EpisodeState.VOID, loss
        self._log.clear()
        self._tally.void += 1

    async def _move(self) -> None:
        """Leave the box that is gone for another one."""
        left, self._seated = self._seated, AsyncExitStack()
        await left.aclose()
        await self._sit()

    async def _sit(self) -> None:
        async with AsyncExitStack() as seated:
            lease = await seated.enter_async_context(self._seat())
            if self._start is None:
                self._episode = await self._in_turn("reset", lease.__aenter__)
            else:
                self._episode = await lease.__aenter__()
            seated.push_async_exit(lease)
            self._seated = seated.pop_all()
        self._asking = self._episode if isinstance(self._episode, SplitStepEpisode) else None

    async def _replay(self) -> int | None:
        """Play again what was played; return the first turn that was answered otherwise, 0 for the reset."""
        if self._start is None:  # nothing was
            return None
        if _fingerprint((await self._episode.reset()).observation) != self._start:
            return 0
        for turn, (action, known) in enumerate(self._log, 1):
            if _fingerprint_of_step(await self._episode.step(action)) != known:
                return turn
        return None


def _fingerprint(observation: Observation) -> int:
    return hash((observation.text, observation.legal_moves, observation.images))


def _fingerprint_of_step(step: Step) -> int:
    # As text, since no NaN is another one's equal.
    return hash((_fingerprint(step.observation), repr(step.reward), step.terminated, step.truncated))
