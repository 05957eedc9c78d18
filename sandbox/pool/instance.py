"""One sandbox of a pool, from its start to its end: its states, and the calls that end with it."""

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
GIVEN_UP = Cause(CauseKind.STOPPED, "given up while it was started")

KEPT_PHASES = 100
"""Of a sandbox that is silent now and then for days, the first phase and the last ones are kept."""

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
    """Return a history with `state` as its present.

    Raises:
        ValueError: That cannot follow on the state before; nothing comes back from being lost or stopped.
    """
    if phases and state not in _NEXT[phases[-1].state]:
        raise ValueError(f"a sandbox that is {phases[-1].state} cannot become {state}")
    kept = phases if len(phases) < KEPT_PHASES else [phases[0], *phases[2:]]
    return (*kept, phase(state, reason))


def phase(state: SandboxState, reason: Cause | str) -> Phase:
    """Return a phase that begins now."""
    return Phase(state, clock.wall(), str(reason), reason if isinstance(reason, Cause) else None)


def is_over(state: SandboxState) -> bool:
    """Say whether nothing follows on `state`."""
    return state in _REST


def time_to_live(view: SandboxView) -> float | None:
    """Return the time to live, in seconds, of a sandbox that was written down when its last phase began."""
    return None if view.expires_at_s is None else max(view.expires_at_s - view.phases[-1].at_s, 0.0)


class Instance:
    """Made by a pool.

    Args:
        id: The name by which it is asked for.
        spec: What it is to be.
        node: Where it is; what it takes there is taken by the pool.
        tell: Called at each change of its state.

    Attributes:
        demand: What it takes of its node.
        tenant: Who holds it; empty for nobody.
        ttl_s: Seconds without use after which its lease is over; None for never.
        snapshot: What its node calls the files that it begins with; None for those of its spec.
        is_lent: Whether somebody holds it, as opposed to a spare.
        is_named: Whether it can be asked for by `id`, and stays after the call that asked for it.
        payer: The tenant as whose it counts; None for whoever has the pool.
        sandbox: What was started; None until then.
        phases: Its history.
        failure: What is raised to who waited for it; None unless it did not become ready.
        has_failed: Whether that is because its start failed, and not because it was not wanted any more.
        is_forgotten: Whether nothing is to be seen of it afterwards.
        cause: Why it is over; None until then.
        settled: Set when it is ready, or over.
        gone: Set when it is over.
        cleared: Set when nothing is left of it.
        starting: Ends its start when cancelled.
        heard_at: When it last gave an answer, on the clock of the loop.
        interval_s: Seconds from an answer to the next probe.
        used_at: When it was last used.
        latency_s: How long its last probe took; None before the first.
        is_judged: Whether it is being found out why it is silent.
    """

    def __init__(self, id: str, spec: SandboxSpec, node: Node, tell: Callable[[Instance], None]) -> None:
        self.id = id
        self.spec = spec
        self.node = node
        self.demand = ResourceRequest.of(spec)
        self.tenant = ""
        self.ttl_s: float | None = None
        self.snapshot: str | None = None
        self.is_lent = False
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
        self.heard_at = self.used_at = clock.now()
        self.interval_s = 0.0
        self.latency_s: float | None = None
        self.is_judged = False
        self._tell = tell
        self._calls: set[anyio.CancelScope] = set()

    @property
    def state(self) -> SandboxState:
        return self.phases[-1].state

    @property
    def files(self) -> tuple[str, str] | None:
        """The snapshot that it begins with: the node that has it, and what it is called there."""
        return None if self.snapshot is None else (self.node.name, self.snapshot)

    @property
    def is_over(self) -> bool:
        return self.gone.is_set()

    @property
    def is_in_use(self) -> bool:
        """Whether a call is under way."""
        return bool(self._calls)

    def view(self) -> SandboxView:
        """Return how it is now; its lease ends a time to live after it was last used."""
        expires = None
        if self.ttl_s is not None and not self.is_over:
            used_at = clock.now() if self._calls else self.used_at
            expires = clock.wall() + used_at - clock.now() + self.ttl_s
        return self._view(expires)

    def record(self) -> SandboxView:
        """Return how it is, to be written down: its lease ends a time to live after its last phase began."""
        if self.ttl_s is None or self.is_over:
            return self._view(None)
        return self._view(self.phases[-1].at_s + self.ttl_s)

    def enter(self, state: SandboxState, reason: Cause | str) -> None:
        """Be in `state` from now on."""
        self.phases = entered(self.phases, state, reason)
        if state is not SandboxState.STARTING:
            self.settled.set()
        self._tell(self)

    def come_back(self, phases: tuple[Phase, ...], state: SandboxState, sandbox: Sandbox) -> None:
        """Be the `sandbox` that another process left, with the history that it had."""
        self.sandbox = sandbox
        self.phases = (*phases, phase(state, "taken back after a restart"))
        self.settled.set()
        self._tell(self)

    def up(self) -> None:
        """It has started, and answers."""
        self.heard_at = self.used_at = clock.now()
        if self.is_lent:
            self.enter(SandboxState.LEASED, f"started on {self.node.name}")
        else:
            self.enter(SandboxState.READY, f"started on {self.node.name}")

    def hear(self) -> None:
        """It gave an answer."""
        self.heard_at = clock.now()
        if self.state is SandboxState.SUSPECT:
            self.enter(SandboxState.LEASED if self.is_lent else SandboxState.READY, "it answers again")

    def lose(self, cause: Cause) -> None:
        """It is gone, without being told to; all its calls end at once. Only the first end counts."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.fail(cause)
            else:
                self._finish(SandboxState.LOST, cause)

    def fail(self, cause: Cause, why: SandboxStartError | None = None) -> None:
        """It does not become ready; `why` tells apart what lies in its spec."""
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
        """Have it stopped; all its calls end at once. Only the first end counts."""
        if not self.is_over:
            if self.state is SandboxState.STARTING:
                self.failure = SandboxStartError(self.id, cause)
            self._finish(SandboxState.STOPPED, cause)

    def lost(self) -> SandboxLostError:
        """Return what is raised to who uses it once it is over."""
        return SandboxLostError(self.id, self.ended_by())

    def ended_by(self) -> Cause:
        """Return why it is over, once it is."""
        assert self.cause is not None
        return self.cause

    async def call(self, function: Callable[P, Awaitable[T]], *args: P.args, **kwargs: P.kwargs) -> T:
        """Make a call that ends when it is over.

        Raises:
            SandboxLostError: It is over, or is while the call is under way.
        """
        if self.gone.is_set():
            raise self.lost()
        self.used_at = clock.now()
        with anyio.CancelScope() as scope:
            self._calls.add(scope)
            try:
                return await function(*args, **kwargs)
            except SandboxLostError as error:
                self.lose(error.cause)  # a moment before its watchers hear of it
            finally:
                self._calls.discard(scope)
        raise self.lost()

    @contextmanager
    def within(self) -> Iterator[None]:
        """Have the block end when it is over; raises as `call`."""
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
    """Return a view of a sandbox that is over, made of one from before."""
    phases = (*view.phases, phase(state, cause))
    return replace(view, phases=phases, expires_at_s=None)
