"""Take and restore snapshots. A snapshot is a folder of the host with a tar archive of each writable sandbox folder.

A snapshot contains the names, modes, times and contents of the files that the agent user may read, but no processes.
Sparse files take their full size, and hard links become copies. The agent packs and unpacks the archives inside the
sandbox (`envkit.sandbox.agent.files.tar`). The size of a snapshot is limited, because an untrusted sandbox could
otherwise fill the host's disk.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, suppress
from pathlib import Path
from typing import BinaryIO

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxError, SandboxLostError, TooLargeError
from envkit.types import SandboxSpec

from ..agent_client.sandbox import AgentSandbox
from ..host import run_dirs
from ..host.instances import LiveSandboxes, not_ready
from ..transfer import tar_stream

ROOTS = ("/workspace", "/tmp")
_PIECE_BYTES = 1 << 20
_HEADERS_MIB = 32
"""MiB by which an archive may exceed the disk limit, because the archive has a header of up to 1.5 KiB per file."""
_GO_AHEAD = "/run/envkit/.go-ahead"
_WAIT = ("sh", "-c", 'mkfifo "$0" && read -r go < "$0" && rm "$0" && exec "$@"', _GO_AHEAD)
_GO = ("sh", "-c", 'until [ -p "$0" ]; do sleep 0.01; done; echo go > "$0"', _GO_AHEAD)
_NAME = re.compile(r"[a-z0-9-]{1,80}")


class SnapshotStore:
    """The snapshots of one backend, in the backend's run directory."""

    def __init__(self, sandboxes: LiveSandboxes) -> None:
        self._sandboxes = sandboxes
        self._taken = 0

    def find(self, name: str) -> Path | None:
        """Return the folder of snapshot `name`; None if it does not exist."""
        folder = self._sandboxes.folder / "snapshots" / name
        return folder if _NAME.fullmatch(name) and folder.is_dir() else None

    async def size(self, name: str) -> int:
        """Return the size of snapshot `name` in bytes; 0 if it does not exist."""
        folder = self.find(name)
        return 0 if folder is None else await clock.to_thread(_size, folder)

    async def remove(self, name: str) -> None:
        """Remove snapshot `name`, if it exists."""
        if (folder := self.find(name)) is not None:
            await clock.to_thread(shutil.rmtree, folder, ignore_errors=True)

    async def take(self, sandbox: AgentSandbox, disk_mib: int) -> str:
        """Save a sandbox's writable folders, and return the name of the snapshot. After an error, no files are left.

        Args:
            sandbox: The sandbox.
            disk_mib: Disk limit of each writable folder in MiB. If a folder contains more, the snapshot fails.

        Raises:
            SandboxError: A writable folder exceeds `disk_mib`, reading a file fails, or the host's disk is nearly full.
            SandboxLostError: The sandbox has ended.
        """
        self._taken += 1
        folder = self._sandboxes.folder / "snapshots" / f"snapshot-{self._taken}"
        try:
            await clock.to_thread(_create, folder)
            for root in ROOTS:
                with (folder / _file_name(root)).open("xb") as file:
                    packed = sandbox.packed(root, disk_mib + _HEADERS_MIB << 20)
                    async with aclosing(packed) as pieces:
                        async for piece in tar_stream.joined(pieces):
                            await clock.to_thread(_write, file, piece)
        except BaseException as error:
            with anyio.CancelScope(shield=True), suppress(OSError):
                await clock.to_thread(shutil.rmtree, folder, ignore_errors=True)
            if isinstance(error, TooLargeError):
                raise SandboxError(
                    f"no snapshot: the files in {root} have more than {disk_mib} MiB (sparse files count in full)"
                ) from None
            if isinstance(error, (SandboxError, OSError)) and not isinstance(error, SandboxLostError):
                raise SandboxError(f"no snapshot: {error}") from error
            raise
        return folder.name


def waiting(command: Sequence[str]) -> tuple[str, ...]:
    """Return an argv that runs `command` once `restore` has written the files; empty if `command` is empty."""
    return (*_WAIT, *command) if command else ()


async def restore(sandbox: AgentSandbox, folder: Path, spec: SandboxSpec) -> None:
    """Restore the snapshot in `folder` into a new sandbox, which must run the command `waiting(spec.command)`.

    The files count towards the sandbox's limits. If the restore fails, the sandbox is stopped.

    Raises:
        SandboxEndedError: The files cannot be written, or the sandbox ended by itself before it was ready.
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


async def _pieces(file: BinaryIO) -> AsyncIterator[bytes]:
    while piece := await clock.to_thread(file.read, _PIECE_BYTES):
        yield piece


def _file_name(root: str) -> str:
    return f"{root.strip('/')}.tar"


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _create(folder: Path) -> None:
    folder.mkdir(parents=True, mode=0o700)
    run_dirs.require_space(folder)


def _write(file: BinaryIO, content: bytes) -> None:
    run_dirs.require_space(Path(file.name).parent, len(content))
    file.write(content)
