"""Take and restore snapshots: each is a folder on the host, with a tar archive of each writable folder of a sandbox.

A snapshot contains names, modes, times and contents of files, as far as the agent's user may read them, but no
processes. Sparse files take their full size, and hard links become copies. The agent packs and unpacks the archives
(`envkit.sandbox.agent.files.tar`). The size of a snapshot is limited, because an untrusted sandbox could otherwise fill
the host's disk.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import BinaryIO

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxError, SandboxLostError
from envkit.types import SandboxSpec

from ..agent_client.channel import AgentChannel, ChannelEndedError, RefusedCallError
from ..agent_client.sandbox import AgentSandbox
from ..host import run_dirs
from ..host.instances import not_ready

ROOTS = ("/workspace", "/tmp")
_PIECE_BYTES = 1 << 20
"""Number of bytes written between two checks of the free disk space."""
_HEADERS_MIB = 32
"""Limit on the names of the files in one folder, which take at most 1.5 KiB each."""
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


def find(parent: Path, name: str) -> Path | None:
    """Return the folder of snapshot `name` in `parent`; None if it does not exist."""
    folder = parent / name
    return folder if _NAME.fullmatch(name) and folder.is_dir() else None


def size(parent: Path, name: str) -> int:
    """Return the size in bytes of snapshot `name` in `parent`; 0 if it does not exist."""
    folder = find(parent, name)
    return 0 if folder is None else sum(file.stat().st_size for file in folder.iterdir())


def remove(parent: Path, name: str) -> None:
    """Remove snapshot `name` from `parent`, if it exists."""
    if (folder := find(parent, name)) is not None:
        shutil.rmtree(folder, ignore_errors=True)


async def keep(channel: AgentChannel, folder: Path, disk_mib: int) -> None:
    """Save a sandbox's writable folders in the new folder `folder`. If an archive fails, remove `folder`.

    Args:
        channel: Channel to the sandbox's agent.
        folder: The folder of the snapshot.
        disk_mib: Disk limit of each writable folder in MiB. An archive with a larger content is refused.

    Raises:
        SandboxError: A writable folder has too many bytes, a file cannot be read, or the host's disk is nearly full.
        ChannelEndedError: The sandbox has ended.
    """
    try:
        await clock.to_thread(_create, folder)
        for root in ROOTS:
            with (folder / _file_name(root)).open("xb") as file:
                await _pack(channel, root, file, disk_mib)
    except BaseException as error:
        with anyio.CancelScope(shield=True), suppress(OSError):
            await clock.to_thread(shutil.rmtree, folder, ignore_errors=True)
        if isinstance(error, RefusedCallError) and error.code == "too_large":
            raise SandboxError(
                f"no snapshot: the files in {root} have more than {disk_mib} MiB (sparse files count in full)"
            ) from None
        if isinstance(error, (RefusedCallError, OSError)) and not isinstance(error, ChannelEndedError):
            raise SandboxError(f"no snapshot: {error}") from error
        raise


def waiting(command: Sequence[str]) -> tuple[str, ...]:
    """Return an argv that waits until `restore` has restored the files, then runs `command`; () without a command."""
    return (*_WAIT, *command) if command else ()


async def restore(sandbox: AgentSandbox, folder: Path, spec: SandboxSpec) -> None:
    """Restore a snapshot into a sandbox that was started from `spec`, but with the command `waiting(spec.command)`.

    The files count towards the sandbox's limits. If the restore fails, the sandbox is stopped.

    Raises:
        SandboxEndedError: The files cannot be written, or the sandbox has ended by itself.
        SandboxStartError: The sandbox was lost for another reason.
    """
    try:
        for root in ROOTS:
            with (folder / _file_name(root)).open("rb") as file:
                await sandbox.call("unpack", feed=_pieces(file), path=root, user="agent")
        if spec.command:
            await sandbox.exec(_GO, timeout_s=spec.start_timeout_s)
    except BaseException as error:
        await sandbox.stop()
        if isinstance(error, SandboxLostError):
            raise not_ready(sandbox.id, error.cause) from None
        if isinstance(error, EnvkitError):
            raise SandboxEndedError(sandbox.id, f"cannot restore the snapshot: {error}") from None
        raise


async def _pack(channel: AgentChannel, root: str, file: BinaryIO, disk_mib: int) -> None:
    """Write the archive of the folder `root` to `file`.

    Raises:
        RefusedCallError: The archive is too large, or a file cannot be read.
        OSError: The host's disk is nearly full.
    """
    bound = disk_mib + _HEADERS_MIB << 20
    call = await channel.start("pack", path=root, max_bytes=bound, user="agent", skips_unreadable=True)
    waiting = bytearray()
    try:
        while (piece := await call.receive()) is not None:
            waiting += piece[1]
            if len(waiting) >= _PIECE_BYTES:
                await clock.to_thread(_write, file, waiting)
                waiting = bytearray()
    finally:
        await call.leave()
    await clock.to_thread(_write, file, waiting)


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await clock.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _file_name(root: str) -> str:
    return f"{root.strip('/')}.tar"


def _create(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    run_dirs.require_space(folder)


def _write(file: BinaryIO, content: bytearray) -> None:
    run_dirs.require_space(Path(file.name).parent, len(content))
    file.write(content)
