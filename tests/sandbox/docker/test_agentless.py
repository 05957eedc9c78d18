"""Sandboxes of images without Python: commands and files work, and all that a command started ends with it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import TypeAlias

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    MissingFileError,
    RefusedFileError,
    SandboxLostError,
    SandboxStartError,
    TooLargeError,
    UnsupportedError,
)
from envkit.sandbox.docker.agentless import AgentlessSandbox
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import CauseKind, SandboxSpec
from tests.contract.kinds import KINDS, run, until
from tests.contract.shared import AnySandbox, SharedSandboxes
from tests.sandbox.containers import containers_of, docker, image

pytestmark = [pytest.mark.docker, pytest.mark.xdist_group("fallback")]

RunShared: TypeAlias = Callable[[Callable[[AnySandbox], Awaitable[None]]], None]


@pytest.fixture(scope="module")
def without_python(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """An image with a shell and no Python."""
    folder = tmp_path_factory.mktemp("image")
    remove = "rm -f /usr/bin/python3* /usr/local/bin/python*"
    Path(folder, "Dockerfile").write_text(f"FROM {image()}\nRUN {remove}\n")
    name = docker("build", "--quiet", "--network", "none", str(folder))
    yield name
    docker("rmi", name)


@pytest.fixture
def shared(without_python: str, sandboxes: SharedSandboxes) -> RunShared:
    """Runs a case in a sandbox of that image which others use before and after it."""
    return lambda main: sandboxes.run(KINDS["docker"], main, image=without_python, env={"COLOUR": "blue"})


def test_a_command_has_input_output_environment_and_an_exit_code(shared: RunShared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        assert isinstance(sandbox, AgentlessSandbox)
        script = "id -u; pwd; echo $COLOUR $SIZE; cat; echo oh >&2; exit 3"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=20, env={"SIZE": "7"}, stdin=b"text\n")
        assert (result.exit_code, result.stdout, result.stderr) == (3, "1000\n/workspace\nblue 7\ntext\n", "oh\n")
        result = await sandbox.exec(["sh", "-c", "id -u; pwd"], timeout_s=20, user="grader", cwd="/tmp")
        assert result.stdout == "1001\n/tmp\n"
        assert (await sandbox.exec(["no-such-program"], timeout_s=20)).exit_code == 127
        assert (await sandbox.exec(["exit", "7"], timeout_s=20)).exit_code == 127
        assert (await sandbox.exec(["sh", "-c", "kill -TERM $$"], timeout_s=20)).exit_code == -15

    shared(main)


def test_a_grader_s_files_and_settings_are_its_own(shared: RunShared, tmp_path: Path) -> None:
    async def main(sandbox: AnySandbox) -> None:
        script = f"{sandbox.grader_home}/deep/grade.sh"
        await sandbox.write(script, b"echo graded; umask; echo $HOME; pwd; echo 42 > /tmp/grade", user="grader")
        result = await sandbox.exec(["sh", script], timeout_s=20, user="grader")
        assert result.stdout == f"graded\n0077\n{sandbox.grader_home}\n{sandbox.grader_home}\n"
        assert await sandbox.read("/tmp/grade", user="grader") == b"42\n"
        look = f"stat -c '%u %a' {script} {sandbox.grader_home}/deep {sandbox.grader_home}"
        assert (await sandbox.exec(["sh", "-c", look], timeout_s=20, user="grader")).stdout == (
            "1001 600\n1001 700\n1001 700\n"
        )
        for name in (script, "/tmp/grade"):
            with pytest.raises(MissingFileError):
                await sandbox.read(name)
            with pytest.raises(RefusedFileError):
                await sandbox.write(name, b"mine")
        with pytest.raises(UnsupportedError, match="copying folders"):
            await sandbox.upload(tmp_path, "tests", user="grader")
        with pytest.raises(UnsupportedError, match="user 'root'"):
            await sandbox.read("/etc/shadow", user="root")  # type: ignore[arg-type]

    shared(main)


def test_what_a_command_leaves_running_ends_with_it(
    shared: RunShared, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        leave = f"(setsid sleep {marker} &) ; trap '' TERM; sleep {marker} &"
        result = await sandbox.exec(["sh", "-c", leave], timeout_s=20)
        assert (result.exit_code, result.timed_out) == (0, False)
        await until(lambda: sleepers() == 0)  # killed by now, which takes a moment

    shared(main)


@pytest.mark.parametrize("deed", ["sleep {0}", "kill -STOP $PPID; sleep {0}", "kill -KILL $PPID; sleep {0}"])
def test_a_command_out_of_time_ends_with_all_that_it_started(
    deed: str, shared: RunShared, marker: str, sleepers: Callable[[], int]
) -> None:
    async def main(sandbox: AnySandbox) -> None:
        script = f"echo part; (setsid sleep {marker} &); trap '' TERM; {deed.format(marker)}"
        result = await sandbox.exec(["sh", "-c", script], timeout_s=1)
        assert (result.exit_code, result.timed_out, result.stdout) == (None, True, "part\n")
        await until(lambda: sleepers() == 0)  # killed by now, which takes a moment
        assert (await sandbox.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"

    shared(main)


def test_a_cancelled_command_ends(shared: RunShared, marker: str, sleepers: Callable[[], int]) -> None:
    async def main(sandbox: AnySandbox) -> None:
        with anyio.move_on_after(0.5):
            await sandbox.exec(["sleep", marker], timeout_s=60)
        await until(lambda: sleepers() == 0)  # killed by now, which takes a moment

    shared(main)


def test_of_much_output_the_end_is_kept(shared: RunShared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        flood = "head -c 3000000 /dev/zero; echo end; head -c 100 /dev/zero >&2; echo END >&2"
        result = await sandbox.exec(["sh", "-c", flood], timeout_s=20, max_output_bytes=10)
        assert result.stdout_bytes == b"\0" * 6 + b"end\n"
        assert result.stderr_bytes == b"\0" * 6 + b"END\n"
        assert result.truncated_bytes == 3_000_000 - 6 + 100 - 6

    shared(main)


def test_files_are_read_and_written_whole(shared: RunShared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        content = bytes(range(256)) * 4096
        await sandbox.write("a b/-c", content, mode=0o750)
        assert await sandbox.read("/workspace/a b/-c") == content
        shown = await sandbox.exec(["sh", "-c", "ls -A 'a b'; stat -c %a 'a b/-c'"], timeout_s=20)
        assert shown.stdout == "-c\n750\n"
        with pytest.raises(TooLargeError):
            await sandbox.read("a b/-c", max_bytes=1000)
        with pytest.raises(MissingFileError, match="/none: there is no such file"):
            await sandbox.read("/none")
        with pytest.raises(RefusedFileError, match="Read-only file system"):
            await sandbox.write("/usr/new", b"")

    shared(main)


def test_what_needs_python_is_refused_by_name(without_python: str, tmp_path: Path) -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=without_python))
            with pytest.raises(UnsupportedError, match="has no Python, which a persistent shell needs"):
                sandbox.shell()
            with pytest.raises(UnsupportedError, match="has no Python"):
                await sandbox.upload(tmp_path, "/tmp/x")
            with pytest.raises(UnsupportedError, match="has no Python"):
                await sandbox.connect(80)
            with pytest.raises(UnsupportedError, match="user 'root'"):
                await sandbox.exec(["true"], timeout_s=5, user="root")
            with pytest.raises(SandboxStartError, match="has no Python, which is needed for a command, ttl_s"):
                await backend.start(SandboxSpec(("true",), image=without_python, ttl_s=5))

    run(main)


def test_a_lost_sandbox_reports_its_cause(without_python: str) -> None:
    async def main() -> None:
        others = set(containers_of("docker-1"))  # of the shared sandbox, which another backend started
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=without_python))
            (container,) = set(containers_of(sandbox.id)) - others
            assert 0 < await sandbox.probe(10) < 10
            await clock.to_thread(docker, "kill", container)
            assert str(await sandbox.wait()) == "killed by signal 9 (SIGKILL)"
            with pytest.raises(SandboxLostError, match="killed by signal 9"):
                await sandbox.exec(["true"], timeout_s=5)
            await sandbox.stop()
            await sandbox.stop()
            assert set(containers_of(sandbox.id)) <= others

    run(main)


def test_a_kill_from_outside_after_a_program_ran_out_of_memory_is_not_by_the_agent(without_python: str) -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=without_python, memory_mib=64))
            hog = "head -c 600000000 /dev/zero | tail -n 1; true"
            await sandbox.exec(["sh", "-c", hog], timeout_s=20)
            await clock.to_thread(docker, "kill", *containers_of(sandbox.id))
            cause = await sandbox.wait()
            assert (cause.kind, cause.by_agent) == (CauseKind.KILLED, False)

    run(main)
