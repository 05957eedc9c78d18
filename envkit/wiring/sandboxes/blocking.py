"""Sandboxes by the names of their backends, and the blocking face of one for scripts."""

from __future__ import annotations

import os
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, TypeAlias, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from pydantic import TypeAdapter, ValidationError

from envkit import clock
from envkit.env import close_here, loop_thread
from envkit.errors import SandboxLostError, SandboxNotFoundError, UnsupportedError, UsageError, did_you_mean
from envkit.protocols import Sandbox, Shell
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.agentless import AgentlessSandbox
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.process.backend import ProcessBackend
from envkit.sandbox.transfer import tar_stream
from envkit.types import EXEC_TIMEOUT_S, Cause, CauseKind, ExecResult, FileUser, SandboxSpec, SandboxUser

if TYPE_CHECKING:
    from envkit.http.client.remote_sandbox import RemoteSandbox

T = TypeVar("T")

BackendKind: TypeAlias = Literal["auto", "local", "docker", "process"]
Backend: TypeAlias = LocalBackend | DockerBackend | ProcessBackend
AnySandbox: TypeAlias = "AgentSandbox | AgentlessSandbox | RemoteSandbox"

KINDS = ("auto", "local", "docker", "process")
_SERVERS_OWN = ("ledger",)
"""Fields of a spec that nobody asks for."""


