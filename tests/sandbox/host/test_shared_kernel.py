"""What the kernel counts for all sandboxes together: one that takes everything leaves the others what they need."""

from __future__ import annotations

import os
import resource
import shutil
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from envkit import clock
from envkit.errors import SandboxError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap import uid_ranges
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import SandboxSpec, SandboxUser
from tests.contract.kinds import run, until
from tests.sandbox.containers import image

as_root = pytest.mark.skipif(
    uid_ranges.why_unavailable() is not None, reason="sandboxes have no uids of their own here"
)
PYTHON = str(Path(sys.executable).resolve())
local = [pytest.mark.bwrap, as_root]

TAKE = """
import ctypes, fcntl, os, signal, sys
libc = ctypes.CDLL(None, use_errno=True)
held = []

def checked(result):
    if result < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return result

def terminal():
    held.append(os.open("/dev/ptmx", os.O_RDWR | os.O_NOCTTY))

def inotify_instance():
    held.append(checked(libc.inotify_init()))

def queued_signal():
    checked(libc.sigqueue(os.getpid(), signal.SIGRTMIN, ctypes.c_void_p(1)))

def timer():
    checked(libc.timer_create(0, None, ctypes.byref(ctypes.c_void_p())))

def pipe():
    held.extend(os.pipe())
    fcntl.fcntl(held[-1], 1031, 1 << 20)  # F_SETPIPE_SZ

def message_queue():
    checked(libc.mq_open(b"/q%d-%d" % (os.getpid(), len(held)), os.O_CREAT | os.O_RDWR, 0o600, None))
    held.append(None)

signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGRTMIN])
take, most = globals()[sys.argv[1]], int(sys.argv[2])
count = 0
try:
    while count < most:
        take()
        count += 1
except OSError as error:
    print(count, error.strerror, flush=True)
else:
    print(count, "no bound", flush=True)
sys.stdin.read()
"""

PIPE_BYTES = "import fcntl, os; print(fcntl.fcntl(os.pipe()[0], 1032))"  # F_GETPIPE_SZ

MOST = {
    "terminal": 4_000,
    "inotify_instance": 200,
    "queued_signal": 200_000,
    "timer": 200_000,
    "pipe": 100,
    "message_queue": 300,
}
"""How many one sandbox tries to take: more than the kernel has for a user, or for all sandboxes."""

OWNER = """
import os, anyio
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec

async def main():
    async with LocalBackend() as backend:
        sandbox = await backend.start(SandboxSpec(detached=bool({stays}), ttl_s=60))
        reported = (await sandbox.exec(["cat", "/proc/self/uid_map"], timeout_s=20)).stdout
        print(sandbox.id, reported.split()[4], *sandbox.unenforced, flush=True)
        if {dies}:
            os.kill(os.getpid(), 9)

anyio.run(main)
"""


@asynccontextmanager
async def taking(sandbox: AgentSandbox, what: str, python: str = PYTHON) -> AsyncIterator[str]:
    """Let the agent of `sandbox` hold all that it gets, for the length of the block; yield how many and why no more."""
    async with sandbox.program([python, "-c", TAKE, what, str(MOST[what])], timeout_s=40) as program:
        reported = b""
        while not reported.endswith(b"\n") and (piece := await program.receive()) is not None:
            reported += piece[1]
        yield reported.decode().strip()


async def gets_one(sandbox: AgentSandbox, what: str, user: SandboxUser, python: str = PYTHON) -> str:
    done = await sandbox.exec([python, "-c", TAKE, what, "1"], timeout_s=20, user=user)
    return done.stdout + done.stderr


async def uid_base(sandbox: AgentSandbox) -> int:
    """The first uid of the range that a sandbox has."""
    return int((await sandbox.exec(["cat", "/proc/self/uid_map"], timeout_s=20)).stdout.split()[4]) - 1


def open_files() -> int:
    return len([*Path("/proc/self/fd").iterdir()])


