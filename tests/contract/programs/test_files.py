"""One promise for every kind of sandbox: files and folders go in and out as they are, and never further than that."""

from __future__ import annotations

import os
import re
import stat
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.errors import MissingFileError, RefusedFileError, TooLargeError, UnsupportedError, UsageError
from tests.contract.kinds import ALSO_REMOTE, Kind, run
from tests.contract.shared import AnySandbox, Shared, sh

ALL_BYTES = bytes(range(256))


def described(folder: Path) -> dict[str, object]:
    """Say what is below `folder`: modes, contents, and where links lead."""
    found: dict[str, object] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = str(path.readlink())
        else:
            found[name] = (stat.S_IMODE(path.lstat().st_mode), None if path.is_dir() else path.read_bytes())
    return found


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    top = tmp_path / "tree"
    (top / "deep" / "deeper").mkdir(parents=True)
    (top / "empty").mkdir(mode=0o750)
    (top / "bytes").write_bytes(ALL_BYTES * 5000)
    (top / "nothing").touch(mode=0o600)
    (top / "deep" / "run.sh").write_text("#!/bin/sh\necho ran\n")
    (top / "deep" / "run.sh").chmod(0o755)
    (top / "deep" / ("long name " * 25)).write_text("x")
    (top / "deep" / "deeper" / "up").symlink_to("../run.sh")
    (top / "\N{SNOWMAN} two words\n").write_text("unicode")
    (top / os.fsdecode(b"not \xff utf-8")).write_text("bytes")
    (top / "dangling").symlink_to("nowhere" * 20)
    return top


