"""The operations of the server, which HTTP and WebSocket share, and the conversion of errors into problem objects."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Mapping
from copy import copy
from typing import Any, ClassVar, TypeVar

import anyio
import msgspec

from envkit import __version__
from envkit.errors import (
    EnvError,
    EnvkitError,
    RequestError,
    SandboxNotFoundError,
    UnreachableError,
    did_you_mean,
    to_problem,
)
from envkit.http.api.status_page import Overview
from envkit.http.auth.caller import EVERYBODY, NOBODY, PLAY, SANDBOX, Caller, renamed
from envkit.http.protocol.messages import (
    CreateSessionBody,
    DoneReply,
    EnvReply,
    EnvsReply,
    Frame,
    HealthReply,
    NoBody,
    Outcome,
    Problem,
    ReadyReply,
    ResetReply,
    SessionBody,
    SessionReply,
    SessionsReply,
    SessionStepBody,
    StepAnswer,
    StepBody,
    StepFrame,
    StepReply,
    read,
    read_each,
    write,
)
from envkit.http.sandboxes.lookup import seen_by
from envkit.http.sandboxes.operations import SandboxOperations
from envkit.http.sessions.counters import StepMetrics
from envkit.http.sessions.metrics import Collect, exposition
from envkit.http.sessions.session import Move, SessionView
from envkit.http.sessions.table import SessionTable
from envkit.protocols import ReadinessHost
from envkit.registry import EnvSpec

_log = logging.getLogger(__name__)

T = TypeVar("T")

_STEP = msgspec.json.Decoder(SessionStepBody)
_STEPS = msgspec.json.Decoder(list[SessionStepBody])


class Operations:
    """The operations on sessions in version 1 of the protocol.

    Args:
        sessions: All sessions of the server.
        envs: Returns the available environments.
        metrics: Returns metrics that are shown in addition to those of sessions.

    Attributes:
        sandboxes: Operations on sandboxes; None if the server lends none.
        sends_traces: Whether errors of environments contain the traceback and full file names.
    """

    def __init__(
        self,
        sessions: SessionTable,
        envs: Callable[[], Iterable[EnvSpec]],
        metrics: Collect | None = None,
    ) -> None:
        self.sessions = sessions
        self.sandboxes: SandboxOperations | None = None
        self.sends_traces = False
        self._metrics = metrics
        self._envs = envs
        self._caller = EVERYBODY

    def methods(self) -> dict[str, type]:
        """Return the methods of the WebSocket with the types of their parameters."""
        more = {} if self.sandboxes is None else self.sandboxes.methods()
        return {"step": SessionStepBody, **{name: one.type for name, (one, _) in self._METHODS.items()}, **more}

    def by(self, caller: Caller) -> Operations:
        """Return a copy of the operations that acts for `caller`: session ids then mean sessions of this caller."""
        if caller is self._caller:
            return self
        operations = copy(self)
        operations._caller = caller
        return operations

    async def create(self, body: CreateSessionBody) -> ResetReply:
        self._refuse_when_closing()
        turn, start = await self.sessions.create(self._caller.key(body.session_id), body.task())
        return ResetReply.of(turn, start)

    async def step(self, id: str, body: StepBody) -> StepReply:
        """Play a step of the caller's session `id`."""
        self._refuse_when_closing()
        return StepReply.of(body.turn + 1, await self.sessions.step(self._caller.key(id), body.turn, body.action))

    async def delete(self, body: SessionBody) -> DoneReply:
        await self.sessions.delete(self._caller.key(body.session_id))
        return DoneReply()

    async def session(self, body: SessionBody) -> SessionReply:
        return self._session_reply(self.sessions.get(self._caller.key(body.session_id)))

    async def list_sessions(self, body: NoBody) -> SessionsReply:
        return SessionsReply(
            [self._session_reply(view) for view in self.sessions.views() if self._caller.sees(view.id)]
        )

    async def list_envs(self, body: NoBody) -> EnvsReply:
        return EnvsReply(
            [EnvReply(spec.id, spec.summary, dict(spec.options), spec.replayable) for spec in self._envs()]
        )

    async def health(self, body: NoBody) -> HealthReply:
        return HealthReply(__version__)

    async def ready(self, body: NoBody) -> ReadyReply:
        capacity, leased = self.sessions.capacity, self.sessions.leased
        host, why = self.sessions.host, ""
        if self.sessions.is_closing:
            why = "the server is shutting down"
        elif isinstance(host, ReadinessHost) and host.why_unready:
            why = host.why_unready
        elif leased >= capacity:
            why = f"all {capacity} episode slots are in use"
        return ReadyReply(not why, capacity, leased, why)

    async def overview(self) -> Overview | None:
        """Return what the status page shows to the caller; None if the request needs a token and has none."""
        caller, sandboxes = self._caller, None
        if caller is NOBODY:
            return None
        if self.sandboxes is not None and caller.may(SANDBOX):
            sandboxes = self.sandboxes.access.pool.views(tenant=seen_by(caller))
        may_play = caller.may(PLAY)
        return Overview(
            await self.ready(NoBody()),
            list(self._envs()) if may_play else None,
            [view for view in self.sessions.views() if caller.sees(view.id)] if may_play else None,
            sandboxes,
            caller.name,
        )

    def exposition(self) -> bytes:
        """Return the metrics in Prometheus text format."""
        return exposition(self.sessions, self._metrics)

    async def steps(self, data: bytes, metrics: StepMetrics) -> bytes:
        """Play a JSON list of steps. Sessions are played in parallel, the steps of one session in order.

        Returns:
            A JSON list with ``{"result": ...}`` or ``{"error": ...}`` for each step, in the same order.

        Raises:
            RequestError: `data` is not a JSON list.
            RateLimitError: The steps exceed the caller's rate limit, and none of them was played.
        """
        bodies = read_each(data, _STEPS, _STEP)
        metrics.steps += len(bodies)
        # Each step counts as one call. Subtract 1, because the request was already counted as one call.
        self._caller.take(max(0, len(bodies) - 1))
        outcomes: list[bytes] = [b""] * len(bodies)
        waiting: defaultdict[str, list[tuple[int, SessionStepBody]]] = defaultdict(list)
        now = self.sessions.now()
        for index, body in enumerate(bodies):
            if isinstance(body, RequestError):
                outcomes[index] = self.failure(body)
                continue
            id = body.session_id
            try:
                self._refuse_when_closing()
                key = self._caller.key(id)
                step = None if id in waiting else self.sessions.step_now(key, body.turn, body.action, now)
                if step is None:
                    waiting[id].append((index, body))
                else:
                    outcomes[index] = self.encode(Outcome(StepReply.of(body.turn + 1, step)), id)
            except Exception as error:
                outcomes[index] = self.failure(error, id)

        async def play(queue: list[tuple[int, SessionStepBody]]) -> None:
            for index, body in queue:
                outcomes[index] = await self._outcome(self.step(body.session_id, body), body.session_id)

        if waiting:
            async with anyio.create_task_group() as tasks:
                for queue in waiting.values():
                    tasks.start_soon(play, queue)
        return b"[%b]" % b",".join(outcomes)

    def answers_now(self, frames: Iterable[StepFrame], used: set[str]) -> tuple[list[bytes], list[StepFrame]]:
        """Answer the steps that can be answered without waiting. Add the sessions of all frames to `used`.

        Returns:
            The answers, and the frames that were not answered.
        """
        answers: list[bytes] = []
        others: list[StepFrame] = []
        sessions = self.sessions
        now = sessions.now()
        for frame in frames:
            body = frame.params
            id = body.session_id
            key = self._caller.key(id)
            used.add(key)
            try:
                if sessions.is_closing:
                    self._refuse_when_closing()
                step = sessions.step_now(key, body.turn, body.action, now)
                if step is None:
                    others.append(frame)
                else:
                    answers.append(self.encode(StepAnswer(frame.id, StepReply.of(body.turn + 1, step)), id))
            except Exception as error:
                answers.append(_addressed(frame.id, self.failure(error, id)))
        return answers, others

    def start_step(self, frame: StepFrame, send: Callable[[bytes], None]) -> bool:
        """Start a step that `answers_now` could not answer. `send` is called with the answer when it arrives.

        Returns:
            False if the step was not started, because it needs a task of its own; then call `answer` in a task.
        """
        body = frame.params

        def finish(move: Move) -> None:
            try:
                reply = StepReply.of(move.turn + 1, move.result())
                answer = self.encode(StepAnswer(frame.id, reply), body.session_id)
            except Exception as error:
                answer = _addressed(frame.id, self.failure(error, body.session_id))
            send(answer)

        return self.sessions.start_step(self._caller.key(body.session_id), body.turn, body.action, finish)

    async def answer(self, frame: Frame | StepFrame, used: set[str], metrics: StepMetrics) -> bytes:
        """Make the call of a frame, and return its result or error as the answer.

        If the call creates a session, add the session to `used` and count it in `metrics`.
        """
        if isinstance(frame, StepFrame):
            session_id = frame.params.session_id
            return _addressed(frame.id, await self._outcome(self.step(session_id, frame.params), session_id))
        try:
            decoder, method = self._METHODS[frame.method]
            body = read(frame.params, decoder)
        except KeyError:
            hint = did_you_mean(frame.method, [*self._METHODS, "step"])
            return self.refusal(frame.id, RequestError(f"unknown method {frame.method[:100]!r}{hint}"))
        except RequestError as error:
            return self.refusal(frame.id, error)
        id: str | None = getattr(body, "session_id", None)
        if isinstance(body, CreateSessionBody):
            key = self._caller.key(body.session_id)
            used.add(key)
            outcome = await self._outcome(method(self, body), id)
            if self.sessions.turn(key) is not None:  # The session was created.
                metrics.envs[body.env_id] += 1
            return _addressed(frame.id, outcome)
        return _addressed(frame.id, await self._outcome(method(self, body), id))

    async def answer_sandbox(self, frame: Frame, used: set[str]) -> bytes:
        """Answer a frame about a sandbox; add the sandbox to `used`."""
        if self.sandboxes is None:
            return _addressed(frame.id, self.failure(no_sandboxes()))
        return _addressed(frame.id, (await self.sandboxes.answer(frame, self._caller, used)).framed)

    def refusal(self, frame_id: int | str | None, error: EnvkitError) -> bytes:
        """Return the answer that rejects a frame; `frame_id` is None if the id of the frame could not be read."""
        return _addressed(frame_id, self.failure(error))

    async def _outcome(self, call: Awaitable[object], session_id: str | None = None) -> bytes:
        """Wait for a call; return its result or error as JSON."""
        try:
            return b'{"result":%b}' % self.encode(await call, session_id)
        except Exception as error:
            return self.failure(error, session_id)

    def failure(self, error: Exception, session_id: str | None = None) -> bytes:
        """Return the JSON outcome of a call that raised `error`."""
        return b'{"error":%b}' % write(self.problem(error, session_id))

    def problem(self, error: Exception, session_id: str | None = None) -> Problem:
        """Convert `error` to the problem that the caller receives, and count the error."""
        if not isinstance(error, EnvkitError):
            _log.error("unhandled exception in request", exc_info=error)
            error = EnvkitError("internal server error; see the server log")
        if isinstance(error, EnvError) and not self.sends_traces:
            error = error.for_callers()
        if session_id is not None and (key := self._caller.key(session_id)) != session_id:
            error = renamed(error, {key: session_id})
        self.sessions.counters.errors[error.code] += 1
        turn = None if session_id is None else self.sessions.turn(self._caller.key(session_id))
        problem = to_problem(error)
        fields = {name: _as_utf8(getattr(error, name)) for name in error.fields}
        detail = _as_utf8(problem["detail"])
        return msgspec.convert({**problem, "detail": detail, "fields": fields, "turn": turn}, Problem)

    def encode(self, reply: object, session_id: str | None = None) -> bytes:
        """Encode an answer.

        Raises:
            EnvError: The environment returned a value that JSON cannot encode.
        """
        try:
            return write(reply)
        except RequestError as error:
            env_id = "the environment"
            if session_id is not None:
                env_id = self.sessions.get(self._caller.key(session_id)).task.env_id
            raise EnvError(env_id, f"an answer that {error}") from None

    def _refuse_when_closing(self) -> None:
        if self.sessions.is_closing:
            raise UnreachableError("the server is shutting down")

    def _session_reply(self, view: SessionView) -> SessionReply:
        task, id = view.task, self._caller.name(view.id)
        return SessionReply(
            id, task.env_id, task.seed, dict(task.options), view.state.value, view.turn, round(view.idle_s, 3)
        )

    _METHODS: ClassVar[Mapping[str, tuple[msgspec.json.Decoder[Any], Callable[[Any, Any], Awaitable[object]]]]] = {
        "create": (msgspec.json.Decoder(CreateSessionBody), create),
        "delete": (msgspec.json.Decoder(SessionBody), delete),
        "session": (msgspec.json.Decoder(SessionBody), session),
        "sessions": (msgspec.json.Decoder(NoBody), list_sessions),
        "envs": (msgspec.json.Decoder(NoBody), list_envs),
        "health": (msgspec.json.Decoder(NoBody), health),
        "ready": (msgspec.json.Decoder(NoBody), ready),
    }


def no_sandboxes() -> SandboxNotFoundError:
    """Return the error for a sandbox request to a server that lends no sandboxes."""
    return SandboxNotFoundError("this server lends no sandboxes")


def _addressed(frame_id: int | str | None, outcome: bytes) -> bytes:
    return b'{"id":%b,%b' % (write(frame_id), outcome[1:])


def _as_utf8(value: object) -> object:
    """Escape bytes of a file name that are not UTF-8, because JSON cannot encode them."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