def is_free(base: int) -> bool:
    """Whether no process has the range."""
    return f"@envkit-uids-{base}\n" not in Path("/proc/net/unix").read_text()


class TestTwoLocalSandboxes:
    """One takes all that it gets; the other one is of another tenant."""

    pytestmark = local

    @pytest.mark.parametrize("what", ["terminal", "inotify_instance", "queued_signal", "timer", "message_queue"])
    def test_one_that_takes_all_leaves_the_other_and_both_graders_enough(self, what: str) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                greedy, other = [await backend.start(SandboxSpec(untrusted=True)) for _ in range(2)]
                async with taking(greedy, what) as reported:
                    assert not reported.endswith("no bound")
                    assert what != "terminal" or reported == "64 No space left on device"
                    assert await gets_one(other, what, "agent") == "1 no bound\n"
                    if what in ("queued_signal", "timer", "message_queue"):
                        assert await gets_one(greedy, what, "grader") == "1 no bound\n"
                    assert await gets_one(other, what, "grader") == "1 no bound\n"

        run(main)

    def test_pipes_of_the_other_are_as_large_as_ever(self) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                greedy, other = [await backend.start(SandboxSpec(untrusted=True)) for _ in range(2)]
                async with taking(greedy, "pipe") as reported:
                    assert reported.endswith("Operation not permitted")
                    found = await other.exec([PYTHON, "-c", PIPE_BYTES], timeout_s=20)
                    assert found.stdout == "65536\n"

        run(main)

    def test_each_has_a_user_namespace_and_host_uids_of_its_own_and_inside_they_are_1000_and_1001(self) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                sandboxes = [await backend.start(SandboxSpec()) for _ in range(2)]
                bases = [await uid_base(sandbox) for sandbox in sandboxes]
                assert bases[0] != bases[1]
                for sandbox in sandboxes:
                    for user, uid in (("agent", "1000\n"), ("grader", "1001\n")):
                        assert (await sandbox.exec(["id", "-u"], timeout_s=20, user=user)).stdout == uid  # type: ignore[arg-type]
                    assert sandbox.unenforced == ()
                    inside = await sandbox.exec(["readlink", "/proc/self/ns/user"], timeout_s=20, user="root")
                    assert inside.stdout.strip() != str(Path("/proc/self/ns/user").readlink())  # noqa: ASYNC240
            last = uid_ranges.FIRST + (uid_ranges.COUNT - 1) * uid_ranges.SIZE
            assert all(uid_ranges.FIRST <= base <= last for base in bases)
            assert all(is_free(base) for base in bases)

        run(main)


