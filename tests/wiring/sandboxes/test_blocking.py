"""The blocking face of sandboxes, with real ones."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack, closing
from pathlib import Path
from typing import Any

import anyio
import pytest

import envkit
from envkit import clock
from envkit.env import AsyncEnv
from envkit.errors import MissingFileError, SandboxNotFoundError, SandboxStartError, UsageError
from envkit.types import Observation, Options, Reset, Step
from envkit.wiring.sandboxes.blocking import BlockingSandbox, kind_of
from tests.contract.kinds import new_marker, sleepers, until

pytestmark = pytest.mark.bwrap


@pytest.fixture
def sandbox() -> Iterator[BlockingSandbox]:
    with envkit.open_sandbox(backend="local") as opened:
        yield opened


class Runs(AsyncEnv):
    """Runs each action as a program in a sandbox of the episode."""

    def __init__(self) -> None:
        self._kept = AsyncExitStack()

    async def reset(self, *, seed: int, options: Options) -> Reset:
        await self._kept.aclose()
        self._sandbox = await self._kept.enter_async_context(envkit.open_sandbox_async("local"))
        await self._sandbox.write("seed", str(seed).encode())
        return Reset(Observation("go"), {})

    async def step(self, action: str) -> Step:
        done = await self._sandbox.shell().run(action)
        return Step(Observation(done.stdout), 0.0, False, False, {})

    async def close(self) -> None:
        await self._kept.aclose()


def test_an_async_environment_opens_a_sandbox_per_episode_without_threads() -> None:
    envkit.register("Runs-v0", Runs)
    marker = new_marker()
    with closing(envkit.make("Runs-v0")) as env:
        for seed in (1, 2):
            env.reset(seed=seed)
            assert env.step(f"sleep {marker} & cat seed")[0] == str(seed)
            anyio.run(until, lambda: len(sleepers(marker)) == 1)
    assert sleepers(marker) == []


def test_files_and_folders_go_in_and_out(sandbox: BlockingSandbox, tmp_path: Path) -> None:
    (tmp_path / "in" / "deep").mkdir(parents=True)
    (tmp_path / "in" / "deep" / "one").write_text("1")
    sandbox.upload(tmp_path / "in", "there")
    sandbox.write("there/two", "2")
    sandbox.download("there", tmp_path / "out")
    assert {str(path.relative_to(tmp_path / "out")) for path in (tmp_path / "out").rglob("*")} == {
        "deep",
        "deep/one",
        "two",
    }
    assert (sandbox.read("there/deep/one"), (tmp_path / "out" / "two").read_text()) == (b"1", "2")
    with pytest.raises(MissingFileError):
        sandbox.read("nowhere")


def test_a_port_inside_is_reached(sandbox: BlockingSandbox) -> None:
    sandbox.shell().run("cd /usr; python3 -m http.server --bind 127.0.0.1 8123 >/dev/null 2>&1 &", timeout_s=10)
    up = "until python3 -c 'import socket; socket.create_connection((\"127.0.0.1\", 8123))' 2>/dev/null; do :; done"
    sandbox.exec(["sh", "-c", up], timeout_s=20)
    with sandbox.connect(8123) as stream:
        stream.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert stream.recv(15).startswith(b"HTTP/1.0 200")


def test_threads_share_a_sandbox(sandbox: BlockingSandbox) -> None:
    with ThreadPoolExecutor(8) as threads:
        outputs = list(threads.map(lambda number: sandbox.exec(["echo", str(number)], timeout_s=20).stdout, range(40)))
    assert outputs == [f"{number}\n" for number in range(40)]


def test_what_is_unknown_is_named_with_the_nearest_that_is_known() -> None:
    with pytest.raises(UsageError, match="no option 'memory'; did you mean 'memory_mib'"):
        envkit.open_sandbox(backend="local", memory=3)
    with pytest.raises(UsageError, match="no option 'ledger'"):
        envkit.open_sandbox(backend="local", ledger="a server's")
    with pytest.raises(UsageError, match="orphan_ttl_s: needs a detached sandbox"):
        envkit.open_sandbox(backend="local", orphan_ttl_s=1.0)
    with pytest.raises(UsageError, match="backend: must be one of 'auto', 'local', 'docker', 'process', got 'podman'"):
        envkit.open_sandbox(backend="podman")  # type: ignore[arg-type]
    with pytest.raises(SandboxNotFoundError, match="no sandbox 'sandbox-1' on this machine"):
        kind_of("sandbox-1")


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"command": "sleep 5"}, "command: must be a list, got 'sleep 5'"),
        ({"memory_mib": "much"}, "memory_mib: must be a whole number, got 'much'"),
        ({"profile": "loose"}, "profile: must be one of strict, system, got 'loose'"),
        ({"env": {"A": 1}}, "env: must be text, got 1"),
    ],
)
def test_a_value_of_the_wrong_kind_is_refused_by_its_name(options: dict[str, Any], why: str) -> None:
    with pytest.raises(UsageError, match=re.escape(why)):
        envkit.open_sandbox(backend="local", **options)


@pytest.mark.filterwarnings("ignore:.*multi-threaded.*fork:DeprecationWarning")
def test_a_forked_process_cannot_use_a_sandbox(sandbox: BlockingSandbox) -> None:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            with pytest.raises(UsageError, match="works only in process"):
                sandbox.exec(["true"], timeout_s=5)
            sandbox.stop()
            with envkit.open_sandbox(backend="local") as own:
                code = own.exec(["sh", "-c", "exit 7"], timeout_s=10).exit_code or 0
        finally:
            os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 7
    assert sandbox.exec(["echo", "here"], timeout_s=10).stdout == "here\n"


def test_an_unsupported_spec_is_rejected_and_leaves_nothing_open() -> None:
    before = set(threading.enumerate())
    with pytest.raises(SandboxStartError, match="profile"):
        envkit.open_sandbox(backend="local", profile="system")
    for thread in set(threading.enumerate()) - before:
        thread.join(10)  # a worker may need a moment to end
    assert set(threading.enumerate()) <= before


INTERRUPTED = """
import envkit, signal, threading, os, time
with envkit.open_sandbox(backend="local") as sandbox:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    try:
        sandbox.exec(["sleep", "{marker}"], timeout_s=100)
    except KeyboardInterrupt:
        left = sandbox.exec(["sh", "-c", "ps ax | grep -c '[s]leep {marker}'"], timeout_s=20).stdout
        print("interrupted", left)
