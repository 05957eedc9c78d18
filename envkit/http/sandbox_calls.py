"""What can be asked of a server about sandboxes: the calls by name, whatever they came over.

What a call asks for has a bound in seconds, so that none hangs, whatever its sandbox does.
"""

from __future__ import annotations

import hashlib
from collections.abc import Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from functools import partial
from typing import Any, Protocol, TypeAlias, TypeVar, runtime_checkable

import anyio
import msgspec
from anyio.abc import TaskGroup

from envkit.errors import (
    DeadlineError,
    EnvkitError,
    OptionError,
    RequestError,
    SandboxNotFoundError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    did_you_mean,
)
from envkit.http import sandbox_wire as wire
from envkit.http.asgi import retry_after_s
from envkit.http.bodies import Room
from envkit.http.callers import Caller, renamed
from envkit.http.permits import Permits
from envkit.http.repeats import Outcome, Repeats
from envkit.http.said import heard_arguments
from envkit.http.sandbox_starts import Order, Starts
from envkit.http.snapshots import SnapshotBounds, Snapshots
from envkit.http.wire import DoneReply, Frame, NoBody, Problem, read, write
from envkit.protocols import Sandbox, SandboxPool
from envkit.types import JSON, SandboxView, why_no_network

MAX_TIMEOUT_S = 3600.0
"""The longest that a command may ask for, unless the caller of `SandboxCalls` says otherwise."""

PREFIX = "sandbox."
"""What the methods of frames begin with."""

_SLACK_S = 30.0
"""Seconds beyond its own time in which a sandbox has to answer."""

_MAX_SPEC_BYTES = 128 << 10
"""What a sandbox was to be is remembered for a while after its end."""

_LITTLE_FILE_BYTES = 1 << 20
"""A file is not expected to be larger; one that is, is asked for again."""

_FILE_S = 120.0
_STOP_S = 60.0
_WAIT_S = 25.0

Keyed: TypeAlias = wire.ExecFrame | wire.ShellFrame | wire.WriteFrame | wire.SnapshotFrame
Call: TypeAlias = Callable[[Any, Caller, Room], Awaitable[Outcome]]
T = TypeVar("T")


@runtime_checkable
class Logging(Protocol):
    """A sandbox that keeps what its command writes to standard error."""

    async def log(self) -> str: ...


@runtime_checkable
class Measured(Protocol):
    """A sandbox that knows what it uses of the machine."""

    async def stats(self) -> Mapping[str, JSON]: ...


def seen_by(caller: Caller) -> str | None:
    """Return the tenant whose sandboxes `caller` sees; None for an administrator, who sees those of all."""
    return None if caller.is_admin else caller.tenant


