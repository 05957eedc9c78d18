"""A sandbox of a pool: its states, and the calls that end with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import anyio

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, Phase, SandboxSpec, SandboxState, SandboxView

from .node import Node, ResourceRequest

T = TypeVar("T")
P = ParamSpec("P")

STOPPED = Cause(CauseKind.STOPPED, "stopped")
GIVEN_UP = Cause(CauseKind.STOPPED, "its caller gave up during the start")

KEPT_PHASES = 100
"""Number of phases kept: the first and the last ones, as a sandbox may be suspect many times."""

_REST = frozenset({SandboxState.LOST, SandboxState.STOPPED})
_NEXT: Mapping[SandboxState, frozenset[SandboxState]] = {
    SandboxState.STARTING: frozenset({SandboxState.READY, SandboxState.LEASED, SandboxState.STOPPED}),
    SandboxState.READY: frozenset({SandboxState.LEASED, SandboxState.SUSPECT}) | _REST,
    SandboxState.LEASED: frozenset({SandboxState.SUSPECT}) | _REST,
    SandboxState.SUSPECT: frozenset({SandboxState.READY, SandboxState.LEASED}) | _REST,
    SandboxState.LOST: frozenset(),
    SandboxState.STOPPED: frozenset(),
}


def entered(phases: Sequence[Phase], state: SandboxState, reason: Cause | str) -> tuple[Phase, ...]:
    """Return the history extended by `state`.

    Raises:
        ValueError: The transition is invalid; lost and stopped are final.
    """
    if phases and state not in _NEXT[phases[-1].state]:
        raise ValueError(f"invalid transition from {phases[-1].state} to {state}")
    kept = phases if len(phases) < KEPT_PHASES else [phases[0], *phases[2:]]
    return (*kept, phase(state, reason))


def phase(state: SandboxState, reason: Cause | str) -> Phase:
    """Return a phase that starts now."""
    return Phase(state, clock.wall(), str(reason), reason if isinstance(reason, Cause) else None)


def is_over(state: SandboxState) -> bool:
    """Return whether `state` is final."""
    return state in _REST


def time_to_live(view: SandboxView) -> float | None:
    """Return the time to live in seconds of a persisted sandbox; its record was made when its last phase began."""
    return None if view.expires_at_s is None else max(view.expires_at_s - view.phases[-1].at_s, 0.0)


class Instance:
    """A sandbox as its pool manages it.

    Args:
        id: Its id in the pool.
        spec: Its spec.
        node: Its node; the pool reserves the resources there.
        notify: Called at each change of state.

    Attributes:
        demand: Resources that it uses on its node.
        tenant: The tenant that holds it; empty if not leased.
        ttl_s: Seconds without use after which its lease expires; None for never.
        snapshot: Name on its node of the snapshot that it restores; None for the files of its spec.
        is_leased: Whether it is leased, as opposed to warm.
        is_named: Whether callers find it by `id`, so that it outlives the call that created it.
        payer: The tenant that it counts for; None for the pool's owner.
        sandbox: The backend's sandbox; None until it has started.
        phases: Its history.
        failure: Raised to waiting callers if it did not become ready; else None.
        has_failed: Whether its start failed, as opposed to being cancelled.
        is_forgotten: Whether its view is dropped at its end.
        cause: Why it ended; None until then.
        settled: Set when it is ready or has ended.
        gone: Set when it has ended.
        cleared: Set when it is fully removed.
        starting: Cancels its start.
        answered_at: Loop time of its last answer.
        interval_s: Seconds from an answer to the next probe.
        used_at: Loop time of its last use.
        latency_s: Duration of its last probe in seconds; None before the first.
        is_diagnosing: Whether a diagnosis of its liveness is under way.
    """

    def __init__(self, id: str, spec: SandboxSpec, node: Node, notify: Callable[[Instance], None]) -> None:
        self.id = id
        self.spec = spec
        self.node = node
        self.demand = ResourceRequest.of(spec)
        self.tenant = ""
        self.ttl_s: float | None = None
        self.snapshot: str | None = None
        self.is_leased = False
        self.is_named = False
        self.payer: str | None = None
        self.sandbox: Sandbox | None = None
        self.phases: tuple[Phase, ...] = ()
        self.failure: SandboxError | None = None
        self.has_failed = False
        self.is_forgotten = False
        self.cause: Cause | None = None
        self.settled = anyio.Event()
        self.gone = anyio.Event()
        self.cleared = anyio.Event()
        self.starting = anyio.CancelScope()
        self.answered_at = self.used_at = clock.now()
        self.interval_s = 0.0
        self.latency_s: float | None = None
        self.is_diagnosing = False
        self._notify = notify
        self._calls: set[anyio.CancelScope] = set()

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state

    @property
    def files(self) -> tuple[str, str] | None:
        """The snapshot that it restores, as node and name on that node."""
        return None if self.snapshot is None else (self.node.name, self.snapshot)

    @property
    def is_over(self) -> bool:
        return self.gone.is_set()

    @property
    def is_in_use(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    def view(self) -> SandboxView:
        """Return its current state; its lease expires `ttl_s` after its last use."""
        expires = None
        if self.ttl_s is not None and not self.is_over:
            used_at = clock.now() if self._calls else self.used_at
            expires = clock.wall() + used_at - clock.now() + self.ttl_s
        return self._view(expires)

    def record(self) -> SandboxView:
        """Return its state for the ledger; its lease expires `ttl_s` after its last phase began."""
        if self.ttl_s is None or self.is_over:
            return self._view(None)
        return self._view(self.phases[-1].at_s + self.ttl_s)

    def enter(self, state: SandboxState, reason: Cause | str) -> None:
        """Change to `state`."""
        self.phases = entered(self.phases, state, reason)
        if state is not SandboxState.STARTING:
            self.settled.set()
        self._notify(self)

    def reattach(self, phases: tuple[Phase, ...], state: SandboxState, sandbox: Sandbox) -> None:
        """Adopt the `sandbox` of a previous process, with its history."""
        self.sandbox = sandbox
        self.phases = (*phases, phase(state, "re-attached after a restart"))
        self.settled.set()
        self._notify(self)

    def up(self) -> None:
        """Record that it has started and answers."""
        self.answered_at = self.used_at = clock.now()
        if self.is_leased:
            self.enter(SandboxState.LEASED, f"started on {self.node.name}")
        else:
            self.enter(SandboxState.READY, f"started on {self.node.name}")

    def answered(self) -> None:
        """Record an answer."""
        self.answered_at = clock.now()
        if self.state is SandboxState.SUSPECT:
            self.enter(SandboxState.LEASED if self.is_leased else SandboxState.READY, "answers again")

    def lose(self, cause: Cause) -> None:
        """Record that it ended unexpectedly, and cancel its calls. Only the first end counts."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.fail(cause)
            else:
                self._finish(SandboxState.LOST, cause)

    def fail(self, cause: Cause, why: SandboxStartError | None = None) -> None:
        """Record that its start failed; `why` distinguishes failures caused by its spec."""
        if not self.is_over:
            if isinstance(why, SandboxRefusedError):
                self.failure = SandboxRefusedError(self.id, cause, why.everywhere)
            elif isinstance(why, SandboxEndedError):
                self.failure = SandboxEndedError(self.id, cause)
            else:
                self.failure = SandboxStartError(self.id, cause)
            self.has_failed = True
            self._finish(SandboxState.STOPPED, cause)

    def end(self, cause: Cause) -> None:
        """Stop it and cancel its calls. Only the first end counts."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.failure = SandboxStartError(self.id, cause)
            self._finish(SandboxState.STOPPED, cause)

    def lost(self) -> SandboxLostError:
        """Return the error for calls after its end."""
        return SandboxLostError(self.id, self.ended_by())

    def ended_by(self) -> Cause:
        """Return why it ended; only valid after its end."""
        assert self.cause is not None
        return self.cause

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call that is cancelled when the sandbox ends.

        Raises:
            SandboxLostError: The sandbox has ended, or ends during the call.
        """
        if self.gone.is_set():
            raise self.lost()
        self.used_at = clock.now()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await function(*args, **kwargs)
            except SandboxLostError as error:
                self.lose(error.cause)  # a moment before its monitor notices
            finally:
                self._calls.discard(scope)
        raise self.lost()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Cancel the block when the sandbox ends; raises as `call`."""
        if self.gone.is_set():
            raise self.lost()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                yield
                return
            except SandboxLostError as error:
                self.lose(error.cause)
            finally:
                self._calls.discard(scope)
                self.used_at = clock.now()
        raise self.lost()

    def _view(self, expires_at_s: float | None) -> SandboxView:
        sandbox_id = "" if self.sandbox is None else self.sandbox.id
        return SandboxView(self.id, sandbox_id, self.node.name, self.tenant, self.spec, self.phases, expires_at_s)

    def _finish(self, state: SandboxState, cause: Cause) -> None:
        self.cause = cause
        self.gone.set()
        self.starting.cancel()
        for call in self._calls:
            call.cancel()
        self.enter(state, cause)


def ended(view: SandboxView, cause: Cause, state: SandboxState = SandboxState.STOPPED) -> SandboxView:
    """Return `view` extended by its end."""
    phases = (*view.phases, phase(state, cause))
    return replace(view, phases=phases, expires_at_s=None)
