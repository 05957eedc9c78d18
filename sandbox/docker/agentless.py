"""Sandboxes without an agent, for images without Python: they run commands and copy files through `docker exec`.

Process 1 is Docker's init. Its child is a shell that reads standard input until it closes, which happens when envkit's
process exits. Each command runs under a shell that kills all processes of the command's user afterwards, even
daemonized ones, because a process cannot change its user. Commands of one user therefore run one at a time. A command
takes about 80 ms. Persistent shells, folder copies, sockets and terminals raise `UnsupportedError`.
"""

from __future__ import annotations

import secrets
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from socket import socket

import anyio

from envkit import clock
from envkit.errors import (
    DeadlineError,
    MissingFileError,
    RefusedFileError,
    SandboxLostError,
    TooLargeError,
    UnsupportedError,
)
from envkit.protocols import Shell
from envkit.types import EXEC_TIMEOUT_S, GRADER_HOME, Cause, CauseKind, ExecResult, FileUser, SandboxSpec, SandboxUser

from ..agent_client.channel import Survived
from ..host.layout import AGENT_UID, GRADER_UID, WORK
from .api import Daemon, DaemonError
from .attach_stream import AttachStream
from .container import AttachedContainer

LIFE_LINE = ("/bin/sh", "-c", "while read -r line; do :; done")
"""Command of process 1; the sandbox ends when it exits."""

_UIDS: Mapping[SandboxUser, int] = {"agent": AGENT_UID, "grader": GRADER_UID}
_ENV_OF_GRADER = {"HOME": GRADER_HOME, "PYTHONNOUSERSITE": "1"}
# `kill -KILL -1` kills all processes that the user may signal, except the calling shell and process 1.
_RUN = 'umask "$1"; cd "$2" || exit 126; shift 2; (exec "$@"); code=$?; kill -KILL -1 2>/dev/null; exit $code'
_END = "kill -KILL -1"
_READ = 'test -f "$1" && exec cat -- "$1"'
_WRITE = (
    'umask "$4"; case $1 in */*) mkdir -p -- "${1%/*}";; esac && (umask 077 && cat > "$2")'
    ' && chmod -- "$3" "$2" && mv -f -- "$2" "$1"'
    ' || { rm -f -- "$2"; exit 1; }'
)
_END_S = 10.0
_SAME_DEATH_S = 2.0
_PIECE_BYTES = 1 << 16
_FILE_S = 60.0
_MISSING = "the image of sandbox {} has no Python, which {} needs"


def why_refused(spec: SandboxSpec, *, has_snapshot: bool) -> str | None:
    """Return in one line why `spec` needs an agent; None if it needs no agent.

    Args:
        spec: Spec of the sandbox.
        has_snapshot: Whether the sandbox starts with the files of a snapshot.
    """
    wanted = {
        "a command": spec.command,
        "a snapshot": has_snapshot,
        "a network allow-list": not isinstance(spec.network, str),
        "profile system": spec.profile == "system",
        "detached": spec.detached,
        "ttl_s": spec.ttl_s,
    }
    needs = [name for name, value in wanted.items() if value]
    return f"the image has no Python, which is needed for {', '.join(needs)}" if needs else None


