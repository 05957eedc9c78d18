"""The pool's record of a sandbox: its state, its history, and the calls to cancel when it ends."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import ParamSpec, TypeVar

import anyio

from envkit import clock
from envkit.errors import SandboxEndedError, SandboxError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, Phase, SandboxSpec, SandboxState, SandboxView, TenantKey

from .node import Node, ResourceRequest

T = TypeVar("T")
P = ParamSpec("P")

STOPPED = Cause(CauseKind.STOPPED, "stopped")
GIVEN_UP = Cause(CauseKind.STOPPED, "its caller gave up during the start")

KEPT_PHASES = 100
"""Maximum number of phases in a history: the first and the last 99. A sandbox may become suspect very often."""

_REST = frozenset({SandboxState.LOST, SandboxState.STOPPED})


def phase(state: SandboxState, reason: Cause | str) -> Phase:
    """Return a phase that begins now, for a sandbox's history."""
    return Phase(state, clock.wall(), str(reason), reason if isinstance(reason, Cause) else None)


def is_over(state: SandboxState) -> bool:
    """Return whether `state` is final: lost or stopped."""
    return state in _REST


def was_leased(view: SandboxView) -> bool:
    """Return whether the sandbox was ever leased; if not, it is a warm sandbox."""
    return any(phase.state is SandboxState.LEASED for phase in view.phases)


