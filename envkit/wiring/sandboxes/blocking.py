"""Sandboxes for scripts (`open_sandbox`, with blocking calls) and for code in an event loop (`open_sandbox_async`)."""

from __future__ import annotations

import logging
import os
import socket
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager, ExitStack, asynccontextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias, TypeVar

import anyio
from anyio.from_thread import BlockingPortal
from pydantic import TypeAdapter, ValidationError

from envkit.errors import SandboxLostError, SandboxNotFoundError, UnsupportedError, UsageError, did_you_mean
from envkit.http.client.outages import OUTAGE_TIMEOUT_S, Outages
from envkit.protocols import Sandbox, Shell
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.transfer import tar_stream
from envkit.types import EXEC_TIMEOUT_S, Cause, CauseKind, ExecResult, FileUser, SandboxSpec, SandboxUser
from envkit.wiring.blocking_env import close_here, loop_thread
from envkit.wiring.sandboxes.backends import Backend, BackendKind, choose

if TYPE_CHECKING:
    from envkit.http.client.remote_sandbox import RemoteSandbox
    from envkit.http.client.sandbox_client import SandboxClient

T = TypeVar("T")

_log = logging.getLogger(__name__)

Starter: TypeAlias = "Backend | SandboxClient"
AnySandbox: TypeAlias = "AgentSandbox | RemoteSandbox"

_INTERNAL_FIELDS = ("ledger",)
"""Fields of a spec that only servers set."""


def kind_of(sandbox_id: str) -> BackendKind:
    """Return the kind of backend that created the sandbox `sandbox_id`.

    Raises:
        SandboxNotFoundError: No backend of this machine creates such ids.
    """
    for prefix, kind in (("bwrap-", "local"), ("docker-", "docker")):
        if sandbox_id.startswith(prefix):
            return kind  # type: ignore[return-value]
    raise SandboxNotFoundError(f"no sandbox {sandbox_id!r} on this machine: ids begin with bwrap- or docker-")


def spec_of(options: Mapping[str, Any]) -> SandboxSpec:
    """Return the `SandboxSpec` whose fields are `options`.

    Raises:
        UsageError: There is no such field, or its value is invalid.
    """
    known = [field.name for field in fields(SandboxSpec) if field.name not in _INTERNAL_FIELDS]
    for name in options:
        if name not in known:
            raise UsageError(f"a sandbox has no option {name!r}{did_you_mean(name, known)}")
    if options.get("orphan_ttl_s") is not None and not options.get("detached"):
        raise UsageError("orphan_ttl_s: needs a detached sandbox; set detached=True, or leave orphan_ttl_s out")
    try:
        return TypeAdapter(SandboxSpec).validate_python(options)
    except ValidationError as error:
        # Import this module only for an error, because it loads the whole config package.
        from envkit.config.wording import value_problem

        wrong = {str(problem["loc"][0]): value_problem(problem) for problem in error.errors()}
        raise UsageError("; ".join(f"{name}: {why}" for name, why in wrong.items())) from None


@asynccontextmanager
async def opened(kind: BackendKind) -> AsyncIterator[Backend]:
    """Choose a backend as `choose` does, with the same errors, and open it for the duration of a ``with`` block."""
    async with (await choose(kind)).backend as backend:
        yield backend


@asynccontextmanager
async def running(backend: Starter, spec: SandboxSpec, snapshot: str | None = None) -> AsyncIterator[AnySandbox]:
    """Run a sandbox during a ``with`` block, with the files of `snapshot` if given. Raises the errors of `backend`."""
    sandbox = await (backend.start(spec) if snapshot is None else backend.restore(snapshot, spec))
    try:
        yield sandbox
    finally:
        await sandbox.stop()


