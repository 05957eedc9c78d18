"""Snapshots of sandboxes whose files are not on the host: the contents of the writable folders, in one file.

A snapshot has names, modes, times and contents as the agent user sees them, without processes and without files that
only a grader may read. `envkit.sandbox.snapshots.snapshot_inside` creates it inside and documents the format. The
sandbox is not trusted: the size of the file on the host is limited, so that no program can fill the host's disk with
a snapshot, neither with large sparse files nor with many files.
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
"""Bytes written between two checks of free disk space."""
_REASON_BYTES = 4096
_COMMAND_BYTES = 1 << 20
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


@dataclass(frozen=True, slots=True)
class Extent:
    """The limits and owner of a snapshot.

    Attributes:
        disk_mib: Disk limit of each folder; a snapshot may have the sum of them.
        uid: Owner of the files, if the sandbox has several users; its root switches to that user.
    """

    disk_mib: int
    uid: int | None


def find(parent: Path, name: str) -> Path | None:
    """Return the file of snapshot `name` in `parent`; None if it does not exist."""
    file = parent / name
    return file if _NAME.fullmatch(name) and file.is_file() else None


def size(parent: Path, name: str) -> int:
    """Return the bytes of snapshot `name` in `parent`; 0 if it does not exist."""
    file = find(parent, name)
    return 0 if file is None else file.stat().st_size


def remove(parent: Path, name: str) -> None:
    """Remove snapshot `name` from `parent`; safe to repeat."""
    if (file := find(parent, name)) is not None:
        file.unlink(missing_ok=True)


async def keep(channel: AgentChannel, path: Path, extent: Extent) -> None:
    """Save the writable folders of a sandbox to the new file `path`, creating its folder; nothing is left on failure.

    Raises:
        SandboxError: The snapshot exceeds `extent`, a file cannot be read, or the host's disk is nearly full.
        ChannelEndedError: The sandbox is gone.
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
    """Return an argv that runs `command` after `put_back` has restored the files; empty without a command."""
    return (*_WAIT, *command) if command else ()


async def restore(sandbox: AgentSandbox, path: Path, spec: SandboxSpec, uid: int | None) -> None:
    """Restore a snapshot into a sandbox that was started from `spec` with its command `waiting`.

    It uses no disk space on the host; the sandbox's own limits apply.

    Raises:
        SandboxEndedError: The files cannot be written, or the sandbox has ended by itself; the sandbox is stopped.
        SandboxStartError: The sandbox is gone for another reason.
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
    """Return the argv of `envkit.sandbox.snapshots.snapshot_inside` with the agent's Python.

    Args:
        command: The agent's command line, NUL-separated.
        do: ``pack`` or ``unpack``.
        uid: The user to switch to; None for no switch.
    """
    python = command.partition(b"\0")[0].decode(errors="surrogateescape")
    return [python, "-I", "-S", "-c", _INSIDE.read_text(), do, str(uid or 0), *ROOTS]


def _user(uid: int | None) -> SandboxUser:
    return "agent" if uid is None else "root"


async def _take(call: Call, file: BinaryIO, bound_mib: int) -> None:
    """Write the snapshot stream of a sandbox.

    Raises:
        SandboxError: It exceeds `bound_mib`, or failed inside.
        OSError: The disk is nearly full.
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
    """Return in one line why the process inside failed."""
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
