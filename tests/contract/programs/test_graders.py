"""One promise for every kind of sandbox: a grader's files are its own, or the shared user is reported."""

from __future__ import annotations

import shlex
import stat
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.errors import MissingFileError, RefusedFileError, UnsupportedError
from tests.contract.kinds import ISOLATING, Kind, run, until
from tests.contract.shared import AnySandbox, Shared, sh

# For the given time, tries everything that could make a grader run or reveal something; prints what succeeded.
TRY_ALL = """
import os, sys, time
home, own = sys.argv[1], "/tmp/own"
script = home + "/deep/grade.sh"
open(own, "w").write("echo passed")

def by_processes():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        for place in ("cwd/deep/grade.sh", "cwd/grade.sh", "root" + script, "fd/255", "mem"):
            try:
                if "echo failed" in open("/proc/%s/%s" % (pid, place)).read(100):
                    return
            except (OSError, UnicodeDecodeError):
                pass
    raise PermissionError

def kill_a_grader():
    for pid in filter(str.isdigit, os.listdir("/proc")):
        if os.stat("/proc/" + pid).st_uid == 1001:
            return os.kill(int(pid), 9)
    raise ProcessLookupError

deeds = {
    "read": lambda: open(script).read(),
    "list": lambda: os.listdir(home),
    "write": lambda: open(script, "w"),
    "replace": lambda: os.replace(own, script),
    "replace the folder": lambda: os.rename("/tmp", home + "/deep"),
    "make": lambda: os.symlink(own, script + ".new"),
    "make a folder": lambda: os.mkdir(home + "/other"),
    "take away": lambda: os.rename(script, "/tmp/away"),
    "take the folder away": lambda: os.rename(home + "/deep", "/tmp/away"),
    "take the home away": lambda: os.rename(home, "/tmp/away"),
    "remove": lambda: os.unlink(script),
    "remove the home": lambda: os.rmdir(home),
    "put a link in its place": lambda: os.symlink("/tmp", home),
    "link": lambda: os.link(script, "/tmp/linked"),
    "open": lambda: os.chmod(home, 0o777),
    "open the script": lambda: os.chmod(script, 0o666),
    "enter": lambda: os.chdir(home),
    "by processes": by_processes,
    "kill": kill_a_grader,
    "overwrite its result": lambda: open("/tmp/grading/result", "w"),
    "rename its folder": lambda: os.rename("/tmp/grading", "/tmp/mine"),
}
done, rounds, end = set(), 0, time.monotonic() + float(sys.argv[2])
while time.monotonic() < end or rounds <= 10:
    rounds += 1
    for name, deed in deeds.items():
        try:
            deed()
            done.add(name)
        except OSError:
            pass
    time.sleep(0.001)
print(sorted(done))
"""


@pytest.fixture
def tests(tmp_path: Path) -> Path:
    """A folder as a grader's tests come in."""
    top = tmp_path / "tests"
    (top / "inner").mkdir(parents=True)
    (top / "run.sh").write_text("cat inner/key")
    (top / "run.sh").chmod(0o755)
    (top / "inner" / "key").write_text("42")
    return top


@ISOLATING
def test_the_agents_programs_never_get_at_a_graders_script_between_its_writing_and_its_run(
    kind: Kind, shared: Shared
) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        script = f"{sandbox.grader_home}/deep/grade.sh"
        await sh(sandbox, "mkdir -m 755 /tmp/grading; echo 42 > /tmp/grading/result", "grader")
        verdicts = set()

        async def grade() -> None:
            while True:
                await sandbox.write(script, b"sleep 0.02; echo failed", user="grader")
                await anyio.sleep(0.01)
                done = await sandbox.exec(["sh", script], cwd=sandbox.grader_home, timeout_s=20, user="grader")
                verdicts.add((done.exit_code, done.stdout, done.stderr))

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(grade)
            tried = await sandbox.exec([kind.python, "-c", TRY_ALL, sandbox.grader_home, "1"], timeout_s=60)
            await until(lambda: bool(verdicts))
            tasks.cancel_scope.cancel()
        assert (tried.stdout, tried.stderr) == ("[]\n", "")
        assert verdicts == {(0, "failed\n", "")}

    shared.run(main)