def open_sandbox(
    backend: BackendKind = "auto",
    *,
    url: str | None = None,
    token: str | None = None,
    ca: Path | str | None = None,
    outage_timeout_s: float = OUTAGE_TIMEOUT_S,
    **options: Any,
) -> BlockingSandbox:
    """Start a sandbox, as in ``with envkit.open_sandbox() as sandbox: sandbox.exec(["true"], timeout_s=5)``.

    Args:
        backend: ``"local"`` is bubblewrap, ``"docker"`` a Docker daemon, ``"process"`` a plain child process, which
            isolates nothing; ``"auto"`` is bubblewrap if it works here, otherwise Docker if it works here.
        url: Address of an `envkit serve`, which starts the sandbox instead of this machine.
        token: Token for that server; None uses the variable ``ENVKIT_TOKEN``.
        ca: PEM file with the CA certificates for an ``https://`` server; None uses the system's.
        outage_timeout_s: Seconds for which calls wait for that server while it restarts; 0: they fail at once. The
            first connection and copies of folders never wait. A program that ran when the server ended may run twice.
        options: The fields of `envkit.types.SandboxSpec`, such as ``image``, ``memory_mib`` and ``network``.

    Raises:
        UsageError: There is no such backend or option, or it does not work on this machine; the message names the
            remedy.
        SandboxRefusedError: The backend does not support the options.
        SandboxStartError: The sandbox did not become ready.
        UnreachableError: No server answers at `url`.
        CapacityError: The server is full.
    """
    spec = spec_of(options)
    if url is None and (token is not None or ca is not None):
        raise UsageError("token and ca are only for a server; set url to its address, or leave out token and ca")
    if url is not None and backend != "auto":
        raise UsageError("a server chooses its own backend; leave out backend or url")
    with ExitStack() as resources:
        portal = resources.enter_context(loop_thread())
        starter: AbstractAsyncContextManager[Starter] = opened(backend)
        if url is not None:
            from envkit.http.client.sandbox_client import SandboxClient  # slow to import

            outages = Outages(outage_timeout_s, _log.warning)
            starter = SandboxClient(url, token, ca=ca, folder_transport=tar_stream, outages=outages)
        opened_backend = _enter(portal, resources, starter)
        return BlockingSandbox(opened_backend, spec, None, portal, resources)


@asynccontextmanager
async def open_sandbox_async(backend: BackendKind = "auto", **options: Any) -> AsyncIterator[Sandbox]:
    """Run a sandbox on this machine during an ``async with`` block, for code in an event loop, such as an `AsyncEnv`.

    One task may enter this context manager and another may exit it: for example, ``reset`` may enter it into an
    ``AsyncExitStack`` that ``close`` closes.

    The arguments and errors are those of `open_sandbox`.
    """
    spec = spec_of(options)
    async with opened(backend) as starter, running(starter, spec) as sandbox:
        yield sandbox


