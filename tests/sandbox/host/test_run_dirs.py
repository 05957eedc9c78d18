"""Folders of sandboxes: private, and cleared away when their owner is gone."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.runs import owners
from envkit.sandbox.host import run_dirs


@pytest.fixture
def folder() -> Iterator[Path]:
    made = run_dirs.new_run_folder()
    yield made
    run_dirs.remove(made)


def renamed(folder: Path, *, namespace: str | None = None, pid: int | None = None, start: int | None = None) -> Path:
    """Make a folder like `folder` that names another owner."""
    _, old_namespace, old_pid, old_start, rest = folder.name.split("-", 4)
    owner = (namespace or old_namespace, pid or old_pid, old_start if start is None else start)
    other = folder.with_name("-".join(["envkit", *map(str, owner), rest]))
    other.mkdir(mode=0o700)
    return other


def test_the_path_of_a_socket_in_it_is_short_enough_for_the_kernel(folder: Path) -> None:
    assert len(str(folder / "process-123456" / "s" / "env.sock")) < 104


def test_a_folder_of_a_living_process_is_private_and_kept(folder: Path) -> None:
    assert folder.stat().st_mode & 0o777 == 0o700
    assert folder not in run_dirs.reap()
    assert folder.exists()


def test_a_folder_whose_owner_is_gone_is_removed(folder: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", ""]) as process:
        pass
    orphan = renamed(folder, pid=process.pid)
    (orphan / "sandbox-1").mkdir()
    assert orphan in run_dirs.reap()
    assert not orphan.exists()


def test_an_owner_whose_end_nobody_took_note_of_is_gone() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        name = owners.owner_name(process.pid)
        assert not owners.is_owner_gone(name)
        assert not owners.is_owner_gone(f"{name}-more")
        process.kill()
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        assert owners.is_owner_gone(name)
        assert owners.is_owner_gone(f"{name}-more")
        assert not owners.is_owner_gone("envkit-of-somebody-else")


def test_a_number_that_another_process_has_now_does_not_keep_a_folder(folder: Path) -> None:
    orphan = renamed(folder, start=1)
    assert orphan in run_dirs.reap()


def test_a_folder_that_belongs_to_another_process_goes_with_that_one() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        made = run_dirs.new_run_folder(process.pid)
        assert made not in run_dirs.reap()
        assert list(run_dirs.of_tail(made.name.rpartition("-")[2])) == [made]
    assert made in run_dirs.reap()


def test_a_folder_of_another_pid_namespace_is_kept(folder: Path) -> None:
    foreign = renamed(folder, namespace="4026500000", start=1)
    try:
        assert foreign not in run_dirs.reap()
        assert foreign.exists()
    finally:
        foreign.rmdir()


def test_a_link_with_such_a_name_is_left_alone(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    link = folder.with_name(renamed(folder, start=1).name + "x")
    link.symlink_to(tmp_path)
    try:
        assert link not in run_dirs.reap()
        assert (tmp_path / "precious").exists()
    finally:
        link.unlink()


def test_removing_follows_no_link_and_is_not_stopped_by_closed_folders(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "precious").touch()
    inner = folder / "closed" / "deeper"
    inner.mkdir(parents=True)
    (inner / "file").touch()
    (inner / "link").symlink_to(tmp_path)
    inner.chmod(0)
    inner.parent.chmod(0)
    run_dirs.remove(folder)
    assert not folder.exists()
    assert (tmp_path / "precious").exists()


def test_a_folder_of_any_depth_is_removed(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY)
    for _ in range(2000):
        os.mkdir("d", dir_fd=handle)
        inner = os.open("d", os.O_RDONLY, dir_fd=handle)
        os.close(handle)
        handle = inner
    os.close(handle)
    run_dirs.remove(folder)
    assert not folder.exists()