def test_a_graders_file_belongs_to_it_and_is_closed_unless_a_mode_is_given(shared: Shared) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        home = sandbox.grader_home
        await sandbox.write(f"{home}/a/b/plain", b"1", user="grader")
        await sandbox.write(f"{home}/open", b"2", mode=0o755, user="grader")
        await sandbox.write("/tmp/plain", b"3", user="grader")
        look = f"cd {home}; stat -c '%u %g %a' . a a/b a/b/plain open /tmp/plain"
        closed, plain = "1001 1001 700\n", "1001 1001 600\n"
        assert await sh(sandbox, look, "grader") == f"{closed * 3}{plain}1001 1001 755\n{plain}"
        for name, content in ((f"{home}/a/b/plain", b"1"), (f"{home}/open", b"2"), ("/tmp/plain", b"3")):
            assert await sandbox.read(name, user="grader") == content
            with pytest.raises(MissingFileError, match="Permission denied"):
                await sandbox.read(name)
            with pytest.raises(RefusedFileError):
                await sandbox.write(name, b"mine")

    shared.run(main)


def test_a_graders_folder_goes_in_and_out_and_is_open_to_nobody_else(
    shared: Shared, tests: Path, tmp_path: Path
) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        for target in (f"{sandbox.grader_home}/tests", sandbox.grader_home, "/tmp/tests"):
            await sandbox.upload(tests, target, user="grader")
            found = await sh(sandbox, f"cd {target}; ./run.sh; stat -c ' %u %a' . inner inner/key", "grader")
            assert found == "42 1001 700\n 1001 700\n 1001 600\n"
            with pytest.raises(MissingFileError):
                await sandbox.download(target, tmp_path / "stolen")
            with pytest.raises(RefusedFileError):
                await sandbox.upload(tests, target)
        await sandbox.download("/tmp/tests", tmp_path / "copy", user="grader")
        assert (tmp_path / "copy" / "inner" / "key").read_text() == "42"
        assert stat.S_IMODE((tmp_path / "copy" / "run.sh").stat().st_mode) == 0o700
        assert not (tmp_path / "stolen").exists()

    shared.run(main)


def test_what_a_graders_programs_leave_is_closed_to_the_agent(shared: Shared) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        leave = "mkdir /tmp/grades; echo 42 > /tmp/grades/all; echo 42 > /tmp/grade"
        await sh(sandbox, leave, "grader")
        assert (await sandbox.shell(user="grader").run("echo 42 > /tmp/other", timeout_s=20)).exit_code == 0
        look = "cat /tmp/grade /tmp/other /tmp/grades/all; stat -c %a /tmp/grade /tmp/other /tmp/grades"
        seen = await sandbox.exec(["sh", "-c", f"({look}) 2>/dev/null"], timeout_s=20)
        assert seen.stdout == "600\n600\n700\n"
        assert await sandbox.read("/tmp/grades/all", user="grader") == b"42\n"

    shared.run(main)


def test_a_link_of_the_agents_leads_a_grader_no_further_than_it_may_go(shared: Shared) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        await sandbox.write("answer", b"mine")
        assert await sandbox.read("answer", user="grader") == b"mine"
        await sh(sandbox, "ln -s /etc/shadow link; ln -s /etc folder")
        with pytest.raises(MissingFileError):
            await sandbox.read("link", user="grader")
        for name in ("answer", "folder/x", "/etc/x"):
            with pytest.raises(RefusedFileError):
                await sandbox.write(name, b"x", user="grader")
        assert await sandbox.read("answer") == b"mine"

    shared.run(main)


