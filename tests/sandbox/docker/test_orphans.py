"""Containers that a killed process left with the daemon or requested from it are removed by the next process."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.sandbox.docker import orphans
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.host import run_dirs
from envkit.types import JSON, SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.containers import containers_of, docker, image

pytestmark = pytest.mark.docker

# Requests `argv[2]` containers from the daemon and dies before they exist.
ASKER = """
import json, os, signal, socket, sys
from envkit.sandbox.docker import orphans
from envkit.sandbox.host import run_dirs

run = run_dirs.owner_name(os.getpid()) + "-test"
held = []
for number in range(int(sys.argv[2])):
    labels = orphans.labels(run, f"docker-{number}", detached=False)
    volume = {"Type": "volume", "Target": "/x", "VolumeOptions": {"Labels": labels}}
    options = {"Image": sys.argv[1], "Cmd": ["true"], "Labels": labels, "HostConfig": {"Mounts": [volume]}}
    body = json.dumps(options).encode()
    head = "POST /containers/create HTTP/1.1\\r\\nHost: docker\\r\\nContent-Type: application/json\\r\\n"
    stream = socket.socket(socket.AF_UNIX)
    stream.connect("/var/run/docker.sock")
    note = orphans.pending_creation(labels)
    note.__enter__()
    stream.sendall(f"{head}Content-Length: {len(body)}\\r\\n\\r\\n".encode() + body)
    held += [stream, note]
os.kill(os.getpid(), signal.SIGKILL)
"""


def ask(count: int) -> subprocess.Popen[bytes]:
    """Run `ASKER` to its end."""
    asker = subprocess.Popen([sys.executable, "-c", ASKER, image(), str(count)])
    asker.wait()
    return asker


def left_by(pid: int) -> list[str]:
    """Notes, containers and volumes of a process."""
    notes = [str(note) for root in run_dirs.roots() for note in root.glob(f"envkit-*-{pid}-*")]
    listed = [
        *docker("ps", "--all", "--format", '{{.ID}} {{.Label "envkit.owner"}}').splitlines(),
        *docker("volume", "ls", "--format", '{{.Name}} {{.Label "envkit.owner"}}').splitlines(),
    ]
    return notes + [line for line in listed if f"-{pid}-" in line]


@pytest.mark.skipif(not Path("/var/run/docker.sock").exists(), reason="Docker's usual socket is elsewhere")
@pytest.mark.parametrize("count", [1, 6])
def test_a_container_that_the_daemon_still_creates_for_a_killed_owner_is_awaited_and_removed(count: int) -> None:
    async def main() -> None:
        daemon = await Daemon.connect()
        asker = await clock.to_thread(ask, count)
        assert len([name for name in left_by(asker.pid) if "+" in name]) == count
        await orphans.reap(daemon)
        assert left_by(asker.pid) == []
        await daemon.close()

    run(main)


def test_a_request_that_never_came_is_not_waited_for_long() -> None:
    ended = subprocess.Popen(["sleep", "10"])
    run_name = f"{run_dirs.owner_name(ended.pid)}-test"
    ended.kill()
    ended.wait()
    note = run_dirs.common_first()[0] / f"{run_name}+docker-1"
    note.touch()
    os.utime(note, (0, 0))

    async def main() -> None:
        daemon = await Daemon.connect()
        with anyio.fail_after(3):
            await orphans.reap(daemon)
        assert not note.exists()
        await daemon.close()

    run(main)


def test_a_note_lies_there_only_while_the_daemon_is_asked() -> None:
    labels = orphans.labels(f"{run_dirs.owner_name(os.getpid())}-test", "docker-1", detached=False)
    note = Path(run_dirs.common_first()[0], f"{run_dirs.owner_name(os.getpid())}-test+docker-1")
    with orphans.pending_creation(labels):
        assert note.exists()
        assert note.stat().st_mode & 0o777 == 0o600
    assert not note.exists()


def test_removing_a_container_that_is_being_removed_waits_until_it_is_gone() -> None:
    labels: dict[str, JSON] = {"envkit.test": f"removal-{os.getpid()}"}
    options: dict[str, JSON] = {"Image": image(), "Cmd": ["sleep", "60"], "Labels": labels}

    async def main() -> None:
        daemon = await Daemon.connect()
        for is_started in (False, True, True):
            container = await daemon.create(options, nullcontext())
            if is_started:
                await daemon.start(container)

            async def remove(container: str = container) -> None:
                await daemon.remove(container)
                assert await daemon.inspect(container) is None

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(remove)
        await daemon.remove("no-such-container")
        await daemon.close()

    run(main)


def test_a_start_whose_task_is_cancelled_from_outside_leaves_nothing_once_the_backend_is_left() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            for moment_s in (0.04, 0.02, 0.01, 0.005):
                task = asyncio.ensure_future(backend.start(SandboxSpec(image=image())))
                await anyio.sleep(moment_s)
                task.cancel()
                await asyncio.wait([task])
        for number in range(1, 5):
            assert containers_of(f"docker-{number}") == []

    run(main)
