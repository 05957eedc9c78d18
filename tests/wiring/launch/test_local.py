"""Processes of this machine: what they get, and that they leave nothing behind; see also the tests of vLLM servers."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.types import Node, Place
from envkit.wiring.launch import supervise
from envkit.wiring.launch.local import LocalLauncher, this_node
from envkit.wiring.launch.ray_relay import Runner
from envkit.wiring.launch.supervise import end_group, members

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="launchers run on Linux")

# Ignores SIGTERM, as does its child, which needs some time to clean up when this process has ended.
TRACKED = """
import signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
clean = "import sys, time; print(flush=True); sys.stdin.read(); time.sleep(0.3); open(sys.argv[1], 'x')"
words = [sys.executable, "-c", clean, sys.argv[1], "multiprocessing." + "resource_tracker"]
tracker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
tracker.stdout.readline()
print(flush=True)
time.sleep(600)
"""

LEAVES = """
import subprocess, time
print(subprocess.Popen(["sleep", "600"], start_new_session=True).pid, flush=True)
time.sleep(600)
"""


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(60):
            await test()

    clock.run(main)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Logs are in a folder of the test."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def test_the_process_that_removes_shared_memory_outlives_those_that_are_killed(tmp_path: Path) -> None:
    words = [sys.executable, "-c", TRACKED, str(tmp_path / "cleaned")]
    with subprocess.Popen(words, stdout=subprocess.PIPE, start_new_session=True) as leader:
        assert leader.stdout is not None
        leader.stdout.readline()
        assert len(members(leader.pid)) == 2
        end_group(leader.pid, term_s=0.1)
        assert members(leader.pid) == []
    assert (tmp_path / "cleaned").exists()


def test_the_supervisor_also_ends_what_has_left_its_session() -> None:
    command = [sys.executable, supervise.__file__, str(os.getpid()), sys.executable, "-c", LEAVES]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as supervisor:
        assert supervisor.stdout is not None
        left = int(supervisor.stdout.readline())
        assert Path(f"/proc/{left}").exists()
        supervisor.terminate()
        supervisor.wait(60)
    assert not Path(f"/proc/{left}").exists()


def test_a_process_has_its_variables_and_gpus_and_its_log_has_its_output() -> None:
    async def test() -> None:
        launcher = LocalLauncher()
        launcher.nodes = (Node(name="n0", id="a", host="a", address="127.0.0.1", gpus=("3", "5", "6")),)
        words = ["/bin/sh", "-c", 'echo "$WORD $CUDA_VISIBLE_DEVICES"; exit 7']
        process = await launcher.start(words, {"WORD": "hello"}, place=Place(gpus=(0, 2)), name="test")
        assert await process.wait() == "exited with code 7"
        assert (process.log.read_text(), process.returncode) == ("hello 3,6\n", 7)
        await process.kill()

    run(test)


def test_a_program_that_does_not_exist_is_named_in_the_log() -> None:
    async def test() -> None:
        process = await LocalLauncher().start(["/no/such/program"], {}, place=Place(), name="test")
        assert await process.wait() == "exited with code 127"
        assert process.log.read_text() == "cannot run /no/such/program: No such file or directory\n"
        await process.kill()

    run(test)


def test_descendants_of_a_program_that_ends_are_ended_with_it() -> None:
    async def test() -> None:
        words = ["/bin/sh", "-c", "trap '' TERM; sleep 600 & exit 7"]
        process = await LocalLauncher().start(words, {}, place=Place(), name="test")
        with anyio.fail_after(5):
            assert await process.wait() == "exited with code 7"
        assert members(process.pid) == []

    run(test)


@pytest.mark.parametrize(
    ("visible", "gpus"),
    [
        (None, ("0", "1", "2")),
        ("2,0", ("2", "0")),
        ("", ()),
        ("1,-1,0", ("1",)),
        ("GPU-8f1, GPU-2c0", ("GPU-8f1", "GPU-2c0")),
    ],
)
def test_the_gpus_of_this_machine_are_those_that_are_visible(
    visible: str | None, gpus: tuple[str, ...], tmp_path: Path
) -> None:
    (tmp_path / "dev").mkdir()
    for name in ("nvidia0", "nvidia1", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / "dev" / name).touch()
    variables = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert this_node(variables, machine=tmp_path).gpus == gpus
    (tmp_path / "none").mkdir()
    assert this_node(variables, machine=tmp_path / "none").gpus == ()


def test_a_program_that_a_relay_ends_on_its_node_leaves_no_log_there(tmp_path: Path) -> None:
    def logs() -> list[Path]:
        return list(tmp_path.iterdir())

    async def test() -> None:
        runner = Runner()
        await runner.start(["sleep", "600"], {})
        assert logs()
        await runner.end()
        assert not logs()

    run(test)
