"""Episodes of a fleet. If the worker of an episode is lost, the episode is rebuilt in another worker, if possible."""

from __future__ import annotations

from asyncio import Future
from collections.abc import Awaitable, Callable
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self, TypeAlias, TypeVar

from msgspec import Raw
from msgspec.structs import replace

from envkit.errors import CapacityError, EnvkitError, SandboxLostError, SandboxStartError, UnreachableError
from envkit.fleet.env_worker import EnvWorker, LostDuringCallError, WorkerLostError
from envkit.fleet.suspects import Suspicion, is_from_outside
from envkit.protocols import Episode
from envkit.types import JSON, Observation, Reset, Step

T = TypeVar("T")

Slot: TypeAlias = tuple[EnvWorker, AbstractAsyncContextManager[Episode]]
"""A worker with a free slot, and a lease of an episode on its server, which may reset the environment when entered."""
OpenSlot: TypeAlias = Callable[[bool], AbstractAsyncContextManager[Slot]]
"""Holds a slot for the duration of the block, after a wait. The argument is whether the worker must have only one."""

REBUILDS = 3
"""Default of the maximum number of rebuilds per episode."""


@dataclass(slots=True)
class EpisodeTally:
    """How often the episodes of a host were rebuilt in another worker, and how many could not be, and are void."""

    rebuilt: int = 0
    void: int = 0