class SandboxCalls:
    """The calls about sandboxes of protocol version 1.

    Args:
        pool: Lends them.
        problem: Returns what a caller is told about an error.
        max_timeout_s: The longest that a command may ask for, seconds.
        ttl_s: Seconds without use after which a sandbox is stopped, where its caller does not ask for less.
        permits: What callers may have their sandboxes be.
        snapshots: How many snapshots there may be.

    Attributes:
        repeats: What was called with a key.
        closing: Set when the server shuts down: what runs is finished, nothing new is begun.
    """

    def __init__(
        self,
        pool: SandboxPool,
        problem: Callable[[Exception], Problem],
        *,
        max_timeout_s: float = MAX_TIMEOUT_S,
        ttl_s: float | None = None,
        permits: Permits | None = None,
        snapshots: SnapshotBounds | None = None,
    ) -> None:
        self.pool = pool
        self.max_timeout_s = max_timeout_s
        self.repeats = Repeats(self.failure)
        self.closing = anyio.Event()
        self._problem = problem
        self._permits = permits or Permits()
        self._starts = Starts(pool, self.repeats.drop, ttl_s=ttl_s)
        self._snapshots = Snapshots(pool, snapshots or SnapshotBounds())
        self._methods: Mapping[str, tuple[msgspec.json.Decoder[Any], Call]] = {
            "create": (msgspec.json.Decoder(wire.CreateFrame), self._plain(self.create)),
            "view": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.view)),
            "list": (msgspec.json.Decoder(NoBody), self._plain(self.views)),
            "exec": (msgspec.json.Decoder(wire.ExecFrame), self.exec),
            "shell": (msgspec.json.Decoder(wire.ShellFrame), self.shell),
            "close_shell": (msgspec.json.Decoder(wire.CloseShellFrame), self._plain(self.close_shell)),
            "read": (msgspec.json.Decoder(wire.ReadFrame), self.read),
            "write": (msgspec.json.Decoder(wire.WriteFrame), self.write),
            "snapshot": (msgspec.json.Decoder(wire.SnapshotFrame), self.snapshot),
            "snapshots": (msgspec.json.Decoder(NoBody), self._plain(self.snapshots)),
            "remove_snapshot": (msgspec.json.Decoder(wire.KeptFrame), self._plain(self.remove_snapshot)),
            "probe": (msgspec.json.Decoder(wire.ProbeFrame), self._plain(self.probe)),
            "wait": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.wait)),
            "log": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.log)),
            "stats": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.stats)),
            "stop": (msgspec.json.Decoder(wire.SandboxFrame), self._plain(self.stop)),
            "cancel": (msgspec.json.Decoder(wire.CancelFrame), self._plain(self.cancel)),
        }

    def live(self, tasks: TaskGroup) -> None:
        """Have what outlives its caller done in `tasks`."""
        self.repeats.tasks = self._starts.tasks = tasks

    async def answer(self, frame: Frame, caller: Caller, used: set[str], room: Room) -> Outcome:
        """Answer a frame; an error is an answer too.

        Args:
            frame: What is asked for.
            caller: Who asks.
            used: The sandbox that is used, if one is, is added to it.
            room: Where the answer is counted, beside what a frame's parameters take.
        """
        name = frame.method.removeprefix(PREFIX)
        try:
            if name not in self._methods:
                hint = did_you_mean(frame.method, [f"{PREFIX}{one}" for one in self._methods])
                raise RequestError(f"there is no method {frame.method[:100]!r}{hint}")
            decoder, call = self._methods[name]
            body = read(frame.params, decoder)
        except EnvkitError as error:
            return self.failure(error)
        if name == "stop":
            used.discard(body.sandbox_id)
        elif name not in ("list", "view", "snapshots", "remove_snapshot"):
            used.add(body.sandbox_id)
        return await self.attempt(partial(call, body, caller, room))

    def keep(self, used: set[str], caller: Caller) -> None:
        """Renew the leases of the sandboxes named in `used`; the names of those that are over are taken out."""
        for id in list(used):
            if caller.key(id) not in self._starts:
                try:
                    self.pool.get(caller.key(id), tenant=seen_by(caller))
                except EnvkitError:
                    used.discard(id)

    async def create(self, body: wire.CreateFrame, caller: Caller) -> wire.SandboxReply:
        """Lend a sandbox; a caller that goes away meanwhile leaves that alone."""
        self.refuse_when_closing()
        snapshot = None if body.snapshot is None else self._snapshots.known(body.snapshot, seen_by(caller))
        if len(write(body)) > _MAX_SPEC_BYTES:
            raise TooLargeError(
                f"what a sandbox is to be may have {_MAX_SPEC_BYTES} bytes; write files into it instead"
            )
        spec = body.spec()
        if (why := why_no_network(spec.network)) is not None:
            raise OptionError("network", why)
        self._permits.require(spec, caller)
        order = Order(caller.key(body.sandbox_id), spec, caller.tenant, body.lease_s, snapshot, body.wait_s)
        with self.naming(body.sandbox_id, caller):
            if body.wait_s:
                await self._unless_closing(partial(self._starts.run, order))
            else:
                await self._starts.run(order)
        return self._seen(self._view(body.sandbox_id, caller), caller)

    async def view(self, body: wire.SandboxFrame, caller: Caller) -> wire.SandboxReply:
        return self._seen(self._view(body.sandbox_id, caller), caller)

    async def views(self, body: NoBody, caller: Caller) -> wire.SandboxesReply:
        return wire.SandboxesReply([self._seen(view, caller) for view in self.pool.views(tenant=seen_by(caller))])

    async def exec(self, body: wire.ExecFrame, caller: Caller, room: Room) -> Outcome:
        sandbox = self.find(body.sandbox_id, caller)
        self._check_timeout(body.timeout_s)

        async def run() -> wire.ExecReply:
            try:
                result = await sandbox.exec(
                    heard_arguments(body.argv),
                    timeout_s=body.timeout_s,
                    env=body.env,
                    cwd=body.cwd,
                    stdin=body.stdin,
                    user=body.user,
                    max_output_bytes=body.max_output_bytes,
                )
            except ValueError as error:
                raise _refused("program", error) from None
            return wire.ExecReply.of(result)

        await room.expect(most_said(body))
        return await self._once(body, caller, run, body.timeout_s + _SLACK_S, room)

    async def shell(self, body: wire.ShellFrame, caller: Caller, room: Room) -> Outcome:
        shell = self.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        self._check_timeout(body.timeout_s)

        async def run() -> wire.ExecReply:
            try:
                result = await shell.run(body.command, timeout_s=body.timeout_s, max_output_bytes=body.max_output_bytes)
            except ValueError as error:
                raise _refused("command", error) from None
            return wire.ExecReply.of(result)

        await room.expect(most_said(body))
        # Others may be before us, each with a time of its own.
        return await self._once(body, caller, run, self.max_timeout_s + _SLACK_S, room)

    async def close_shell(self, body: wire.CloseShellFrame, caller: Caller) -> DoneReply:
        shell = self.find(body.sandbox_id, caller).shell(body.shell, user=body.user)
        with self.naming(body.sandbox_id, caller):
            await _within(_SLACK_S, shell.close)
        return DoneReply()

    async def read(self, body: wire.ReadFrame, caller: Caller, room: Room) -> Outcome:
        async def work() -> wire.FileReply:
            return wire.FileReply(await self.read_file(body, caller, room))

        return await self.outcome(work)

    async def read_file(self, body: wire.ReadFrame, caller: Caller, room: Room) -> bytes:
        """Return the content of a file, which a frame could not hold if it is large."""
        sandbox, path = self.find(body.sandbox_id, caller), _path(body.path)
        little = min(body.max_bytes, _LITTLE_FILE_BYTES)
        await room.expect(little)
        with self.naming(body.sandbox_id, caller):
            try:
                return await _within(_FILE_S, partial(sandbox.read, path, max_bytes=little, user=body.user))
            except TooLargeError:
                if little == body.max_bytes:
                    raise
            room.settle(0)
            await room.expect(body.max_bytes)
            return await _within(_FILE_S, partial(sandbox.read, path, max_bytes=body.max_bytes, user=body.user))

    async def write(self, body: wire.WriteFrame, caller: Caller, room: Room) -> Outcome:
        sandbox = self.find(body.sandbox_id, caller)
        path = _path(body.path)

        async def run() -> DoneReply:
            await sandbox.write(path, body.content, mode=body.mode, user=body.user)
            return DoneReply()

        return await self._once(body, caller, run, _FILE_S, room)

    async def snapshot(self, body: wire.SnapshotFrame, caller: Caller, room: Room) -> Outcome:
        sandbox = self.find(body.sandbox_id, caller)

        async def run() -> wire.SnapshotReply:
            view = self._view(body.sandbox_id, caller)
            return wire.SnapshotReply(await self._snapshots.keep(view.tenant, view.id, sandbox.snapshot))

        return await self._once(body, caller, run, self.max_timeout_s, room)

    async def snapshots(self, body: NoBody, caller: Caller) -> wire.SnapshotsReply:
        """List the snapshots that the caller sees, oldest first."""
        found = self._snapshots.all(seen_by(caller))
        return wire.SnapshotsReply(
            [wire.KeptReply(one.name, one.tenant, caller.name(one.sandbox_id), one.at_s, one.bytes) for one in found]
        )

    async def remove_snapshot(self, body: wire.KeptFrame, caller: Caller) -> DoneReply:
        """Remove a snapshot; goes on when the caller goes away."""
        with anyio.CancelScope(shield=True):
            await _within(_STOP_S, partial(self._snapshots.remove, body.snapshot, seen_by(caller)))
        return DoneReply()

    async def probe(self, body: wire.ProbeFrame, caller: Caller) -> wire.ProbeReply:
        sandbox = self.find(body.sandbox_id, caller)
        self._check_timeout(body.timeout_s)
        with self.naming(body.sandbox_id, caller):
            return wire.ProbeReply(await sandbox.probe(body.timeout_s))

    async def wait(self, body: wire.SandboxFrame, caller: Caller) -> wire.WaitReply:
        sandbox = self.find(body.sandbox_id, caller)
        cause = None
        with anyio.move_on_after(_WAIT_S):
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self.cancel_when_closing, tasks.cancel_scope)
                cause = await sandbox.wait()
                tasks.cancel_scope.cancel()
        return wire.WaitReply(cause)

    async def log(self, body: wire.SandboxFrame, caller: Caller) -> wire.LogReply:
        sandbox = self.find(body.sandbox_id, caller)
        if not isinstance(sandbox, Logging):
            raise UnsupportedError(f"sandbox {body.sandbox_id} keeps no log")
        with self.naming(body.sandbox_id, caller):
            return wire.LogReply(await _within(_SLACK_S, sandbox.log))

    async def stats(self, body: wire.SandboxFrame, caller: Caller) -> wire.StatsReply:
        sandbox = self.find(body.sandbox_id, caller)
        if not isinstance(sandbox, Measured):
            raise UnsupportedError(f"sandbox {body.sandbox_id} does not say what it uses")
        with self.naming(body.sandbox_id, caller):
            return wire.StatsReply(dict(await _within(_SLACK_S, sandbox.stats)))

    async def stop(self, body: wire.SandboxFrame, caller: Caller) -> DoneReply:
        """End a sandbox; goes on when the caller goes away."""
        id = caller.key(body.sandbox_id)
        with anyio.CancelScope(shield=True):
            await self._starts.cancel(id, seen_by(caller))
            with suppress(SandboxNotFoundError):  # it may be another's, and so may be what was called
                self._view(body.sandbox_id, caller)
                self.repeats.drop(id)
            with self.naming(body.sandbox_id, caller):
                await _within(_STOP_S, partial(self.pool.stop, id, tenant=seen_by(caller)))
        return DoneReply()

    async def cancel(self, body: wire.CancelFrame, caller: Caller) -> DoneReply:
        """End a call that has a key, and return once that is done."""
        self.find(body.sandbox_id, caller)
        await _within(_SLACK_S, partial(self.repeats.cancel, caller.key(body.sandbox_id), body.key))
        return DoneReply()

    async def outcome(self, work: Callable[[], Awaitable[object]]) -> Outcome:
        """Return what comes of `work`, be it a result or an error."""
        try:
            return Outcome(write(await work()))
        except Exception as error:
            return self.failure(error)

    async def attempt(self, work: Callable[[], Awaitable[Outcome]]) -> Outcome:
        """Return the outcome that `work` gives, or that tells of what it raises."""
        try:
            return await work()
        except Exception as error:
            return self.failure(error)

    def failure(self, error: Exception) -> Outcome:
        """Return the outcome that tells of `error`."""
        problem = self._problem(error)
        return Outcome(write(problem), problem.status, retry_after_s(problem) if problem.retry else None)

    def find(self, id: str, caller: Caller) -> Sandbox:
        """Return a sandbox that is to be used. Raises as `SandboxPool.get`, and while the server shuts down."""
        self.refuse_when_closing()
        try:
            return self.pool.get(caller.key(id), tenant=seen_by(caller))
        except EnvkitError as error:
            raise self._named(error, id, caller) from None

    @contextmanager
    def naming(self, id: str, caller: Caller) -> Iterator[None]:
        """Have errors of the block call a sandbox what `caller` calls it."""
        try:
            yield
        except EnvkitError as error:
            raise self._named(error, id, caller) from None

    async def _once(
        self, body: Keyed, caller: Caller, run: Callable[[], Awaitable[object]], bound_s: float, room: Room
    ) -> Outcome:
        async def named() -> object:
            try:
                return await _within(bound_s, run)
            except EnvkitError as error:
                raise self._named(error, body.sandbox_id, caller) from None

        work = partial(self.outcome, named)
        if body.key is None:
            return await work()
        return await self.repeats.once(caller.key(body.sandbox_id), body.key, _content(body), work, room)

    def _view(self, id: str, caller: Caller) -> SandboxView:
        with self.naming(id, caller):
            return self.pool.view(caller.key(id), tenant=seen_by(caller))

    def _named(self, error: EnvkitError, id: str, caller: Caller) -> EnvkitError:
        names = {caller.key(id): id}
        with suppress(EnvkitError):
            names[self.pool.view(caller.key(id), tenant=seen_by(caller)).box_id] = id
        return renamed(error, names)

    def _seen(self, view: SandboxView, caller: Caller) -> wire.SandboxReply:
        return wire.SandboxReply.of(replace(view, id=caller.name(view.id)))

    def _plain(self, method: Callable[[Any, Caller], Awaitable[object]]) -> Call:
        return lambda body, caller, room: self.outcome(partial(method, body, caller))

    async def cancel_when_closing(self, scope: anyio.CancelScope) -> None:
        await self.closing.wait()
        scope.cancel()

    async def _unless_closing(self, work: Callable[[], Awaitable[object]]) -> None:
        """Do `work`, which a shutdown of the server ends.

        Raises:
            UnreachableError: That came first.
        """
        failure: Exception | None = UnreachableError("the server is shutting down")
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self.cancel_when_closing, tasks.cancel_scope)
            try:
                await work()
                failure = None
            except Exception as error:
                failure = error
            tasks.cancel_scope.cancel()
        if failure is not None:
            raise failure

    def _check_timeout(self, timeout_s: float) -> None:
        if timeout_s > self.max_timeout_s:
            raise RequestError(f"timeout_s may be {self.max_timeout_s:g} at most, got {timeout_s:g}")

    def refuse_when_closing(self) -> None:
        if self.closing.is_set():
            raise UnreachableError("the server is shutting down")


def most_said(body: wire.ExecBody | wire.ShellBody) -> int:
    """Return the bytes that a program's outputs may have together."""
    return 2 * body.max_output_bytes


async def _within(bound_s: float, work: Callable[[], Awaitable[T]]) -> T:
    with anyio.move_on_after(bound_s):
        return await work()
    raise DeadlineError(f"the sandbox did not answer within {bound_s:g} s")


def _content(body: msgspec.Struct) -> bytes:
    """Return what a call asks for, in few bytes."""
    digest = hashlib.blake2b(type(body).__name__.encode(), digest_size=32)
    for name in body.__struct_fields__:
        value = getattr(body, name)
        part = value if isinstance(value, bytes) else repr(value).encode(errors="surrogatepass")
        digest.update(b"%b %d " % (name.encode(), len(part)))
        digest.update(part)
    return digest.digest()


def _refused(what: str, error: ValueError) -> EnvkitError:
    return error if isinstance(error, EnvkitError) else OptionError(what, str(error))


def _path(path: str) -> str:
    if "\0" in path:
        raise RequestError("a path cannot hold NUL")
    return path