"""


def test_an_interrupt_ends_the_current_program_and_not_the_sandbox() -> None:
    done = subprocess.run(
        [sys.executable, "-c", INTERRUPTED.format(marker=new_marker())],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("interrupted 0\n\n", "")


def test_no_sandbox_survives_the_end_of_a_program_that_forgets_it() -> None:
    marker = str(70_000_000 + os.getpid())
    code = f"import envkit; sandbox = envkit.open_sandbox(backend='local', command=['sleep', '{marker}'])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    deadline = clock.stopwatch() + 20
    while _runs(marker):
        assert clock.stopwatch() < deadline


def _runs(argument: str) -> bool:
    for process in Path("/proc").iterdir():
        if process.name.isdecimal():
            try:
                if argument.encode() in (process / "cmdline").read_bytes().split(b"\0"):
                    return True
            except OSError:
                continue
    return False


COLLECTED = """
import envkit, gc, threading

class Node: pass

with envkit.open_sandbox(backend="process") as sandbox:
    node = Node()
    node.me, node.sandbox = node, envkit.open_sandbox(backend="process", command=["sleep", "{marker}"])
    del node
    async def collect():
        gc.collect()
    sandbox.wait_for(collect)
    for thread in threading.enumerate():
        if thread.name == "envkit-close":
            thread.join()
    print(sandbox.exec(["sh", "-c", "ps ax | grep -c '[s]leep {marker}'"], timeout_s=20).stdout)
"""


def test_a_sandbox_collected_in_the_loop_thread_is_stopped() -> None:
    code = COLLECTED.format(marker=new_marker())
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert (done.stdout, done.stderr) == ("0\n\n", "")