class BlockingSandbox:
    """A sandbox for scripts with blocking calls, created by `open_sandbox`.

    Calls may come from several threads. Ctrl-C ends the current call and its program in the sandbox. A sandbox that is
    still running stops when the Python program ends.
    """

    def __init__(
        self, backend: Starter, spec: SandboxSpec, snapshot: str | None, portal: BlockingPortal, resources: ExitStack
    ) -> None:
        self._backend = backend
        self._spec = spec
        self._portal = portal
        self._sandbox = _enter(portal, resources, running(backend, spec, snapshot))
        # Let a finalizer stop the sandbox. When Python exits, it is called before the thread of the event loop ends.
        self._pid = os.getpid()
        self._finalizer = weakref.finalize(self, close_here, self._pid, resources.pop_all())

    def __repr__(self) -> str:
        is_here = isinstance(self._sandbox, AgentSandbox)
        backend = type(self._backend).__name__.removesuffix("Backend").lower() if is_here else "remote"
        return f"<sandbox {self.id}: {backend}, {'running' if self._finalizer.alive else 'stopped'}>"

    @property
    def id(self) -> str:
        return self._sandbox.id

    @property
    def grader_home(self) -> str:
        """Path of the folder that only graders can read; see `envkit.protocols.Sandbox.grader_home`."""
        return self._sandbox.grader_home

    @property
    def unenforced(self) -> Sequence[str]:
        """Limits that this sandbox does not enforce, although its backend usually does.

        Raises:
            UnsupportedError: The sandbox is on a server, which does not report them.
        """
        if not isinstance(self._sandbox, AgentSandbox):
            raise UnsupportedError(f"the server of sandbox {self.id} does not report unenforced limits")
        return self._sandbox.unenforced

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
        run = partial(self._sandbox.exec, argv, timeout_s=timeout_s, env=env, cwd=cwd, stdin=_bytes(stdin), user=user)
        return self.wait_for(partial(run, max_output_bytes=max_output_bytes))

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> BlockingShell:
        """Return the shell `name`. It starts when it runs its first command."""
        return BlockingShell(self._sandbox.shell(name, user=user), self.wait_for)

    def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        """Return the content of a file; see `envkit.protocols.Sandbox.read`."""
        return self.wait_for(partial(self._sandbox.read, path, max_bytes=max_bytes, user=user))

    def write(self, path: str, content: str | bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        """Write a file, with text as UTF-8; see `envkit.protocols.Sandbox.write`."""
        self.wait_for(partial(self._sandbox.write, path, _bytes(content), mode=mode, user=user))

    def upload(self, source: str | Path, target: str, *, user: FileUser = "agent") -> None:
        """Copy a file or folder into the sandbox; see `envkit.protocols.Sandbox.upload`."""
        self.wait_for(partial(self._sandbox.upload, Path(source), target, user=user))

    def download(self, source: str, target: str | Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        """Copy a file or folder out of the sandbox; see `envkit.protocols.Sandbox.download`."""
        self.wait_for(partial(self._sandbox.download, source, Path(target), max_bytes=max_bytes, user=user))

    def connect(self, address: str | int) -> socket.socket:
        """Connect to a socket or port in the sandbox; see `envkit.protocols.Sandbox.connect`."""
        connected = self.wait_for(partial(self._sandbox.connect, address))
        connected.setblocking(True)
        return connected

    def probe(self, timeout_s: float = 5.0) -> float:
        """Return the round-trip time to the sandbox in seconds; see `envkit.protocols.Sandbox.probe`."""
        return self.wait_for(partial(self._sandbox.probe, timeout_s))

    def snapshot(self) -> str:
        """Save the current files, and return the name of the snapshot, which `restore` takes."""
        return self.wait_for(self._sandbox.snapshot)

    def restore(self, snapshot: str) -> BlockingSandbox:
        """Start another sandbox with the options of this sandbox and the files of a snapshot.

        The new sandbox stops at the latest when this sandbox stops.

        Raises:
            SandboxRefusedError: There is no such snapshot.
            SandboxStartError: The sandbox did not become ready.
        """
        self._require_own_process()
        with ExitStack() as resources:
            portal = resources.enter_context(loop_thread())
            return BlockingSandbox(self._backend, self._spec, snapshot, portal, resources)

    def log(self) -> str:
        """Return the last 64 KiB that the sandbox's command wrote to standard error."""
        return self.wait_for(self._sandbox.log)

    def stop(self) -> None:
        """Stop the sandbox and delete its files; safe to repeat."""
        self._finalizer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def wait_for(self, function: Callable[[], Awaitable[T]]) -> T:
        """Run `function` in the sandbox's event loop and return its result."""
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
            raise UsageError(f"sandbox {self._sandbox.id} works only in process {self._pid}; open a new one after fork")


class BlockingShell:
    """A persistent shell for scripts, created by `BlockingSandbox.shell`."""

    def __init__(self, shell: Shell, wait_for: Callable[[Callable[[], Awaitable[Any]]], Any]) -> None:
        self._shell = shell
        self._wait_for = wait_for

    def run(self, command: str, *, timeout_s: float = EXEC_TIMEOUT_S, max_output_bytes: int = 1 << 20) -> ExecResult:
        """Run `command`; see `envkit.protocols.Shell.run`."""
        run = partial(self._shell.run, command, timeout_s=timeout_s, max_output_bytes=max_output_bytes)
        result: ExecResult = self._wait_for(run)
        return result

    def close(self) -> None:
        """End the shell and its processes; safe to repeat."""
        self._wait_for(self._shell.close)


def _enter(portal: BlockingPortal, resources: ExitStack, context: AbstractAsyncContextManager[T]) -> T:
    """Enter `context` in the event loop of `portal`, and exit it, in the same task, when `resources` closes.

    Ctrl-C stops waiting for `context` to be entered.
    """
    entered: Future[T] = Future()
    closing = portal.call(anyio.Event)

    async def hold() -> None:
        try:
            async with context as value:
                entered.set_result(value)
                await closing.wait()
        except BaseException as error:
            if not entered.done():
                entered.set_exception(error)
            raise

    task = portal.start_task_soon(hold)

    def close() -> None:
        portal.call(closing.set)
        task.result()

    try:
        value = entered.result()
    except BaseException:
        if entered.cancel():
            task.cancel()
        elif entered.exception() is None:
            # Ctrl-C came just after `context` was entered, so exit it again.
            close()
        raise
    resources.callback(close)
    return value


def _bytes(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
