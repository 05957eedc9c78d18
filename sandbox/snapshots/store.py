"""Snapshots of boxes whose files are nowhere on the host: what lies in the places that can be written, in one file.

It holds names, modes, times and contents as the agent's user sees them; processes, and what only a grader may read, are
not in it. What it looks like is in `envkit.sandbox.snapshots.snapshot_inside`, which makes it inside. That is not
believed: what counts is what is written here, which has a bound. So no program can fill the host's disk by way of a
snapshot, neither with files that claim a size nor with many of them.
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

PLACES = ("/workspace", "/tmp")
_INSIDE = Path(__file__).with_name("snapshot_inside.py")
_TIMEOUT_S = 600.0
_PIECE_BYTES = 1 << 20
"""How much is written between two looks at how much is free."""
_REASON_BYTES = 4096
_COMMAND_BYTES = 1 << 20
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


@dataclass(frozen=True, slots=True)
class Extent:
    """What of a box is kept.

    Attributes:
        disk_mib: What each of its places may hold; a snapshot is at most as large as all of them together.
        uid: Whose files they are, where the box has more than one user; the box's root becomes that user.
    """

    disk_mib: int
    uid: int | None


def find(parent: Path, name: str) -> Path | None:
    """Return the file of snapshot `name` in `parent`; None if there is none."""
    file = parent / name
    return file if _NAME.fullmatch(name) and file.is_file() else None


def size(parent: Path, name: str) -> int:
    """Return the bytes of snapshot `name` in `parent`; 0 if there is none."""
    file = find(parent, name)
    return 0 if file is None else file.stat().st_size


def remove(parent: Path, name: str) -> None:
    """Remove snapshot `name` from `parent`; safe to repeat."""
    if (file := find(parent, name)) is not None:
        file.unlink(missing_ok=True)


async def keep(channel: AgentChannel, path: Path, extent: Extent) -> None:
    """Write what is in the places of a box into the new file `path`; its folder is made. Nothing is left on failure.

    Raises:
        SandboxError: It is larger than `extent` allows, something cannot be read, or the host's disk is nearly full.
        ChannelEndedError: The box is gone.
    """
    try:
        file = await clock.to_thread(_made, path)
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
                await _take(call, file, extent.disk_mib * len(PLACES))
            finally:
                await call.leave()
    except BaseException as error:
        with anyio.CancelScope(shield=True), suppress(OSError):
            await clock.to_thread(path.unlink, missing_ok=True)
        if isinstance(error, (RefusedCallError, OSError)) and not isinstance(error, ChannelEndedError):
            raise SandboxError(f"no snapshot: {error}") from error
        raise


def waiting(command: Sequence[str]) -> tuple[str, ...]:
    """Return what runs `command` once `put_back` has put the files back; nothing for no command."""
    return (*_WAIT, *command) if command else ()


async def put_back(box: AgentSandbox, path: Path, spec: SandboxSpec, uid: int | None) -> None:
    """Write into the places of a box that was started as `spec`, its command `waiting`, what `keep` wrote.

    It takes nothing of the host's disk, and of the box's what its own bounds allow.

    Raises:
        SandboxEndedError: They cannot be written, or the box has ended by itself; the box is stopped.
        SandboxStartError: The box is gone otherwise.
    """
    try:
        argv = _argv(await box.read("/proc/1/cmdline", max_bytes=_COMMAND_BYTES), "unpack", uid)
        async with box.program(argv, timeout_s=_TIMEOUT_S, cwd="/", user=_user(uid)) as program:
            with _opened(path, "rb") as file:
                while piece := await clock.to_thread(file.read, _PIECE_BYTES):
                    await program.send(piece)
            await program.send_eof()
            reason = b""
            while (answer := await program.receive()) is not None:
                reason = (reason + answer[1])[:_REASON_BYTES]
            result = await program.result()
        if result.exit_code != 0:
            raise SandboxError(f"the snapshot cannot be put back: {_why(result.exit_code, reason)}")
        if spec.command:
            await box.exec(_GO, timeout_s=spec.start_timeout_s)
    except BaseException as error:
        await box.stop()
        if isinstance(error, SandboxLostError):
            raise not_ready(box.id, error.cause) from None
        if isinstance(error, EnvkitError):
            raise SandboxEndedError(box.id, str(error)) from None
        raise


def _argv(command: bytes, do: str, uid: int | None) -> list[str]:
    """Return what runs `envkit.sandbox.snapshots.snapshot_inside`, by the Python that the agent runs on.

    Args:
        command: What started the agent.
        do: ``pack`` or ``unpack``.
        uid: Whom to become.
    """
    python = command.partition(b"\0")[0].decode(errors="surrogateescape")
    return [python, "-I", "-S", "-c", _INSIDE.read_text(), do, str(uid or 0), *PLACES]


def _user(uid: int | None) -> SandboxUser:
    return "agent" if uid is None else "root"


async def _take(call: Call, file: BinaryIO, bound_mib: int) -> None:
    """Write what a box says about its files.

    Raises:
        SandboxError: There is more than `bound_mib`, or something went wrong in the box.
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
                f"no snapshot: with their names, the files in {' and '.join(PLACES)} have more than {bound_mib} MiB"
            )
        waiting += piece[1]
        if len(waiting) >= _PIECE_BYTES:
            await clock.to_thread(_write, file, waiting)
            waiting = bytearray()
    await clock.to_thread(_write, file, waiting)
    code = call.end and call.end.get("code")
    if code != 0:
        raise SandboxError(f"no snapshot: {_why(code, reason)}")


def _why(code: JSON, reason: bytes) -> str:
    """Say in one line why what ran inside has failed."""
    return one_line(reason.decode(errors="replace")) or f"what moves the files inside ended with {code}"


def _made(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    run_dirs.require_space(path.parent)
    return _opened(path, "xb")


def _write(file: BinaryIO, content: bytearray) -> None:
    run_dirs.require_space(Path(file.name).parent, len(content))
    file.write(content)


def _opened(path: Path, mode: str) -> BinaryIO:
    return cast(BinaryIO, path.open(mode))
