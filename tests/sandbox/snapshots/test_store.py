"""Snapshots take bounded space of the host's disk, and refused ones leave nothing behind."""

from __future__ import annotations

import os
import shutil
import sys
from pathlib import Path

import anyio
import pytest

from envkit.errors import SandboxEndedError, SandboxError
from envkit.protocols import Sandbox
from envkit.runs import owners
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host import run_dirs
from envkit.types import SandboxSpec
from tests.contract.kinds import run

pytestmark = pytest.mark.bwrap

# Names of 23 bytes, of which a file has one in a snapshot.
TOUCH = "import os\nfor n in range(16_000): os.mknod('/tmp/a-file-of-no-size-%06d' % n + 200 * '.')"


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(["sh", "-c", command], timeout_s=30)).stdout


def kept() -> dict[str, int]:
    """Return the disk usage in bytes of each snapshot, by name."""
    own = [folder for root in run_dirs.roots() for folder in root.glob(f"{owners.owner_name(os.getpid())}-*")]
    run = max(own, key=lambda folder: folder.stat().st_mtime)  # an earlier test of this process may have left one
    folders = run.glob("snapshots/*")
    return {folder.name: sum(file.stat().st_blocks * 512 for file in folder.iterdir()) for folder in folders}


def test_a_sparse_file_counts_with_its_full_size() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=2))
            await sh(sandbox, "truncate -s 1T hole")
            message = "no snapshot: the files in /workspace have more than 2 MiB .sparse files count in full."
            with pytest.raises(SandboxError, match=message):
                await sandbox.snapshot()
            assert kept() == {}
            await sh(sandbox, "truncate -s 1M hole; echo end >> hole")
            again = await backend.restore(await sandbox.snapshot(), SandboxSpec(disk_mib=2))
            assert await sh(again, "stat -c %s hole; tail -c 4 hole") == "1048580\nend\n"

    run(main)


def test_a_snapshot_that_does_not_fit_is_not_restored() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=2))
            await sh(sandbox, "head -c 2097152 /dev/urandom > /tmp/full; head -c 2000000 /dev/urandom > most")
            full = await sandbox.snapshot()
            assert 4_000_000 < kept()[full] < 5 << 20
            with pytest.raises(SandboxEndedError, match=r"cannot restore the snapshot: .*No space left on device"):
                await backend.restore(full, SandboxSpec(disk_mib=1))
            assert set(kept()) == {full}

    run(main)


def test_many_empty_files_are_restored() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=4))
            await sandbox.exec([sys.executable, "-c", TOUCH], timeout_s=30)
            name = await sandbox.snapshot()
            assert kept()[name] < 32 << 20
            again = await backend.restore(name, SandboxSpec(disk_mib=4))
            assert await sh(again, "ls -f /tmp | grep -c a-file-of") == "16000\n"

    run(main)


def test_hard_links_become_copies() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=4))
            await sh(sandbox, "echo one > one; ln one more; ln -s one link")
            again = await backend.restore(await sandbox.snapshot(), SandboxSpec(disk_mib=4))
            assert await sh(again, "stat -c %h one; cat more link") == "1\none\none\n"

    run(main)


def test_a_cancelled_snapshot_leaves_nothing() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec())
            await sh(sandbox, "head -c 90000000 /dev/zero > big")
            with anyio.move_on_after(0.06) as limit:
                await sandbox.snapshot()
            assert limit.cancelled_caught
            assert kept() == {}
            assert await sh(sandbox, "echo on") == "on\n"

    run(main)


def test_a_detached_sandbox_keeps_its_disk_limit_after_attach() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(detached=True, ttl_s=60, disk_mib=1))
        async with LocalBackend() as other:
            found = await other.attach(sandbox.id)
            await sh(found, "truncate -s 900M one")
            with pytest.raises(SandboxError, match="more than 1 MiB"):
                await found.snapshot()
            await found.stop()

    if os.geteuid() != 0:
        pytest.skip("only root can protect the agent's socket")
    run(main)


def test_a_snapshot_that_would_fill_the_disk_of_the_host_is_not_written(tmp_path: Path) -> None:
    free_bytes = shutil.disk_usage(tmp_path).free
    run_dirs.require_space(tmp_path, free_bytes // 2 - (run_dirs.LEAST_FREE_MIB << 20))
    with pytest.raises(OSError, match=r"only 0 MiB would be free \(minimum 512\)"):
        run_dirs.require_space(tmp_path, 2 * free_bytes)
