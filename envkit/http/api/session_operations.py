"""The operations on sessions, and the conversion of errors into problem objects."""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import anyio
import msgspec

from envkit import __version__
from envkit.errors import EnvError, EnvkitError, RequestError, UnreachableError, to_problem
from envkit.http.api.status_page import CHALLENGE, HEADERS, LINKS, Overview, page
from envkit.http.auth.caller import EVERYBODY, NOBODY, PLAY, SANDBOX, Caller
from envkit.http.protocol import operations as table
from envkit.http.protocol.asgi import CallOutcome, HttpCall, handles, handles_http, respond
from envkit.http.protocol.messages import (
    MAX_REQUEST_BYTES,
    PROTOCOL,
    CreateSessionBody,
    DoneReply,
    EnvReply,
    EnvsReply,
    GradeReply,
    HealthReply,
    IndexReply,
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
    StepFrame,
    StepReply,
    read_each,
    write,
)
from envkit.http.sessions.metrics import Collect, exposition
from envkit.http.sessions.session import Move, Session
from envkit.http.sessions.table import SessionTable
from envkit.protocols import SandboxPool
from envkit.registry import EnvSpec
from envkit.types import Task, TenantKey

_log = logging.getLogger(__name__)

_STEP = msgspec.json.Decoder(SessionStepBody)
_STEPS = msgspec.json.Decoder(list[SessionStepBody])


