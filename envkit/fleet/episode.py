"""An episode of the fleet: if its worker is lost, the episode is rebuilt in another worker, where that is possible."""

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
OpenSlot: TypeAlias = Callable[[], AbstractAsyncContextManager[Lease]]
"""Waits for a slot in a healthy worker and returns a lease on an episode there; entering the lease may reset the
environment."""

REBUILDS = 3
"""Default limit on rebuilds per episode."""

_UNRESPONSIVE = 1
"""Limit on rebuilds after workers became unresponsive during calls of this episode, which may be the reason."""


class EpisodeState(StrEnum):
    """State of an episode of the fleet."""

    PLAYING = "playing"
    REBUILDING = "rebuilding"
    """Its worker is lost, and its actions are being replayed in another one."""
    VOID = "void"
    """Its worker is lost, and it cannot be rebuilt."""


@dataclass(slots=True)
class EpisodeTally:
    """Outcomes of episodes that lost their worker.

    Attributes:
        rebuilt: Number of successful rebuilds.
        void: Number of void episodes.
    """

    rebuilt: int = 0
    void: int = 0


class FleetEpisode:
    """Plays a task in one worker, and after the loss of that worker in another. Entering it waits for a slot.

    An environment whose state is a function of task and actions is rebuilt by a replay of the actions; each answer must
    equal the first one. The next answer carries the cause of the loss in ``info["rebuilt"]``. If the rebuild fails, the
    episode is void: this call and all later ones raise `SandboxLostError`.

    Any call under way when a worker was lost may have caused the loss. These suspect calls are retried one at a time; a
    second loss during the same call makes the episode void. A call that has waited too long is retried concurrently,
    and a loss is then not attributed to it.

    Args:
        open_slot: Assigns a slot; called again after each loss.
        rebuilds: Limit on rebuilds; 0 if the environment cannot be rebuilt.
        tally: Counts rebuilt and void episodes.
        turns: Queue of suspect calls; None if each worker plays one episode.
        goes_on: Whether a previous server started the episode and this one resumes it.

    Attributes:
        state: Its state.
    """

    def __init__(
        self,
        open_slot: OpenSlot,
        *,
        rebuilds: int,
        tally: EpisodeTally,
        turns: SuspectQueue | None = None,
        goes_on: bool = False,
    ) -> None:
        self.state = EpisodeState.PLAYING
        self._open_slot = open_slot
        self._keeps_log = rebuilds > 0
        self._rebuilds_left = rebuilds
        self._unresponsive_left = _UNRESPONSIVE
        self._tally = tally
        self._suspects = turns
        self._is_suspect = False
        """Whether a worker was lost during an attempt of the current call."""
        self._goes_on = goes_on
        self._slot = AsyncExitStack()
        self._episode: ResumableEpisode
        self._split_episode: SplitStepEpisode | None = None
        self._pending_action = ""
        """The action of the last `start_step`."""
        self._step_loss: SandboxLostError | None = None
        """The loss that ended the last `start_step`; None if it was answered."""
        self._start: int | None = None
        self._log: list[tuple[str, int]] = []
        self._loss: SandboxLostError | None = None
        self._rebuilt_cause = ""

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
                if self._goes_on and self._start is None:  # its actions are unknown, so they cannot be replayed
                    self._rebuilds_left = 0
                await self._rebuild(loss)
            else:
                if episode.turn:  # resumed from a previous server, so its actions are unknown here
                    self._rebuilds_left, self._keeps_log = 0, False
                self._start = _fingerprint(reset.observation)
                return Reset(reset.observation, self._with_rebuilt(reset.info))

    async def step(self, action: str) -> Step:
        """Play one action; see `envkit.protocols.Episode.step`."""
        loss, self._step_loss = self._step_loss, None
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
                return step if not self._rebuilt_cause else replace(step, info=self._with_rebuilt(step.info))

    def start_step(self, action: str) -> Future[Raw] | None:
        """Start a step; see `envkit.protocols.SplitStepEpisode`."""
        if self._split_episode is None or self._rebuilt_cause or self.state is not EpisodeState.PLAYING:
            return None
        self._pending_action = action
        return self._split_episode.start_step(action)

    def finish_step(self, answer: Future[Raw]) -> Step:
        """Decode the started step; see `envkit.protocols.SplitStepEpisode`."""
        assert self._split_episode is not None
        try:
            step = self._split_episode.finish_step(answer)
        except SandboxLostError as loss:
            self._step_loss = loss
            raise
        self._keep(self._pending_action, step)
        return step

    async def repeat_step(self, action: str) -> Step:
        """Return the answer to the last step again; see `envkit.protocols.ResumableEpisode.repeat_step`."""
        try:
            return await self._played().repeat_step(action)
        except LostDuringCallError as loss:
            raise SandboxLostError(loss.sandbox_id, loss.cause) from None

    async def __aenter__(self) -> Self:
        try:
            await self._take_slot()
        except SandboxLostError as loss:
            if self._goes_on:  # the previous server's actions are unknown here
                self._rebuilds_left = 0
            await self._rebuild(loss)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._slot.__aexit__(kind, error, trace)

    def _played(self) -> ResumableEpisode:
        if self.state is EpisodeState.VOID:
            assert self._loss is not None
            raise self._loss.with_traceback(None)
        return self._episode

    def _keep(self, action: str, step: Step) -> None:
        if self._keeps_log:
            self._log.append((action, _fingerprint_of_step(step)))

    def _with_rebuilt(self, info: dict[str, JSON]) -> dict[str, JSON]:
        cause, self._rebuilt_cause = self._rebuilt_cause, ""
        return {**info, "rebuilt": cause} if cause else info

    async def _in_turn(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Make a call for the caller; a suspect call waits for its turn first.

        Raises:
            SandboxLostError: The worker was lost. A second loss during the same call is final.
        """
        if not self._is_suspect:
            try:
                return await call()
            except LostDuringCallError:
                self._is_suspect = True
                raise
        if self._suspects is None:
            return await self._call_again(name, call, lambda: True)
        async with self._suspects.turn() as is_alone:
            return await self._call_again(name, call, is_alone)

    async def _call_again(self, name: str, call: Callable[[], Awaitable[T]], is_alone: Callable[[], bool]) -> T:
        try:
            return await call()
        except LostDuringCallError as loss:
            cause = loss.cause
            if is_alone():
                self._rebuilds_left = 0
                cause = cause.followed_by(f"the previous worker was lost during the same {name}")
            raise SandboxLostError(loss.sandbox_id, cause) from None

    async def _rebuild(self, loss: SandboxLostError) -> None:
        """Rebuild the episode in other workers until it succeeds.

        Raises:
            SandboxLostError: The episode is void.
        """
        self.state = EpisodeState.REBUILDING
        try:
            await self._retry_rebuild(loss)
        except SandboxLostError as lost:
            self._end(lost)
            raise
        except BaseException:  # the replay may have stopped at any action
            self._end(SandboxLostError(loss.sandbox_id, loss.cause.followed_by("and its rebuild was interrupted")))
            raise
        self.state = EpisodeState.PLAYING
        self._tally.rebuilt += 1

    async def _retry_rebuild(self, loss: SandboxLostError) -> None:
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
                difference = f"the replay differed in turn {turn}"
                raise SandboxLostError(loss.sandbox_id, loss.cause.followed_by(difference))
            self._rebuilt_cause = str(loss.cause)
            return
        raise SandboxLostError(loss.sandbox_id, loss.cause)

    def _may_try(self, loss: SandboxLostError) -> bool:
        if isinstance(loss, WorkerUnresponsiveError):
            if not self._unresponsive_left:
                return False
            self._unresponsive_left -= 1
        return self._rebuilds_left > 0

    def _end(self, loss: SandboxLostError) -> None:
        self.state, self._loss = EpisodeState.VOID, loss
        self._log.clear()
        self._tally.void += 1

    async def _move(self) -> None:
        """Leave the lost worker for another one."""
        left, self._slot = self._slot, AsyncExitStack()
        await left.aclose()
        await self._take_slot()

    async def _take_slot(self) -> None:
        async with AsyncExitStack() as stack:
            lease = await stack.enter_async_context(self._open_slot())
            if self._start is None:
                self._episode = await self._in_turn("reset", lease.__aenter__)
            else:
                self._episode = await lease.__aenter__()
            stack.push_async_exit(lease)
            self._slot = stack.pop_all()
        self._split_episode = self._episode if isinstance(self._episode, SplitStepEpisode) else None

    async def _replay(self) -> int | None:
        """Replay all actions; return the first turn whose answer differs (0 is the reset), or None."""
        if self._start is None:  # nothing to replay
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
    # Compare as text, because NaN is not equal to itself.
    return hash((_fingerprint(step.observation), repr(step.reward), step.terminated, step.truncated))