def test_files_are_reached_with_the_agents_rights_alone(shared: Shared) -> None:
    shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        await sh(sandbox, "umask 077; mkdir /tmp/g; echo secret > /tmp/g/x; echo secret > /tmp/gx", user="grader")
        await sh(sandbox, "ln -s /tmp/gx link; ln -s /tmp/g folder")
        for name in ("/tmp/gx", "link", "folder/x", "/etc/shadow", "/proc/1/environ"):
            with pytest.raises(MissingFileError):
                await sandbox.read(name)
        for name in ("/tmp/gx", "folder/y", "/etc/x", "/usr/x", "/run/x", "/proc/sys/kernel/hostname"):
            with pytest.raises(RefusedFileError):
                await sandbox.write(name, b"x")
        assert await sh(sandbox, "cat /tmp/gx; ls /tmp/g", user="grader") == "secret\nx\n"

    shared.run(main)


def test_a_grader_reads_no_settings_that_the_agent_wrote(shared: Shared) -> None:
    has_users = shared.has("uid")

    async def main(sandbox: AnySandbox) -> None:
        home = sandbox.grader_home if has_users else "/"
        await sh(sandbox, "echo 'echo mine' >~/.bash_profile")
        login = partial(sandbox.exec, ["bash", "-lc", "echo $HOME"], timeout_s=20)
        assert (await login()).stdout == "mine\n/workspace\n"
        assert (await login(user="grader")).stdout == f"{home}\n"
        assert (await sandbox.shell(user="grader").run("echo $HOME", timeout_s=20)).stdout == f"{home}\n"

    shared.run(main)


def test_a_grader_starts_in_its_home_and_imports_nothing_that_the_agent_left_in_the_workspace(
    kind: Kind, shared: Shared
) -> None:
    load = [kind.python, "-c", "import json; print(json.dumps(6 * 7))"]

    async def main(sandbox: AnySandbox) -> None:
        work = (await sh(sandbox, "echo \"print('hijacked')\" > json.py; pwd")).strip()
        assert (await sandbox.exec(load, timeout_s=20, user="grader")).stdout == "42\n"
        shell = sandbox.shell(user="grader")
        assert (await shell.run(f"pwd; {shlex.join(load)}", timeout_s=20)).stdout == f"{sandbox.grader_home}\n42\n"
        assert (await sh(sandbox, "pwd", user="grader")).strip() == sandbox.grader_home
        there = await sandbox.exec(load, timeout_s=20, user="grader", cwd=work)
        assert there.stdout.startswith("hijacked\n")

    shared.run(main)


@pytest.mark.parametrize("kind", ["process"], indirect=True)
def test_where_all_are_one_user_a_grader_writes_as_that_user(kind: Kind, tests: Path, tmp_path: Path) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            sandbox = await backend.start(kind.spec())
            script = f"{sandbox.grader_home}/grade.sh"
            await sandbox.write(script, b"echo graded", user="grader")
            assert await sh(sandbox, f"sh {script}", "grader") == "graded\n"
            assert await sandbox.read(script) == b"echo graded"
            await sandbox.upload(tests, f"{sandbox.grader_home}/tests", user="grader")
            await sandbox.download(f"{sandbox.grader_home}/tests", tmp_path / "copy")
            assert (tmp_path / "copy" / "inner" / "key").read_text() == "42"
            homes.append(Path(sandbox.grader_home))

    homes: list[Path] = []
    run(main)
    assert not any(home.exists() for home in homes)


def test_nobody_reads_or_writes_files_as_root(shared: Shared, tests: Path, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for call in (
            sandbox.read("/etc/passwd", user="root"),  # type: ignore[arg-type]
            sandbox.write("/tmp/x", b"", user="root"),  # type: ignore[arg-type]
            sandbox.upload(tests, "/tmp/x", user="root"),  # type: ignore[arg-type]
            sandbox.download("/etc", tmp_path / "etc", user="root"),  # type: ignore[arg-type]
        ):
            with pytest.raises(UnsupportedError, match="files as root"):
                await call
        assert await sh(sandbox, "ls -A") == ""

    shared.run(main)