@ALSO_REMOTE
def test_what_is_written_is_read_again(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for content in (b"", b"\0", ALL_BYTES * 5000, b"line\r\n", b"x" * (10 << 20), b"short again"):
            await sandbox.write("file", content)
            assert await sandbox.read("file") == content
            assert await sh(sandbox, "wc -c < file") == f"{len(content)}\n"

    shared.run(main)


def test_names_are_relative_to_the_sandboxs_folder_or_absolute_and_folders_are_made(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for name in ("a", "deep/deeper/a", f"{sandbox.work}/other/a", "two words/\N{SNOWMAN}\n", "\udcff/a"):
            await sandbox.write(name, name.encode(errors="surrogateescape"))
            assert await sandbox.read(name) == name.encode(errors="surrogateescape")
        assert await sh(sandbox, f"cat {sandbox.work}/deep/deeper/a other/a") == f"deep/deeper/a{sandbox.work}/other/a"

    shared.run(main)


def test_files_lie_as_deep_as_their_names_are_long(shared: Shared, tree: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("d/" * 1500 + "file", b"deep")
        assert await sandbox.read("d/" * 1500 + "file") == b"deep"
        with pytest.raises(RefusedFileError, match="File name too long"):
            await sandbox.write("d/" * 2500 + "file", b"deeper")
        await sandbox.upload(tree, "d/" * 1500 + "tree")
        assert await sandbox.read("d/" * 1500 + "tree/bytes") == ALL_BYTES * 5000
        assert await sh(sandbox, "rm -r d; ls -A") == ""

    shared.run(main)


def test_a_file_has_the_mode_that_was_asked_for_and_belongs_to_the_agent(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("run", b"#!/bin/sh\necho ran\n", mode=0o755)
        await sandbox.write("plain", b"")
        await sandbox.write("secret", b"x", mode=0o600)
        assert await sh(sandbox, "stat -c %a run plain secret; ./run") == "755\n644\n600\nran\n"
        assert await sh(sandbox, "[ $(stat -c %u run) = $(id -u) ] && [ -O run ] && echo mine") == "mine\n"

    shared.run(main)


def test_a_file_is_replaced_as_a_whole(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("file", b"old" * 1000)
        await sh(sandbox, "ln file second; ln -s second link")
        await sandbox.write("file", b"new")
        await sandbox.write("link", b"no link")
        assert (await sandbox.read("file"), await sandbox.read("second")) == (b"new", b"old" * 1000)
        assert await sandbox.read("link") == b"no link"
        assert await sh(sandbox, "ls -A") == "file\nlink\nsecond\n"

    shared.run(main)


def test_a_write_that_is_cancelled_happens_as_a_whole_or_not_at_all_and_leaves_nothing_else(shared: Shared) -> None:
    new = b"x" * (60 << 20)

    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("file", b"old")
        for moment_s in (0.001, 0.005, 0.02):
            with anyio.move_on_after(moment_s):
                await sandbox.write("file", new)
        assert await sandbox.read("file") in (b"old", new)  # on a busy machine the cancellation may come too late
        assert await sh(sandbox, "ls -A") == "file\n"

    shared.run(main)


@ALSO_REMOTE
def test_what_cannot_be_read_is_missing(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, "mkdir folder; mkfifo pipe; ln -s loop loop; ln -s nowhere dangling; echo x > file")
        for name in ("nothing", "folder", "pipe", "loop", "dangling", "file/x", "/dev/zero", ""):
            with pytest.raises(MissingFileError, match=re.escape(name) or None):
                await sandbox.read(name)
        with pytest.raises(MissingFileError):
            await sandbox.read("x" * 5000)

    shared.run(main)


def test_what_is_too_large_is_not_read(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("file", b"x" * 1000)
        assert len(await sandbox.read("file", max_bytes=1000)) == 1000
        with pytest.raises(TooLargeError):
            await sandbox.read("file", max_bytes=999)
        with pytest.raises(TooLargeError):  # the kernel says that it has no size
            await sandbox.read("/proc/cpuinfo", max_bytes=10)
        assert await sandbox.read("/proc/self/comm", max_bytes=100)

    shared.run(main)


@ALSO_REMOTE
def test_what_cannot_be_written_is_refused(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("file", b"x")
        await sh(sandbox, "mkdir folder")
        for name in ("folder", "folder/", "file/inner", "/proc/x", ""):
            with pytest.raises(RefusedFileError, match=re.escape(name) or None):
                await sandbox.write(name, b"y")
        assert await sh(sandbox, "ls -A; cat file") == "file\nfolder\nx"

    shared.run(main)


@ALSO_REMOTE
def test_a_folder_goes_in_and_out_as_it_is(shared: Shared, tree: Path, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.upload(tree, "new/place")
        assert await sh(sandbox, "cd new/place && ./deep/deeper/up && find . -printf x") == f"ran\n{'x' * 12}"
        assert await sh(sandbox, "find new -not -user $(id -u) | wc -l") == "0\n"
        await sh(sandbox, "echo more > new/place/more; mkdir new/place/inner; rm new/place/nothing")
        await sandbox.download("new/place", tmp_path / "copy")
        (tree / "more").write_text("more\n")
        (tree / "inner").mkdir()
        (tree / "nothing").unlink()
        assert described(tmp_path / "copy") == described(tree)

    shared.run(main)


def test_a_file_goes_in_and_out_under_a_new_name(shared: Shared, tree: Path, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.upload(tree / "bytes", "deep/new")
        await sandbox.upload(tree / "deep" / "run.sh", "run")
        assert await sandbox.read("deep/new") == ALL_BYTES * 5000
        assert await sh(sandbox, "./run") == "ran\n"
        await sandbox.download("deep/new", tmp_path / "copy")
        assert (tmp_path / "copy").read_bytes() == ALL_BYTES * 5000

    shared.run(main)


def test_a_source_that_is_missing_or_special_does_not_go_in(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        (tmp_path / "tree").mkdir()
        os.mkfifo(tmp_path / "tree" / "pipe")
        with pytest.raises(UsageError, match="nothing: No such file"):
            await sandbox.upload(tmp_path / "nothing", "x")
        with pytest.raises(UsageError, match="pipe is neither file, folder nor link"):
            await sandbox.upload(tmp_path / "tree", "x")
        assert await sh(sandbox, "echo on") == "on\n"

    shared.run(main)


def test_a_folder_does_not_go_where_nothing_can_be_written(shared: Shared, tree: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("file", b"x")
        for target in ("file", "file/inner", "/proc/x"):
            with pytest.raises(RefusedFileError, match=re.escape(target)):
                await sandbox.upload(tree, target)

    shared.run(main)


def test_a_link_that_leads_out_does_not_come_out_and_leaves_nothing(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for make, reported in (
            ("ln -s /etc/passwd bad", "'bad' is a link to '/etc/passwd'"),
            ("ln -s ../x bad", "'bad' is a link to '../x'"),
            ("mkdir d; ln -s d/../../x bad", "'bad' is a link to 'd/../../x'"),
        ):
            await sh(sandbox, f"rm -rf tree; mkdir tree; cd tree; echo x > good; {make}")
            with pytest.raises(RefusedFileError) as caught:
                await sandbox.download("tree", tmp_path / "copy")
            assert reported in str(caught.value)
            assert names(tmp_path) == []
            assert await sh(sandbox, "echo on") == "on\n"

    shared.run(main)


def test_rights_that_a_file_gives_away_stay_inside(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, "mkdir tree; touch tree/x; chmod 6777 tree/x; mkfifo tree/pipe")
        await sandbox.download("tree", tmp_path / "copy")
        assert described(tmp_path / "copy") == {"x": (0o777, b"")}

    shared.run(main)


def test_a_folder_that_is_too_large_does_not_come_out_and_leaves_nothing(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, "mkdir tree; head -c 600 /dev/zero > tree/a; cp tree/a tree/b")
        with pytest.raises(TooLargeError):
            await sandbox.download("tree", tmp_path / "copy", max_bytes=1199)
        assert names(tmp_path) == []
        await sandbox.download("tree", tmp_path / "copy", max_bytes=1200)
        await sh(sandbox, "truncate -s 100G tree/huge")
        with pytest.raises(TooLargeError):
            await sandbox.download("tree", tmp_path / "other")
        assert names(tmp_path) == ["copy"]

    shared.run(main)


def test_what_is_missing_does_not_come_out(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        with pytest.raises(MissingFileError):
            await sandbox.download("nothing", tmp_path / "copy")
        assert names(tmp_path) == []
        await sandbox.write("file", b"x")
        (tmp_path / "copy").touch()
        with pytest.raises(UsageError, match="copy exists already"):
            await sandbox.download("file", tmp_path / "copy")
        with pytest.raises(UsageError, match="missing: No such file"):
            await sandbox.download("file", tmp_path / "missing" / "copy")

    shared.run(main)


def test_a_copy_that_is_cancelled_leaves_nothing_and_the_sandbox_goes_on(shared: Shared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, "mkdir tree; head -c 60000000 /dev/zero > tree/a")
        with anyio.move_on_after(0.02) as limit:
            await sandbox.download("tree", tmp_path / "copy")
        assert limit.cancelled_caught
        assert names(tmp_path) == []
        assert await sh(sandbox, "echo on") == "on\n"

    shared.run(main)


@ALSO_REMOTE
def test_a_restored_sandbox_has_its_files_or_the_backend_refuses(kind: Kind) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec())
            await sh(sandbox, "mkdir -p deep; echo x > deep/file; chmod 700 deep/file; ln -s /usr/bin/env deep/link")
            try:
                name = await sandbox.snapshot()
            except UnsupportedError:
                assert kind.name == "process"
                return
            await sh(sandbox, "echo later > deep/file; rm deep/link")
            await sandbox.stop()
            again = await backend.restore(name, kind.spec("sh", "-c", "cat deep/file > found; sleep 1000"))
            assert (
                await sh(again, "stat -c %a deep/file; cat deep/file; readlink deep/link") == "700\nx\n/usr/bin/env\n"
            )
            assert await sh(again, "until [ -s found ]; do sleep 0.01; done; cat found") == "x\n"

    run(main)


def test_a_program_that_stops_all_that_it_may_holds_back_no_folder(kind: Kind, tmp_path: Path) -> None:
    kind.require("uid")  # otherwise, it would also stop the agent, and without a sandbox whatever else this user runs
    stop = "for p in /proc/[0-9]*; do p=${p#/proc/}; [ $p = $$ ] || kill -STOP $p; done 2>/dev/null"

    async def main() -> None:
        async with kind.sandbox() as sandbox, anyio.create_task_group() as tasks:
            await sandbox.exec(["sh", "-c", "head -c 50000000 /dev/zero >big"], timeout_s=20)
            tasks.start_soon(partial(sandbox.exec, ["sh", "-c", f"while :; do {stop}; done"], timeout_s=60))
            await anyio.sleep(0.3)
            await sandbox.download("/workspace", tmp_path / "out")
            assert (tmp_path / "out" / "big").stat().st_size == 50_000_000
            tasks.cancel_scope.cancel()

    run(main)