class FleetEpisode(Episode):
    """An episode in a worker of a fleet. If the worker is lost, the episode is rebuilt in another worker.

    To start it, enter it with ``async with``, which waits for a free slot.

    An episode can be rebuilt if task and actions alone determine what its environment answers. A rebuild resets the
    environment in the new worker and replays all actions; each answer must equal the original answer. The next answer
    to the caller contains the cause of the loss in ``info["rebuilt"]``. If the rebuild fails, the episode is void: the
    current call and all later calls raise `SandboxLostError`.

    A call that may have caused a loss is repeated alone, and the episode then returns to a shared worker; see
    `envkit.fleet.suspects`.

    Args:
        open_slot: Takes a slot in a worker; called at the start and again after each loss.
        suspicion: Decides which losses the episode caused, and whether it may be rebuilt.
        tally: Is updated by this episode.
    """

    def __init__(self, open_slot: OpenSlot, suspicion: Suspicion, tally: EpisodeTally) -> None:
        self._open_slot = open_slot
        self._suspicion = suspicion
        self._tally = tally
        self._slot = AsyncExitStack()
        self._worker: EnvWorker
        self._episode: Episode
        self._visits: WorkerLostError | None = None
        """The loss because of which the episode plays alone for one call; None if it does not."""
        self._pending_action = ""
        """The action of the last `start_step`."""
        self._step_loss: WorkerLostError | None = None
        """The loss of the worker that ended the last started step; None if no loss ended it."""
        self._start: int | None = None
        self._log: list[tuple[str, int]] = []
        self._loss: SandboxLostError | None = None
        """The error that made the episode void; None if it is not void."""
        self._rebuilt_cause = ""

    @property
    def turn(self) -> int:
        return self._episode.turn

    async def reset(self) -> Reset:
        while True:
            episode = self._played()
            try:
                reset = await self._attempt("reset", episode.reset)
            except WorkerLostError as loss:
                await self._rebuild(loss)
            else:
                self._start = _fingerprint(reset.observation)
                await self._return()
                return replace(reset, info=self._with_rebuilt(reset.info))

    async def step(self, action: str) -> Step:
        loss, self._step_loss = self._step_loss, None
        is_suspect = isinstance(loss, LostDuringCallError) and not is_from_outside(loss.worker)
        self._suspicion.suspect = loss.worker if loss is not None and is_suspect else None
        while True:
            if loss is not None:
                await self._rebuild(loss)
            episode = self._played()
            try:
                step = await self._attempt("step", partial(episode.step, action))
            except WorkerLostError as error:
                loss = error
            else:
                self._keep(action, step)
                if not (step.terminated or step.truncated):
                    await self._return()
                return step if not self._rebuilt_cause else replace(step, info=self._with_rebuilt(step.info))

    async def grade(self) -> float | None:
        """Grade the episode; see `envkit.protocols.Episode.grade`. If the worker is lost, the episode is void.

        The loss is attributed to this episode, because a grader reads what its agent wrote.
        """
        episode = self._played()
        try:
            return await self._worker.call(episode.grade)
        except WorkerLostError as loss:
            if isinstance(loss, LostDuringCallError):
                self._suspicion.attribute(loss.worker)
            raise self._void(SandboxLostError(loss.sandbox_id, loss.cause)) from None

    def start_step(self, action: str) -> Future[Raw] | None:
        if self._rebuilt_cause or self._loss is not None:
            return None
        self._pending_action = action
        return self._worker.start_step(self._episode, action)

    def finish_step(self, answer: Future[Raw]) -> Step:
        try:
            step = self._episode.finish_step(answer)
        except WorkerLostError as loss:
            self._step_loss = loss
            raise
        except UnreachableError:
            self._worker.cut_off.add(self)
            raise
        self._keep(self._pending_action, step)
        return step

    async def repeat_step(self, action: str) -> Step:
        try:
            return await self._worker.call(self._played().repeat_step, action)
        except LostDuringCallError as loss:
            raise SandboxLostError(loss.sandbox_id, loss.cause) from None

    async def __aenter__(self) -> Self:
        try:
            await self._take_slot(alone=self._suspicion.is_isolated)
        except WorkerLostError as loss:
            await self._rebuild(loss)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._slot.__aexit__(kind, error, trace)

    def _played(self) -> Episode:
        if self._loss is not None:
            raise self._loss.with_traceback(None)
        return self._episode

    def _keep(self, action: str, step: Step) -> None:
        if self._suspicion.rebuilds:
            self._log.append((action, _fingerprint_of_step(step)))

    def _with_rebuilt(self, info: dict[str, JSON]) -> dict[str, JSON]:
        cause, self._rebuilt_cause = self._rebuilt_cause, ""
        return {**info, "rebuilt": cause} if cause else info

    async def _attempt(self, name: str, call: Callable[[], Awaitable[T]]) -> T:
        """Await `call`, the reset or step that the episode's caller requested; `name` is the method's name."""
        try:
            if self in self._worker.cut_off:
                self._worker.cut_off.discard(self)
                if self._worker.gone.is_set():  # the unanswered step may have caused the loss
                    raise LostDuringCallError(self._worker)
            return await self._worker.call(call)
        except LostDuringCallError as loss:
            self._suspicion.lost_during(name, loss.worker)
            raise

    async def _return(self) -> None:
        """Return to a shared worker, if the episode has repeated a suspect call alone."""
        self._suspicion.suspect = None
        if self._visits is not None:
            await self._rebuild(self._visits, is_return=True)

    async def _rebuild(self, loss: WorkerLostError, *, is_return: bool = False) -> None:
        """Rebuild the episode in another worker; if that worker is lost, too, try again.

        `is_return` says that it only returns to a shared worker after a suspect call, without a new loss.

        Raises:
            SandboxLostError: The episode cannot be rebuilt, and is void.
        """
        try:
            while is_return or self._suspicion.may_rebuild(loss.worker):
                try:
                    await self._move(loss)
                    turn = await self._replay()
                except WorkerLostError as again:
                    loss, is_return = again, False
                    continue
                except EnvkitError as error:
                    why = f"rebuild failed: {error}"
                    raise self._void(SandboxLostError(loss.sandbox_id, loss.cause.followed_by(why))) from None
                if turn is not None:
                    why = f"rebuild failed: the replay differed in turn {turn}"
                    raise self._void(SandboxLostError(loss.sandbox_id, loss.cause.followed_by(why)))
                self._rebuilt_cause = str(loss.cause)
                self._tally.rebuilt += not is_return
                return
            raise self._void(SandboxLostError(loss.sandbox_id, self._suspicion.verdict or loss.cause))
        except BaseException:
            # The episode cannot be used any more, because it is unknown how many actions were replayed.
            if self._loss is None:
                self._void(SandboxLostError(loss.sandbox_id, loss.cause.followed_by("rebuild interrupted")))
            raise

    def _void(self, loss: SandboxLostError) -> SandboxLostError:
        """Make the episode void because of `loss`, and return it."""
        self._loss = loss
        self._log.clear()
        self._tally.void += 1
        return loss

    async def _move(self, loss: WorkerLostError) -> None:
        """Release the slot in the current worker, and take a slot in another worker."""
        left, self._slot = self._slot, AsyncExitStack()
        self._visits = None
        await left.aclose()
        if self._suspicion.plays_alone:
            with suppress(CapacityError, SandboxStartError):  # otherwise, repeat the suspect call in a shared worker
                await self._take_slot(alone=True)
                self._visits = loss if self._worker.is_extra and not self._suspicion.is_isolated else None
                return
        await self._take_slot(alone=False)

    async def _take_slot(self, *, alone: bool) -> None:
        async with AsyncExitStack() as stack:
            self._worker, lease = await stack.enter_async_context(self._open_slot(alone))
            is_new = self._start is None
            enter = partial(self._attempt, "reset") if is_new else self._worker.call
            self._episode = await enter(lease.__aenter__)
            stack.push_async_exit(partial(self._leave, lease))
            self._slot = stack.pop_all()

    async def _leave(
        self,
        lease: AbstractAsyncContextManager[Episode],
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the lease on the worker's server. If the worker is lost during this call, ignore the loss."""
        self._worker.cut_off.discard(self)
        with self._worker.within_reach(), suppress(UnreachableError):
            await lease.__aexit__(kind, error, trace)

    async def _replay(self) -> int | None:
        """Replay the reset and all actions. Return the first turn (0: reset) that was answered differently, or None."""
        if self._start is None:  # the episode was not reset yet
            return None
        if _fingerprint((await self._worker.call(self._episode.reset)).observation) != self._start:
            return 0
        for turn, (action, known) in enumerate(self._log, 1):
            if _fingerprint_of_step(await self._worker.call(self._episode.step, action)) != known:
                return turn
        return None


def _fingerprint(observation: Observation) -> int:
    return hash((observation.text, observation.legal_moves, observation.images, observation.role))


def _fingerprint_of_step(step: Step) -> int:
    # Hash the reward as text: NaN is not equal to itself, and its hash may differ each time.
    return hash((_fingerprint(step.observation), repr(step.reward), step.terminated, step.truncated))