class AgentlessSandbox:
    """A sandbox without an agent; implements `envkit.protocols.Sandbox`.

    Args:
        sandbox_id: Id of the sandbox.
        daemon: The Docker daemon that runs the container.
        attached: The container, with `LIFE_LINE` as process 1.
        env: Environment variables of every program in the sandbox.
        forget: Called with the sandbox after it is stopped.
    """

    def __init__(
        self,
        sandbox_id: str,
        daemon: Daemon,
        attached: AttachedContainer,
        *,
        env: Mapping[str, str],
        forget: Callable[[AgentlessSandbox], None],
    ) -> None:
        self.unenforced: tuple[str, ...] = ("memory_reserve",)
        self.grader_home = GRADER_HOME
        self._id = sandbox_id
        self._daemon = daemon
        self._attached = attached
        self._life_line = attached.stream
        self._env = dict(env)
        self._forget = forget
        self._turns = {uid: anyio.Lock() for uid in _UIDS.values()}
        self._cause: Cause | None = None
        self._survived = Survived()

    @property
    def id(self) -> str:
        return self._id

    async def exec(
        self,
        argv: Sequence[str],
        *,
        timeout_s: float = EXEC_TIMEOUT_S,
        env: Mapping[str, str] | None = None,
        cwd: str | None = None,
        stdin: bytes = b"",
        user: SandboxUser = "agent",
        max_output_bytes: int = 1 << 20,
    ) -> ExecResult:
        """Run a program to its end; see `envkit.protocols.Sandbox.exec`. User ``"root"`` is not supported."""
        uid = self._uid(user)
        if any("\0" in part for part in (*argv, *(env or {}).values())):
            raise ValueError("an argument or a variable contains a NUL character")
        umask, folder = ("077", GRADER_HOME) if user == "grader" else ("022", WORK)
        wrapped = ["/bin/sh", "-c", _RUN, "sh", umask, cwd or folder, *argv]
        async with self._turns[uid]:
            is_over = False
            try:
                result = await self._run(wrapped, uid, timeout_s, max_output_bytes, env=env or {}, stdin=stdin)
                is_over = not result.timed_out and result.exit_code != -signal.SIGKILL
            finally:
                # Kill the user's processes here, because the command's shell may have ended before it killed them.
                if not is_over:
                    with anyio.CancelScope(shield=True):
                        await self._run(["/bin/sh", "-c", _END], uid, _END_S, 0)
        return result

    def shell(self, name: str = "main", *, user: SandboxUser = "agent") -> Shell:
        raise UnsupportedError(_MISSING.format(self._id, "a persistent shell"))

    async def read(self, path: str, *, max_bytes: int = 64 << 20, user: FileUser = "agent") -> bytes:
        uid = self._uid(user)
        async with self._turns[uid]:
            result = await self._run(["/bin/sh", "-c", _READ, "sh", path], uid, _FILE_S, max_bytes)
        if result.truncated_bytes:
            raise TooLargeError(f"{path} has more than {max_bytes} bytes")
        if result.exit_code != 0:
            raise MissingFileError(f"{path}: {result.stderr.strip() or 'there is no such file'}")
        return result.stdout_bytes

    async def write(self, path: str, content: bytes, *, mode: int | None = None, user: FileUser = "agent") -> None:
        uid = self._uid(user)
        beside = f"{path}.{secrets.token_hex(4)}"
        umask, default = ("077", 0o600) if user == "grader" else ("022", 0o644)
        argv = ["/bin/sh", "-c", _WRITE, "sh", path, beside, f"{default if mode is None else mode:o}", umask]
        async with self._turns[uid]:
            result = await self._run(argv, uid, _FILE_S, 1 << 16, stdin=content)
        if result.exit_code != 0:
            raise RefusedFileError(f"{path}: {result.stderr.strip() or 'cannot be written'}")

    async def upload(self, source: Path, target: str, *, user: FileUser = "agent") -> None:
        raise UnsupportedError(_MISSING.format(self._id, "copying folders"))

    async def download(self, source: str, target: Path, *, max_bytes: int = 1 << 30, user: FileUser = "agent") -> None:
        raise UnsupportedError(_MISSING.format(self._id, "copying folders"))

    async def connect(self, address: str | int) -> socket:
        raise UnsupportedError(_MISSING.format(self._id, "a connection into it"))

    async def probe(self, timeout_s: float) -> float:
        began = clock.precise()
        with anyio.move_on_after(timeout_s):
            await self._run(["/bin/sh", "-c", ":"], AGENT_UID, timeout_s, 0)
            return clock.precise() - began
        raise DeadlineError(f"sandbox {self._id} did not answer within {timeout_s:g} s")

    async def snapshot(self) -> str:
        raise UnsupportedError(_MISSING.format(self._id, "a snapshot"))

    async def log(self) -> str:
        raise UnsupportedError(_MISSING.format(self._id, "a log"))

    async def wait(self) -> Cause:
        await self._life_line.ended()
        return await self._why_gone()

    async def stop(self) -> None:
        """Kill all processes and remove the sandbox. May be called again; cannot be cancelled."""
        if self._cause is None and not self._life_line.is_over:
            self._cause = Cause(CauseKind.STOPPED, "stopped")
        with anyio.CancelScope(shield=True):
            await self._why_gone()
            await self._attached.kill()
            self._forget(self)

    def _uid(self, user: SandboxUser) -> int:
        uid = _UIDS.get(user)
        if uid is None:
            raise UnsupportedError(_MISSING.format(self._id, f"user {user!r}"))
        return uid

    async def _why_gone(self) -> Cause:
        if self._cause is None:
            self._cause = await self._attached.cause(self._survived)
        return self._cause

    async def _run(
        self,
        argv: Sequence[str],
        uid: int,
        timeout_s: float,
        keep_bytes: int,
        *,
        env: Mapping[str, str] | None = None,
        stdin: bytes = b"",
    ) -> ExecResult:
        """Run `argv` as user `uid` and collect its output.

        Raises:
            SandboxLostError: The sandbox has ended.
        """
        if self._cause is not None or self._life_line.is_over:
            raise SandboxLostError(self._id, await self._why_gone())
        began = clock.precise()
        output = _LogTail(keep_bytes)
        stream: AttachStream | None = None
        code: int | None = None
        own = _ENV_OF_GRADER if uid == GRADER_UID else {}
        try:
            command = await self._daemon.new_command(
                self._attached.id, argv, user=f"{uid}:{uid}", env={**self._env, **own, **(env or {})}, cwd=WORK
            )
            with anyio.move_on_after(timeout_s) as limit:
                stream = await self._daemon.run_command(command, keep_stderr_bytes=keep_bytes)
                await _converse(stream, stdin, output)
            if not limit.cancelled_caught:
                code = await self._exit_code(command)
        except DaemonError as error:
            raise await self._lost(Cause(CauseKind.BACKEND_LOST, str(error))) from None
        finally:
            if stream is not None:
                stream.close()
        if code not in (None, 128 + signal.SIGKILL) and not self._life_line.is_over:
            # Process 1 is still alive, so it survived all out-of-memory kills until now
            self._survived = Survived(1, clock.wall())
        return ExecResult(
            exit_code=128 - code if code is not None and 128 < code <= 192 else code,
            stdout_bytes=bytes(output.kept),
            stderr_bytes=b"" if stream is None else stream.stderr,
            timed_out=limit.cancelled_caught,
            truncated_bytes=output.cut + (0 if stream is None else stream.stderr_cut),
            duration_s=clock.precise() - began,
        )

    async def _exit_code(self, command: str) -> int:
        """Return the exit code of a command whose output has ended."""
        with anyio.move_on_after(_END_S):
            while True:  # the daemon records the exit slightly after the output ends
                if (code := await self._daemon.exit_code(command)) is not None:
                    return code
                await anyio.sleep(0.005)
        raise DaemonError(f"the daemon did not report the exit code within {_END_S:g} s")

    async def _lost(self, otherwise: Cause) -> SandboxLostError:
        """Return the error of a failed call: with the cause of the sandbox's end if it has ended, else `otherwise`."""
        with anyio.move_on_after(_SAME_DEATH_S):
            await self._life_line.ended()
        return SandboxLostError(self._id, await self._why_gone() if self._life_line.is_over else otherwise)


class _LogTail:
    """The last `limit` bytes of an output.

    Attributes:
        kept: The last bytes.
        cut: Number of bytes dropped before `kept`.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.kept = bytearray()
        self.cut = 0

    def append(self, piece: bytes) -> None:
        self.kept += piece
        if (excess := len(self.kept) - self._limit) > 0:
            del self.kept[:excess]
            self.cut += excess


async def _converse(stream: AttachStream, stdin: bytes, output: _LogTail) -> None:
    """Send `stdin` to a command and append its output to `output`, until the output ends."""

    async def feed() -> None:
        with suppress(ConnectionError):  # the command may exit before it has read all input
            for start in range(0, len(stdin), _PIECE_BYTES):
                await stream.send(stdin[start : start + _PIECE_BYTES])
            stream.send_eof()

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(feed)
        while piece := await stream.receive():
            output.append(piece)
        tasks.cancel_scope.cancel()