async def choose(kind: BackendKind = "auto") -> Backend:
    """Return a backend that is not open yet.

    Args:
        kind: ``"local"`` is bubblewrap, ``"docker"`` a Docker daemon, ``"process"`` a plain child process, which
            isolates nothing; ``"auto"`` is the first of ``local`` and ``docker`` that works here.

    Raises:
        UsageError: There is no such kind, or it does not work on this machine; says what to do.
    """
    if kind not in KINDS:
        raise UsageError(f"backend: must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    if kind == "process":
        return ProcessBackend()
    reasons = []
    if kind in ("auto", "local"):
        why = await clock.to_thread(bubblewrap.why_unavailable)
        if why is None:
            return LocalBackend()
        reasons.append(f"local: {why}")
    if kind in ("auto", "docker"):
        why = await docker.why_unavailable()
        if why is None:
            return DockerBackend()
        reasons.append(f"docker: {why}")
    if "ENVKIT_SOCKETS" in os.environ:  # every sandbox has it set
        raise UsageError(
            "a sandbox cannot be opened from inside a sandbox, which has neither user namespaces for bubblewrap nor a "
            "Docker daemon; run an environment that opens one outside: sandbox.kind: none in a training file, "
            "envkit serve --backend none"
        )
    raise UsageError(f"no sandbox: {'; '.join(reasons)}; backend 'process' works everywhere, but isolates nothing")


def kind_of(sandbox_id: str) -> BackendKind:
    """Return the kind of backend that gave this id.

    Raises:
        SandboxNotFoundError: None did.
    """
    for prefix, kind in (("bwrap-", "local"), ("docker-", "docker")):
        if sandbox_id.startswith(prefix):
            return kind  # type: ignore[return-value]
    raise SandboxNotFoundError(f"no sandbox {sandbox_id!r} on this machine: ids begin with bwrap- or docker-")


def spec_of(options: Mapping[str, Any]) -> SandboxSpec:
    """Return the spec with these fields.

    Raises:
        UsageError: There is no such field, or it cannot have this value.
    """
    known = [field.name for field in fields(SandboxSpec) if field.name not in _SERVERS_OWN]
    for name in options:
        if name not in known:
            raise UsageError(f"a sandbox has no option {name!r}{did_you_mean(name, known)}")
    if options.get("orphan_ttl_s") is not None and not options.get("detached"):
        raise UsageError("orphan_ttl_s: only a sandbox that stays can be left alone (stay)")
    try:
        return TypeAdapter(SandboxSpec).validate_python(options)
    except ValidationError as error:
        from envkit.config.wording import value_problem  # loads all of the config

        wrong = {str(problem["loc"][0]): value_problem(problem) for problem in error.errors()}
        raise UsageError("; ".join(f"{name}: {why}" for name, why in wrong.items())) from None


@asynccontextmanager
async def opened(kind: BackendKind) -> AsyncIterator[Backend]:
    """Give a backend for the length of the block; raises as `choose`."""
    async with await choose(kind) as backend:
        yield backend


class Starter(Protocol):
    """Starts boxes, here or elsewhere; see `envkit.protocols.SandboxBackend`."""

    async def start(self, spec: SandboxSpec) -> AnySandbox: ...

    async def restore(self, snapshot: str, spec: SandboxSpec) -> AnySandbox: ...


@asynccontextmanager
async def running(backend: Starter, spec: SandboxSpec, snapshot: str | None = None) -> AsyncIterator[AnySandbox]:
    """Give a box for the length of the block; raises as `SandboxBackend.start` and `restore`."""
    box = await (backend.start(spec) if snapshot is None else backend.restore(snapshot, spec))
    try:
        yield box
    finally:
        await box.stop()


def open_sandbox(
    backend: BackendKind = "auto",
    *,
    url: str | None = None,
    token: str | None = None,
    ca: Path | str | None = None,
    **options: Any,
) -> BlockingSandbox:
    """Start a sandbox, as in ``with envkit.open_sandbox() as box: box.exec(["true"], timeout_s=5)``.

    Args:
        backend: ``"local"`` is bubblewrap, ``"docker"`` a Docker daemon, ``"process"`` a plain child process, which
            isolates nothing; ``"auto"`` is the first of ``local`` and ``docker`` that works here.
        url: Address of an `envkit serve` that lends sandboxes, which is asked for one instead.
        token: What to show that server; the variable ``ENVKIT_TOKEN``, unless given.
        ca: PEM file of the certificates that an ``https://`` server is trusted by, instead of the system's.
        options: The fields of `envkit.types.SandboxSpec`, such as ``image``, ``memory_mib`` and ``network``.

    Raises:
        UsageError: There is no such backend or option, or it does not work on this machine; says what to do.
        SandboxRefusedError: The backend cannot grant what was asked for.
        SandboxStartError: The box never became ready.
        UnreachableError: Nothing answers at `url`.
        CapacityError: The server has no room.
    """
    spec = spec_of(options)
    if url is None and (token is not None or ca is not None):
        raise UsageError("a token and certificates go with the address of a server (url)")
    if url is not None and backend != "auto":
        raise UsageError("which backend a server uses is its own choice; leave backend out, or url")
    with ExitStack() as resources:
        portal = resources.enter_context(loop_thread())
        opened_backend: Starter
        if url is None:
            opened_backend = _enter(portal, resources, opened(backend))
        else:
            from envkit.http.client.sandbox_client import SandboxClient  # slow to load, and not needed here otherwise

            client = SandboxClient(url, token, ca=ca, trees=tar_stream)
            # It holds a task group, which is left by the task that entered it.
            opened_backend = resources.enter_context(portal.wrap_async_context_manager(client))
        box = _enter(portal, resources, running(opened_backend, spec))
        kept = resources.pop_all()
    return BlockingSandbox(opened_backend, spec, box, portal, kept)


@asynccontextmanager
async def open_sandbox_async(backend: BackendKind = "auto", **options: Any) -> AsyncIterator[Sandbox]:
    """Start a sandbox of this machine for the length of the block, for code in an event loop, such as an `AsyncEnv`.

    The block may be entered by one task and left by another, as with an ``AsyncExitStack`` in reset and close.

    Args:
        backend: As in `open_sandbox`.
        options: As in `open_sandbox`.

    Raises:
        UsageError, SandboxStartError: As `open_sandbox`.
    """
    spec = spec_of(options)
    async with opened(backend) as starter, running(starter, spec) as box:
        yield box


class BlockingSandbox:
    """A sandbox for scripts, each call of which returns when it is done. Made by `open_sandbox`.

    Calls may come from several threads. Ctrl-C ends the call that is waited for, and what it started in the box. A box
    that nobody stopped is stopped when the program ends.
    """

    def __init__(
        self, backend: Starter, spec: SandboxSpec, box: AnySandbox, portal: BlockingPortal, resources: ExitStack
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._box = box
        self._portal = portal
        # Also runs when the interpreter ends, while there is still a loop thread to stop it.
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, close_here, self._pid, resources)

    def __repr__(self) -> str:
        is_here = isinstance(self._box, (AgentSandbox, AgentlessSandbox))
        backend = type(self._backend).__name__.removesuffix("Backend").lower() if is_here else "remote"
        return f"<sandbox {self.id}: {backend}, {'running' if self._finalizer.alive else 'stopped'}>"

    @property
    def id(self) -> str:
        return self._box.id

    @property
    def grader_home(self) -> str:
        """The folder that only a grader can enter; see `envkit.protocols.Sandbox.grader_home`."""
        return self._box.grader_home

    @property
    def unenforced(self) -> Sequence[str]:
        """What it does not hold of what others of its kind hold.

        Raises:
            UnsupportedError: It is remote, and only its server knows.
        """
        if not isinstance(self._box, (AgentSandbox, AgentlessSandbox)):
            raise UnsupportedError(f"what sandbox {self.id} gives up is known to its server alone")
        return self._box.unenforced

    def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: str | bytes = b"",
        user: SandboxUser = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a program to its end; see `envkit.protocols.Sandbox.exec`."""
        run = partial(self._box.exec, argv, timeout_s=timeout_s, env=env, cwd=cwd, stdin=_bytes(stdin), user=user)
        return self.wait_for(partial(run, max_output_bytes=max_output_bytes))

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> BlockingShell:
        """Return the shell `name`, which starts with its first command."""
        return BlockingShell(self._box.shell(name, user=user), self.wait_for)

    def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file; see `envkit.protocols.Sandbox.read`."""
        return self.wait_for(partial(self._box.read, path, max_bytes=max_bytes, user=user))

    def write(self, path: str, content: str | bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file, text as UTF-8; see `envkit.protocols.Sandbox.write`."""
        self.wait_for(partial(self._box.write, path, _bytes(content), mode=mode, user=user))

    def upload(self, source: str | Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder into the box; see `envkit.protocols.Sandbox.upload`."""
        self.wait_for(partial(self._box.upload, Path(source), target, user=user))

    def download(self, source: str, target: str | Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder out of the box; see `envkit.protocols.Sandbox.download`."""
        self.wait_for(partial(self._box.download, source, Path(target), max_bytes=max_bytes, user=user))

    def connect(self, place: str | int) -> socket.socket:
        """Return a connected stream to a socket or port inside; see `envkit.protocols.Sandbox.connect`."""
        connected = self.wait_for(partial(self._box.connect, place))
        connected.setblocking(True)
        return connected

    def probe(self, timeout_s: float = 5.0) -> float:
        """Return the seconds that an answer from inside took; see `envkit.protocols.Sandbox.probe`."""
        return self.wait_for(partial(self._box.probe, timeout_s))

    def snapshot(self) -> str:
        """Keep the files as they are now; returns the name that `restore` takes."""
        return self.wait_for(self._box.snapshot)

    def restore(self, snapshot: str) -> BlockingSandbox:
        """Start another sandbox like this one with the files of a snapshot; it is stopped with the first at the latest.

        Raises:
            SandboxRefusedError: There is no such snapshot.
            SandboxStartError: The box never became ready.
        """
        self._require_own_process()
        with ExitStack() as resources:
            portal = resources.enter_context(loop_thread())
            box = _enter(portal, resources, running(self._backend, self._spec, snapshot))
            kept = resources.pop_all()
        return BlockingSandbox(self._backend, self._spec, box, portal, kept)

    def log(self) -> str:
        """Return the last 64 KiB of what its command wrote to standard error."""
        return self.wait_for(self._box.log)

    def stop(self) -> None:
        """End everything in it and remove what it left; safe to repeat."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_for(self, function: Callable[[], Awaitable[T]]) -> T:
        """Return what `function` returns, which is called in the loop that the box belongs to."""
        if not self._finalizer.alive:
            raise SandboxLostError(self.id, Cause(CauseKind.STOPPED, "stopped"))
        self._require_own_process()
        future: Future[T] = self._portal.start_task_soon(function)
        try:
            return future.result()
        except BaseException:
            future.cancel()
            raise

    def _require_own_process(self) -> None:
        if os.getpid() != self._pid:
            raise UsageError(f"sandbox {self._box.id} belongs to process {self._pid}, from which this one was forked")


class BlockingShell:
    """A shell that stays, for scripts; made by `BlockingSandbox.shell`."""

    def __init__(self, shell: Shell, wait_for: Callable[[Callable[[], Awaitable[Any]]], Any]) -> None:
        self._shell = shell
        self._wait_for = wait_for

    def run(self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20) -> ExecResult:
        """Run `command`; see `envkit.protocols.Shell.run`."""
        run = partial(self._shell.run, command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        result: ExecResult = self._wait_for(run)
        return result

    def close(self) -> None:
        """End the shell and everything that it started; safe to repeat."""
        self._wait_for(self._shell.close)


def _enter(portal: BlockingPortal, resources: ExitStack, context: AbstractAsyncContextManager[T]) -> T:
    """Enter `context` in the loop of `portal`, and leave it when `resources` are closed; Ctrl-C ends the waiting.

    It is entered and left by one task, since what it opens may be a group of tasks.
    """
    entered: Future[T] = Future()
    leaving = portal.call(anyio.Event)

    async def live() -> None:
        try:
            async with context as value:
                entered.set_result(value)
                await leaving.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise

    life = portal.start_task_soon(live)

    def leave() -> None:
        portal.call(leaving.set)
        life.result()

    try:
        value = entered.result()
    except BaseException:
        if entered.cancel():
            life.cancel()
        elif entered.exception() is None:  # it came too late: all is there already
            leave()
        raise
    resources.callback(leave)
    return value


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