class Instance:
    """A sandbox of a pool.

    Args:
        key: Tenant and id of the sandbox in the pool; the tenant is empty if the sandbox is not leased.
        spec: Spec of the sandbox.
        node: Node that runs the sandbox, where the pool reserves the sandbox's resources.
        notify: Called with this instance after each change of its state.

    Attributes:
        demand: Resources that the sandbox uses on its node.
        ttl_s: Seconds without use after which the lease expires; None means never.
        snapshot: Name, given by the node, of the snapshot that the sandbox starts from; None means no snapshot.
        is_leased: Whether the sandbox is leased; otherwise it is warm.
        is_own: Whether the pool's own process uses the sandbox. Such a sandbox counts towards no tenant's limits.
        sandbox: The backend's sandbox; None until it has started.
        phases: History of the sandbox's states.
        failure: Error for callers that wait for the start; None unless the start failed or was cancelled.
        has_failed: Whether the start failed; False if the start was cancelled.
        is_forgotten: Whether the pool forgets the sandbox after its removal, instead of keeping its view.
        cause: Why the sandbox ended; None before its end.
        settled: Set when the start has succeeded, failed or been cancelled.
        gone: Set when the sandbox has ended.
        cleared: Set when the sandbox has been fully removed.
        starting: Cancel scope of the start.
        answered_at: Event-loop time of the sandbox's last answer.
        used_at: Event-loop time of the sandbox's last use.
        latency_s: Duration of the last probe in seconds; None before the first probe.
        is_diagnosing: Whether the pool is finding out why the sandbox does not answer.
        on_end: Called with the cause when the sandbox ends.
        check: Check of the sandbox's user that is a part of each probe; see `envkit.protocols.ServerPool.watch`.
        silence: What the current probe waits for, as the begin of a cause.
    """

    def __init__(self, key: TenantKey, spec: SandboxSpec, node: Node, notify: Callable[[Instance], None]) -> None:
        self.key = key
        self.spec = spec
        self.node = node
        self.demand = ResourceRequest.of(spec)
        self.ttl_s: float | None = None
        self.snapshot: str | None = None
        self.is_leased = False
        self.is_own = True
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
        self.latency_s: float | None = None
        self.is_diagnosing = False
        self.on_end: Callable[[Cause], None] = lambda _: None
        self.check: Callable[[float], Awaitable[None]] | None = None
        self.silence = "no answer"
        self._notify = notify
        self._calls: set[anyio.CancelScope] = set()
        self._open_programs = 0

    @property
    def id(self) -> str:
        return self.key.id

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state

    @property
    def files(self) -> tuple[str, str] | None:
        """Node and name of the snapshot to restore; None means no snapshot."""
        return None if self.snapshot is None else (self.node.name, self.snapshot)

    @property
    def is_over(self) -> bool:
        return self.gone.is_set()

    @property
    def is_in_use(self) -> bool:
        """Whether a call to the sandbox is under way, or a program with streamed output runs in it."""
        return bool(self._calls) or self._open_programs > 0

    def view(self) -> SandboxView:
        """Return a view of the current state, with a lease that expires `ttl_s` after the last use."""
        expires = None
        if self.ttl_s is not None and not self.is_over:
            used_at = clock.now() if self.is_in_use else self.used_at
            expires = clock.wall() + used_at - clock.now() + self.ttl_s
        return self._view(expires)

    def record(self) -> SandboxView:
        """Return a view for the ledger. Its expiry time ignores uses: it is `ttl_s` after the last phase began."""
        if self.ttl_s is None or self.is_over:
            return self._view(None)
        return self._view(self.phases[-1].at_s + self.ttl_s)

    def enter(self, state: SandboxState, reason: Cause | str) -> None:
        """Change the state to `state`, and call `notify`."""
        kept = self.phases if len(self.phases) < KEPT_PHASES else (self.phases[0], *self.phases[2:])
        self.phases = (*kept, phase(state, reason))
        if state is not SandboxState.STARTING:
            self.settled.set()
        self._notify(self)

    def reattach(self, phases: tuple[Phase, ...], state: SandboxState, sandbox: Sandbox) -> None:
        """Record that the pool has taken over `sandbox`, which has the history `phases`, from a previous process."""
        self.sandbox = sandbox
        self.phases = (*phases, phase(state, "re-attached after a restart"))
        self.settled.set()
        self._notify(self)

    def up(self) -> None:
        """Record that the sandbox has started."""
        self.answered_at = self.used_at = clock.now()
        if self.is_leased:
            self.enter(SandboxState.LEASED, f"started on {self.node.name}")
        else:
            self.enter(SandboxState.READY, f"started on {self.node.name}")

    def answered(self) -> None:
        """Record that the sandbox has answered a call or a probe."""
        self.answered_at = clock.now()
        if self.state is SandboxState.SUSPECT:
            self.enter(SandboxState.LEASED if self.is_leased else SandboxState.READY, "answers again")

    def lose(self, cause: Cause) -> None:
        """Record that the sandbox ended unexpectedly, and cancel calls to it. Does nothing if it has already ended."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.fail(cause)
            else:
                self._finish(SandboxState.LOST, cause)

    def fail(self, cause: Cause, why: SandboxError | None = None) -> None:
        """Record a failed start. Waiting callers get a `SandboxStartError`, or its subclass to which `why` belongs."""
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
        """Record that the sandbox is stopped, and cancel calls to it. Does nothing if it has already ended."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.failure = SandboxStartError(self.id, cause)
            self._finish(SandboxState.STOPPED, cause)

    def lost(self) -> SandboxLostError:
        """Return the error for calls after the sandbox's end."""
        return SandboxLostError(self.id, self.ended_by())

    def ended_by(self) -> Cause:
        """Return why the sandbox ended. Must be called only after its end."""
        assert self.cause is not None
        return self.cause

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Call `function`; the call is cancelled when the sandbox ends.

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
                self.lose(error.cause)  # report the loss now; the monitor would notice it later
            finally:
                self._calls.discard(scope)
        raise self.lost()

    @contextmanager
    def in_use(self) -> Iterator[None]:
        """Count the ``with`` block as a use of the sandbox; it may begin and end in different tasks.

        Raises:
            SandboxLostError: The sandbox has ended, or the block raised this error.
        """
        if self.gone.is_set():
            raise self.lost()
        self._open_programs += 1
        try:
            yield
        except SandboxLostError as error:
            self.lose(error.cause)
            raise self.lost() from None
        finally:
            self._open_programs -= 1
            self.used_at = clock.now()

    def _view(self, expires_at_s: float | None) -> SandboxView:
        sandbox_id = "" if self.sandbox is None else self.sandbox.id
        return SandboxView(self.id, sandbox_id, self.node.name, self.key.tenant, self.spec, self.phases, expires_at_s)

    def _finish(self, state: SandboxState, cause: Cause) -> None:
        self.cause = cause
        self.gone.set()
        self.starting.cancel()
        for call in self._calls:
            call.cancel()
        self.on_end(cause)
        self.enter(state, cause)


def ended(view: SandboxView, cause: Cause, state: SandboxState = SandboxState.STOPPED) -> SandboxView:
    """Return the view of a sandbox that ends now: `view` without expiry time, and with `state` as its last phase."""
    phases = (*view.phases, phase(state, cause))
    return replace(view, phases=phases, expires_at_s=None)
