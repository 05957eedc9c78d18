"""Snapshots take bounded space of the host's disk, and refused ones leave nothing behind."""

from __future__ import annotations

import io
import os
import shutil
import sys
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.errors import SandboxEndedError, SandboxError
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.host import run_dirs
from envkit.sandbox.snapshots import snapshot_inside
from envkit.types import SandboxSpec
from tests.contract.kinds import run

pytestmark = pytest.mark.bwrap

# Names of 23 bytes, of which a file has one in a snapshot.
TOUCH = "import os\nfor n in range(16_000): os.mknod('/tmp/a-file-of-no-size-%06d' % n + 200 * '.')"


async def sh(sandbox: Sandbox, command: str) -> str:
    return (await sandbox.exec(["sh", "-c", command], timeout_s=30)).stdout


def kept() -> dict[str, int]:
    """Return the disk usage in bytes of each snapshot, by name."""
    (run,) = [folder for root in run_dirs.roots() for folder in root.glob(f"{run_dirs.owner_name(os.getpid())}-*")]
    return {file.name: file.stat().st_blocks * 512 for file in run.glob("snapshots/*")}


def test_a_sparse_file_is_stored_without_its_holes_and_restored_with_them() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=8))
            await sh(
                sandbox, "truncate -s 1T hole; cp --sparse=always hole other; truncate -s 5000000 end; echo end >> end"
            )
            await sh(
                sandbox, "printf begin | dd of=hole conv=notrunc; printf far | dd of=hole conv=notrunc bs=1G seek=900"
            )
            name = await sandbox.snapshot()
            assert kept()[name] < 1 << 20
            again = await backend.restore(name, SandboxSpec(disk_mib=8))
            assert await sh(again, "stat -c %s hole other end") == "1099511627776\n1099511627776\n5000004\n"
            assert int((await sh(again, "du -sk .")).split()[0]) < 100
            assert await sh(again, "head -c 5 hole; tail -c +$((900 * 1024 * 1024 * 1024 + 1)) hole | head -c 3") == (
                "beginfar"
            )
            assert await sh(again, "tail -c 4 end") == "end\n"

    run(main)


def test_a_snapshot_is_no_larger_than_the_disk_limits_of_its_folders() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=2))
            await sh(sandbox, "head -c 2097152 /dev/urandom > /tmp/full; head -c 2000000 /dev/urandom > most")
            full = await sandbox.snapshot()
            assert kept()[full] <= 4 << 20
            await sh(sandbox, "head -c 9999999 /dev/urandom > most")
            with pytest.raises(SandboxError, match=r"no snapshot: .* /workspace and /tmp have more than 4 MiB"):
                await sandbox.snapshot()
            assert set(kept()) == {full}
            with pytest.raises(SandboxEndedError, match=r"cannot restore the snapshot: .*: No space left on device"):
                await backend.restore(full, SandboxSpec(disk_mib=1))
            assert set(kept()) == {full}

    run(main)


@pytest.mark.parametrize(("disk_mib", "fits"), [(1, False), (4, True)])
def test_the_names_of_empty_files_count_towards_the_size_limit(disk_mib: int, *, fits: bool) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=disk_mib))
            await sandbox.exec([sys.executable, "-c", TOUCH], timeout_s=30)
            if not fits:
                with pytest.raises(SandboxError, match="have more than 2 MiB"):
                    await sandbox.snapshot()
                assert kept() == {}
                return
            name = await sandbox.snapshot()
            assert kept()[name] < 8 << 20
            again = await backend.restore(name, SandboxSpec(disk_mib=disk_mib))
            assert await sh(again, "ls -f /tmp | grep -c a-file-of") == "16000\n"

    run(main)


def test_hard_links_are_restored_as_hard_links() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(disk_mib=4))
            await sh(sandbox, "head -c 3000000 /dev/urandom > one; for n in 1 2 3 4 5 6; do ln one more$n; done")
            again = await backend.restore(await sandbox.snapshot(), SandboxSpec(disk_mib=4))
            assert await sh(again, "stat -c %h one; cmp one more6 && stat -c %i one more6 | uniq | wc -l") == "7\n1\n"

    run(main)