@pytest.mark.bwrap
@as_root
class TestARange:
    """What becomes of a sandbox's uids."""

    def test_it_is_free_after_its_owner_was_killed(self) -> None:
        reported = subprocess.run(
            [sys.executable, "-c", OWNER.format(stays=0, dies=1)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        ).stdout.split()
        base = int(reported[1]) - 1
        run(lambda: until(lambda: is_free(base)))

    def test_it_belongs_to_a_detached_sandbox_until_that_ends(self) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                owner = [sys.executable, "-c", OWNER.format(stays=1, dies=0)]
                done = await clock.to_thread(
                    lambda: subprocess.run(owner, capture_output=True, text=True, timeout=60, check=True)
                )
                sandbox_id, first = done.stdout.split()
                base = int(first) - 1
                try:
                    assert not is_free(base)
                    sandbox = await backend.attach(sandbox_id)
                    await sandbox.write("left", b"by the agent")
                    assert (
                        await sandbox.exec(["stat", "-c", "%u", "left", "."], timeout_s=20)
                    ).stdout == "1000\n1000\n"
                finally:
                    await backend.remove(sandbox_id)
                await until(lambda: is_free(base))

        run(main)

    def test_a_start_that_fails_for_want_of_files_leaves_none_open(self) -> None:
        async def main() -> None:
            soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
            async with LocalBackend() as backend:
                await (await backend.start(SandboxSpec())).stop()
                before = open_files()
                for more in range(3, 14):
                    resource.setrlimit(resource.RLIMIT_NOFILE, (before + more, hard))
                    try:
                        with suppress(SandboxError, OSError):  # where the last ones suffice
                            await (await backend.start(SandboxSpec())).stop()
                    finally:
                        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
                    assert open_files() <= before

        run(main)

    def test_without_user_namespaces_a_sandbox_reports_shared_uids(self, tmp_path: Path) -> None:
        bubblewrap = shutil.which("bwrap")
        assert bubblewrap is not None
        (tmp_path / "bwrap").symlink_to(bubblewrap)  # and neither setpriv nor unshare
        done = subprocess.run(
            [sys.executable, "-c", OWNER.format(stays=0, dies=0).replace("reported.split()[4]", "reported.split()")],
            env={"PATH": str(tmp_path)},
            capture_output=True,
            text=True,
            timeout=60,
            check=True,
        )
        assert done.stdout.split()[1:] == ["['0',", "'0',", "'4294967295']", "uid_range"]


SCORES = "cat /proc/self/oom_score_adj; for score in 0 999; do echo $score > /proc/self/oom_score_adj; done"
SCORES += "; echo 1000 > /proc/1/oom_score_adj; cat /proc/self/oom_score_adj"
# Process 1 has the score of what it forks until the fork has returned, which a busy machine draws out.
SCORES += "; n=0; while [ $((n += 1)) -lt 200 ] && [ $(cat /proc/1/oom_score_adj) = 1000 ]; do sleep 0.1; done"
SCORES += "; cat /proc/1/oom_score_adj"


class TestTheOrderOfEnds:
    """Whom the kernel ends first when memory runs out."""

    @pytest.mark.bwrap
    @as_root
    def test_in_a_local_sandbox_it_is_the_agents_programs_and_they_cannot_change_it(self) -> None:
        async def main() -> None:
            async with LocalBackend() as backend:
                sandbox = await backend.start(SandboxSpec())
                assert await scores(sandbox) == (["1000", "1000", "500"], ["500"])

        run(main)

    @pytest.mark.docker
    @pytest.mark.skipif(os.geteuid() != 0, reason="needs root on the daemon's machine")
    def test_in_a_container_it_is_the_agents_programs_and_they_cannot_change_it(self) -> None:
        async def main() -> None:
            async with DockerBackend() as backend:
                sandbox = await backend.start(SandboxSpec(image=image()))
                assert isinstance(sandbox, AgentSandbox)
                assert await scores(sandbox) == (["1000", "1000", "0"], ["0"])

        run(main)


async def scores(sandbox: AgentSandbox) -> tuple[list[str], list[str]]:
    """Return the agent's own at first, after it tried to change it, and that of process 1; then the grader's."""
    tried = await sandbox.exec(["sh", "-c", SCORES], timeout_s=20)
    grader = await sandbox.exec(["cat", "/proc/self/oom_score_adj"], timeout_s=20, user="grader")
    return tried.stdout.split(), grader.stdout.split()


@pytest.mark.docker
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root on the daemon's machine")
def test_a_container_that_takes_all_terminals_has_64_and_leaves_others_theirs() -> None:
    python = "/usr/bin/python3"

    async def main() -> None:
        async with DockerBackend() as backend:
            greedy, other = [await backend.start(SandboxSpec(image=image())) for _ in range(2)]
            assert isinstance(greedy, AgentSandbox)
            assert isinstance(other, AgentSandbox)
            async with taking(greedy, "terminal", python) as reported:
                assert reported == "64 No space left on device"
                assert await gets_one(other, "terminal", "agent", python) == "1 no bound\n"
                assert await gets_one(other, "terminal", "grader", python) == "1 no bound\n"

    run(main)