@dataclass(eq=False)
class SessionOperations:
    """The operations on sessions in version 1 of the protocol.

    The arguments are those of `envkit.http.api.app.create_app`, and all sessions of the server.
    """

    sessions: SessionTable
    envs: Callable[[], Iterable[EnvSpec]]
    collect: Collect | None = None
    check_task: Callable[[Task], None] | None = None
    max_request_bytes: int = MAX_REQUEST_BYTES
    sends_traces: bool = False
    pool: SandboxPool | None = None

    @handles(table.CREATE)
    async def create(self, body: CreateSessionBody, caller: Caller) -> ResetReply:
        """Create a session for a task and return the first observation. The call is safe to repeat.

        Status 202 means that the environment's reset is still running. Repeat the call until it returns the
        observation.
        """
        self._refuse_when_closing()
        task = body.task()
        if self.check_task is not None:
            self.check_task(task)
        turn, start = await self.sessions.create(caller.key(body.session_id), task)
        return ResetReply.of(turn, start)

    @handles(table.STEP)
    async def step(self, body: SessionStepBody, caller: Caller) -> StepReply:
        """Play one step. The call is safe to repeat with the same `turn` and `action`."""
        self._refuse_when_closing()
        step = await self.sessions.step(caller.key(body.session_id), body.turn, body.action)
        return StepReply.of(body.turn + 1, step)

    @handles(table.GRADE)
    async def grade(self, body: SessionBody, caller: Caller) -> GradeReply:
        """Grade the episode of a session, and end the episode if it still runs. The call is safe to repeat.

        Only for a session whose first observation has `is_graded`. Status 202 means that the grader is still running.
        Repeat the call until it returns the grade.
        """
        self._refuse_when_closing()
        return GradeReply(await self.sessions.grade(caller.key(body.session_id)))

    @handles(table.DELETE)
    async def delete(self, body: SessionBody, caller: Caller) -> DoneReply:
        """Delete a session. The call is safe to repeat, and succeeds if the session does not exist."""
        await self.sessions.delete(caller.key(body.session_id))
        return DoneReply()

    @handles(table.SESSION)
    async def session(self, body: SessionBody, caller: Caller) -> SessionReply:
        """Return the status of a session. The call does not delay the session's expiry."""
        return _session_reply(self.sessions.get(caller.key(body.session_id)), caller)

    @handles(table.SESSIONS)
    async def list_sessions(self, body: NoBody, caller: Caller) -> SessionsReply:
        """List the sessions that the caller may see, oldest first."""
        return SessionsReply([_session_reply(one, caller) for one in self._visible(caller)])

    @handles(table.ENVS)
    async def list_envs(self, body: NoBody, caller: Caller) -> EnvsReply:
        """List the available environments."""
        return EnvsReply([EnvReply(spec.id, spec.summary, dict(spec.options), spec.replayable) for spec in self.envs()])

    @handles(table.HEALTH)
    async def health(self, body: NoBody, caller: Caller) -> HealthReply:
        """Report that the server is alive."""
        return HealthReply(__version__)

    @handles(table.READY)
    async def ready(self, body: NoBody, caller: Caller) -> ReadyReply:
        """Report whether a session can be created now; the status is 503 if not."""
        host, leased, why = self.sessions.host, self.sessions.leased, ""
        used, limit = self.sessions.slots_of(caller.tenant)
        capacity = host.capacity
        if self.sessions.is_closing or self.sessions.is_draining:
            why = "the server is shutting down"
        elif host.why_unready:
            why = host.why_unready
        elif leased >= capacity:
            why = f"all {capacity} episode slots are in use"
        elif used >= limit:
            why = f"this tenant uses {used} of {capacity} episode slots (its limit)"
        return ReadyReply(not why, capacity, leased, why, None if limit == capacity else limit)

    @handles_http(table.METRICS_TEXT)
    async def metrics(self, body: NoBody, call: HttpCall) -> None:
        """Return metrics in Prometheus text format."""
        text = exposition(self.sessions, self.collect)
        await respond(call.send, text, content_type=b"text/plain; version=0.0.4; charset=utf-8")

    @handles(table.INDEX)
    async def index(self, body: NoBody, caller: Caller) -> IndexReply:
        """List the entry points of the API."""
        return IndexReply(__version__, PROTOCOL, LINKS)

    @handles_http(table.PAGE)
    async def page(self, body: NoBody, call: HttpCall) -> None:
        """Return the status page."""
        kind = b"text/html; charset=utf-8"
        if call.caller is NOBODY:
            await respond(call.send, page(None), status=401, content_type=kind, headers=[*HEADERS, CHALLENGE])
        else:
            overview = await self._overview(call.caller)
            await respond(call.send, page(overview), content_type=kind, headers=HEADERS)

    async def _overview(self, caller: Caller) -> Overview:
        """Return what the status page shows to the caller."""
        sandboxes = None
        if self.pool is not None and caller.may(SANDBOX):
            sandboxes = self.pool.views(tenant=caller.visible_tenant)
        may_play = caller.may(PLAY)
        return Overview(
            await self.ready(NoBody(), caller),
            list(self.envs()) if may_play else None,
            self._visible(caller) if may_play else None,
            sandboxes,
            caller.name,
        )

    @handles_http(table.STEPS)
    async def steps(self, body: NoBody, call: HttpCall) -> CallOutcome:
        """Play a list of steps of any sessions. Return a list with the result or error of each, in the same order."""
        # Steps of different sessions run concurrently; the steps of one session run one after the other.
        caller = call.caller
        bodies = read_each(await call.body(self.max_request_bytes), _STEPS, _STEP)
        outcomes: list[bytes] = [b""] * len(bodies)
        waiting: defaultdict[str, list[tuple[int, SessionStepBody]]] = defaultdict(list)
        now = self.sessions.now()
        for index, step in enumerate(bodies):
            if isinstance(step, RequestError):
                outcomes[index] = self.failure(step).framed
                continue
            id = step.session_id
            try:
                self._refuse_when_closing()
                answer = None if id in waiting else self.sessions.step_now(caller.key(id), step.turn, step.action, now)
                if answer is None:
                    waiting[id].append((index, step))
                else:
                    outcomes[index] = write(Outcome(StepReply.of(step.turn + 1, answer)))
            except Exception as error:
                outcomes[index] = self.failure(error, caller, id).framed

        async def play(queue: list[tuple[int, SessionStepBody]]) -> None:
            for index, step in queue:
                try:
                    reply = Outcome(await self.step(step, caller))
                    outcomes[index] = write(reply)
                except Exception as error:
                    outcomes[index] = self.failure(error, caller, step.session_id).framed

        if waiting:
            async with anyio.create_task_group() as tasks:
                for queue in waiting.values():
                    tasks.start_soon(play, queue)
        return CallOutcome(b"[%b]" % b",".join(outcomes))

    def answers_now(
        self, frames: Iterable[StepFrame], caller: Caller, used: set[TenantKey]
    ) -> tuple[list[bytes], list[StepFrame]]:
        """Play the steps that need no waiting; return their encoded answers, and the frames of the other steps.

        Adds the session keys of all frames to `used`.
        """
        answers: list[bytes] = []
        others: list[StepFrame] = []
        sessions = self.sessions
        now = sessions.now()
        for frame in frames:
            body = frame.params
            id = body.session_id
            key = caller.key(id)
            used.add(key)
            try:
                if sessions.is_closing:
                    self._refuse_when_closing()
                step = sessions.step_now(key, body.turn, body.action, now)
                if step is None:
                    others.append(frame)
                else:
                    answers.append(write(StepAnswer(frame.id, StepReply.of(body.turn + 1, step))))
            except Exception as error:
                answers.append(self.failure(error, caller, id).answer(frame.id))
        return answers, others

    def start_step(self, frame: StepFrame, caller: Caller, send: Callable[[bytes], None]) -> bool:
        """Start a step that `answers_now` could not play. When the step ends, call `send` with the encoded answer.

        Return False if it was not started; the caller must then await `step` in a separate task.
        """
        body = frame.params

        def finish(move: Move) -> None:
            try:
                reply = StepReply.of(move.turn + 1, move.result())
                answer = write(StepAnswer(frame.id, reply))
            except Exception as error:
                answer = self.failure(error, caller, body.session_id).answer(frame.id)
            send(answer)

        return self.sessions.start_step(caller.key(body.session_id), body.turn, body.action, finish)

    def failure(self, error: Exception, caller: Caller = EVERYBODY, session_id: str | None = None) -> CallOutcome:
        """Convert the error of a call to the problem that the caller receives, and count the error.

        `session_id` is the session that the call is about, as the caller wrote it; None without one.
        """
        if not isinstance(error, EnvkitError):
            _log.error("unhandled exception in request", exc_info=error)
            error = EnvkitError("internal server error; see the server log")
        if isinstance(error, EnvError) and not self.sends_traces:
            error = error.for_callers()
        turn = None if session_id is None else self.sessions.turn(caller.key(session_id))
        self.sessions.counters.errors[error.code] += 1
        fields = {name: _as_utf8(getattr(error, name)) for name in error.fields}
        problem = {**to_problem(error), "detail": _as_utf8(str(error)), "fields": fields, "turn": turn}
        return CallOutcome.failed(msgspec.convert(problem, Problem))

    def _refuse_when_closing(self) -> None:
        if self.sessions.is_closing:
            raise UnreachableError("the server is shutting down; retry later")

    def _visible(self, caller: Caller) -> list[Session]:
        return [one for one in self.sessions.all() if caller.visible_tenant in (None, one.key.tenant)]


def _session_reply(session: Session, caller: Caller) -> SessionReply:
    task, id = session.task, caller.name(session.key)
    options, idle_s = dict(task.options), round(session.idle_s, 3)
    return SessionReply(id, task.env_id, task.seed, options, session.state.value, session.turn, idle_s)


def _as_utf8(value: object) -> object:
    """Return `value`; if it is a string, escape its surrogates (file name bytes that are not UTF-8) for JSON."""
    return value.encode(errors="backslashreplace").decode() if isinstance(value, str) else value