def test_a_program_that_suspends_all_others_does_not_prevent_a_snapshot() -> None:
    stop = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = $$ ] || kill -STOP $p; done 2>/dev/null"

    async def main() -> None:
        async with LocalBackend() as backend, anyio.create_task_group() as tasks:
            sandbox = await backend.start(SandboxSpec())
            await sh(sandbox, "head -c 50000000 /dev/zero > big")
            tasks.start_soon(partial(sandbox.exec, ["sh", "-c", f"while :; do {stop}; done"], timeout_s=60))
            await anyio.sleep(0.3)
            name = await sandbox.snapshot()
            assert 50_000_000 < kept()[name] < 51_000_000
            tasks.cancel_scope.cancel()

    if os.geteuid() != 0:
        pytest.skip("all processes in the sandbox have the same user")
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
            await sh(found, "head -c 999999 /dev/urandom > one; cp one /tmp; mkdir names")
            await sh(found, "cd names; for n in $(seq 2000); do : > $(printf %0200d $n); done")
            with pytest.raises(SandboxError, match="more than 2 MiB"):
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


def packed(place: Path) -> bytes:
    pieces: list[bytes] = []
    snapshot_inside.pack([bytes(place)], pieces.append)
    return b"".join(pieces)


def test_restoring_neither_follows_links_nor_writes_outside_its_folders(tmp_path: Path) -> None:
    (tmp_path / "precious").mkdir()
    place = tmp_path / "place"
    (place / "sub").mkdir(parents=True)
    (place / "sub" / "file").write_text("new")
    whole = packed(place)
    shutil.rmtree(place / "sub")
    (place / "sub").symlink_to(tmp_path / "precious")
    snapshot_inside.unpack([bytes(place)], io.BytesIO(whole).read)
    assert (place / "sub" / "file").read_text() == "new"
    assert list((tmp_path / "precious").iterdir()) == []
    record = bytes(place / "sub")
    for other in (b"/etc", bytes(place / ".."), bytes(tmp_path / "precious")):
        moved = whole.replace(len(record).to_bytes(4, "big") + record, len(other).to_bytes(4, "big") + other)
        with pytest.raises(ValueError, match="is out of place"):
            snapshot_inside.unpack([bytes(place)], io.BytesIO(moved).read)


def test_files_that_vanish_during_a_snapshot_are_left_out(tmp_path: Path) -> None:
    place, back = tmp_path / "this", tmp_path / "that"
    for name in ("a", "b", "d"):
        (place / name).mkdir(parents=True)
    (place / "a" / "file").write_text("first")
    (place / "b" / "file").write_text("second")
    (place / "c").symlink_to("nowhere")
    (place / "e").write_text("third")
    (place / "f").hardlink_to(place / "e")
    content = bytearray()

    def write(piece: bytes) -> None:
        content.extend(piece)
        if b"first" in piece:
            shutil.rmtree(place / "b")
            for name in ("c", "e"):
                (place / name).unlink()
        if bytes(place / "d") in piece:
            (place / "d").rmdir()

    snapshot_inside.pack([bytes(place)], write)
    back.mkdir()
    snapshot_inside.unpack([bytes(back)], io.BytesIO(content.replace(bytes(place), bytes(back))).read)
    assert sorted(path.name for path in back.rglob("*")) == ["a", "d", "f", "file"]
    assert (back / "f").read_text() == "third"


def test_a_truncated_snapshot_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("content")
    whole = packed(tmp_path)
    for end in (0, 10, len(whole) - 60, len(whole) - 1):
        with pytest.raises(ValueError, match="ends early"):
            snapshot_inside.unpack([bytes(tmp_path)], io.BytesIO(whole[:end]).read)
