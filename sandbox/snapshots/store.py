"""Take and restore snapshots: each is one file on the host with the contents of a sandbox's writable folders.

A snapshot contains names, modes, times and contents of files, as far as the agent's user may read them, but no
processes. `envkit.sandbox.snapshots.snapshot_inside` creates it inside the sandbox and documents the format. The size
of the file on the host is limited, because an untrusted sandbox could otherwise fill the host's disk.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxError, SandboxLostError
from envkit.types import JSON, SandboxSpec, SandboxUser

from ..agent_client.call import one_line
from ..agent_client.channel import AgentChannel, Call, ChannelEndedError, RefusedCallError
from ..agent_client.sandbox import AgentSandbox
from ..host import run_dirs
from ..host.instances import not_ready

ROOTS = ("/workspace", "/tmp")
_INSIDE = Path(__file__).with_name("snapshot_inside.py")
_TIMEOUT_S = 600.0
_PIECE_BYTES = 1 << 20
"""Number of bytes written between two checks of the free disk space."""
_REASON_BYTES = 4096
_COMMAND_BYTES = 1 << 20
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


@dataclass(frozen=True, slots=True)
class Extent:
    """Size limit of a snapshot, and the user that reads its files.

    Attributes:
        disk_mib: Disk limit of each writable folder in MiB. A snapshot may be as large as all folders together.
        uid: The agent's uid, to which the snapshot process switches; None if the sandbox has a single user.
    """

    disk_mib: int
    uid: int | None


def find(parent: Path, name: str) -> Path | None:
    """Return the file of snapshot `name` in `parent`; None if it does not exist."""
    file = parent / name
    return file if _NAME.fullmatch(name) and file.is_file() else None


def size(parent: Path, name: str) -> int:
    """Return the size in bytes of snapshot `name` in `parent`; 0 if it does not exist."""
    file = find(parent, name)
    return 0 if file is None else file.stat().st_size


def remove(parent: Path, name: str) -> None:
    """Remove snapshot `name` from `parent`, if it exists."""
    if (file := find(parent, name)) is not None:
        file.unlink(missing_ok=True)


async def keep(channel: AgentChannel, path: Path, extent: Extent) -> None:
    """Save a sandbox's writable folders to the new file `path`, which is removed again if this fails.

    Raises:
        SandboxError: The snapshot exceeds `extent`, a file cannot be read, or the host's disk is nearly full.
        ChannelEndedError: The sandbox has ended.
    """
    try:
        file = await clock.to_thread(_create, path)
        with file:
            first = await channel.call("read", path="/proc/1/cmdline", max_bytes=_COMMAND_BYTES)
            call = await channel.start(
                "exec",
                argv=[*_argv(first.data, "pack", extent.uid)],
                cwd="/",
                timeout_s=_TIMEOUT_S,
                user=_user(extent.uid),
                stream=True,
            )
            try:
                await _take(call, file, extent.disk_mib * len(ROOTS))
            finally:
                await call.leave()
    except BaseException as error:
        with anyio.CancelScope(shield=True), suppress(OSError):
            await clock.to_thread(path.unlink, missing_ok=True)
        if isinstance(error, (RefusedCallError, OSError)) and not isinstance(error, ChannelEndedError):
            raise SandboxError(f"no snapshot: {error}") from error
        raise


def waiting(command: Sequence[str]) -> tuple[str, ...]:
    """Return an argv that waits until `restore` has restored the files, then runs `command`; empty if it is empty."""
    return (*_WAIT, *command) if command else ()


async def restore(sandbox: AgentSandbox, path: Path, spec: SandboxSpec, uid: int | None) -> None:
    """Restore a snapshot into a sandbox that was started from `spec`, but with the command `waiting(spec.command)`.

    The files count towards the sandbox's limits. If the restore fails, the sandbox is stopped.

    Raises:
        SandboxEndedError: The files cannot be written, or the sandbox has ended by itself.
        SandboxStartError: The sandbox was lost for another reason.
    """
    try:
        argv = _argv(await sandbox.read("/proc/1/cmdline", max_bytes=_COMMAND_BYTES), "unpack", uid)
        async with sandbox.program(argv, timeout_s=_TIMEOUT_S, cwd="/", user=_user(uid)) as program:
            with _open(path, "rb") as file:
                while piece := await clock.to_thread(file.read, _PIECE_BYTES):
                    await program.send(piece)
            await program.send_eof()
            reason = b""
            while (answer := await program.receive()) is not None:
                reason = (reason + answer[1])[:_REASON_BYTES]
            result = await program.result()
        if result.exit_code != 0:
            raise SandboxError(f"cannot restore the snapshot: {_reason(result.exit_code, reason)}")
        if spec.command:
            await sandbox.exec(_GO, timeout_s=spec.start_timeout_s)
    except BaseException as error:
        await sandbox.stop()
        if isinstance(error, SandboxLostError):
            raise not_ready(sandbox.id, error.cause) from None
        if isinstance(error, EnvkitError):
            raise SandboxEndedError(sandbox.id, str(error)) from None
        raise


def _argv(command: bytes, do: str, uid: int | None) -> list[str]:
    """Return the argv that runs `envkit.sandbox.snapshots.snapshot_inside` with the same Python as the agent.

    Args:
        command: Command line of the agent, whose first argument is its Python; arguments end with NUL.
        do: ``"pack"`` or ``"unpack"``.
        uid: User to switch to; None means no switch.
    """
    python = command.partition(b"\0")[0].decode(errors="surrogateescape")
    return [python, "-I", "-S", "-c", _INSIDE.read_text(), do, str(uid or 0), *ROOTS]


def _user(uid: int | None) -> SandboxUser:
    return "agent" if uid is None else "root"


async def _take(call: Call, file: BinaryIO, bound_mib: int) -> None:
    """Write the snapshot stream of a sandbox to `file`.

    Raises:
        SandboxError: The stream exceeds `bound_mib` MiB, or the snapshot process in the sandbox failed.
        OSError: The host's disk is nearly full.
    """
    waiting = bytearray()
    reason = b""
    count = 0
    while (piece := await call.receive()) is not None:
        if piece[0] == "err":
            reason = (reason + piece[1])[:_REASON_BYTES]
            continue
        count += len(piece[1])
        if count > bound_mib << 20:
            raise SandboxError(
                f"no snapshot: with their names, the files in {' and '.join(ROOTS)} have more than {bound_mib} MiB"
            )
        waiting += piece[1]
        if len(waiting) >= _PIECE_BYTES:
            await clock.to_thread(_write, file, waiting)
            waiting = bytearray()
    await clock.to_thread(_write, file, waiting)
    code = call.end and call.end.get("code")
    if code != 0:
        raise SandboxError(f"no snapshot: {_reason(code, reason)}")


def _reason(code: JSON, reason: bytes) -> str:
    """Return in one line why the snapshot process in the sandbox failed."""
    return one_line(reason.decode(errors="replace")) or f"the snapshot process inside ended with code {code}"


def _create(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dirs.require_space(path.parent)
    return _open(path, "xb")


def _write(file: BinaryIO, content: bytearray) -> None:
    run_dirs.require_space(Path(file.name).parent, len(content))
    file.write(content)


def _open(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, path.open(mode))
