"""A real Docker daemon that is restarted under load: only its sandboxes are lost."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path

import anyio
import pytest

from envkit.errors import EnvkitError, SandboxLostError
from envkit.http.client.env_client import EnvClient
from envkit.http.client.sandbox_client import SandboxClient
from envkit.types import Task
from tests.contract.kinds import arguments, parent, processes, until
from tests.e2e.fleet.fleet import NOTHING, Gateway, run, serving
from tests.sandbox.containers import docker

PIDFILE = os.environ.get("ENVKIT_DOCKERD_PIDFILE")
"""Pid file of a daemon that may be restarted; ``docker/with-daemon`` sets it."""

pytestmark = [
    pytest.mark.alone,  # it restarts the daemon
    pytest.mark.docker,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes outlive a server"),
    pytest.mark.skipif(PIDFILE is None, reason="ENVKIT_DOCKERD_PIDFILE names no daemon to restart"),
]

WORKERS = 4
PLAYERS = 8
EPISODES_AFTER = 40
RESTART_S = 60


async def restart(number: signal.Signals, log: Path) -> None:
    """Stop the daemon, and start it again with the same arguments, in a new session."""
    assert PIDFILE is not None
    pid = int(await anyio.Path(PIDFILE).read_text())
    command = [os.fsdecode(word) for word in arguments(pid)[:-1]]
    ends = [(Path(PIDFILE), os.pidfd_open(pid)), *_its_containerd(pid)]
    os.kill(pid, number)
    for pidfile, process in ends:
        with anyio.fail_after(RESTART_S):
            await anyio.wait_readable(process)
        os.close(process)
        # Without this, the daemon takes the dead containerd for a running one and starts none.
        pidfile.unlink(missing_ok=True)
    script = 'log=$1; shift; setsid "$@" >"$log" 2>&1 & echo $!'
    started = await anyio.run_process(["sh", "-c", script, "sh", str(log), *command])
    with anyio.move_on_after(RESTART_S):
        while arguments(int(started.stdout)):
            if (await anyio.run_process(["docker", "version"], check=False)).returncode == 0:
                return
            await anyio.sleep(0.1)
    pytest.fail(f"no daemon answers: {(await anyio.Path(log).read_text())[-2000:]}")


def _its_containerd(pid: int) -> Iterator[tuple[Path, int]]:
    """Yield the pid file and the process of the containerd that a daemon has started."""
    for child in processes():
        with suppress(OSError):
            words = [os.fsdecode(word) for word in arguments(child)]
            if parent(child) == pid and "--config" in words:
                config = Path(words[words.index("--config") + 1])
                yield config.with_name("containerd.pid"), os.pidfd_open(child)


async def work(client: SandboxClient, id: str, worked: Counter[str], causes: dict[str, str]) -> None:
    """Run programs in a sandbox until it is lost."""
    try:
        while True:
            assert (await client.get(id).exec(["echo", "hello"], timeout_s=30)).stdout == "hello\n"
            worked[id] += 1
    except SandboxLostError as error:
        causes[id] = str(error.cause)


async def play(host: EnvClient, seeds: Iterator[int], ends: Counter[str], enough: anyio.Event) -> None:
    """Play one episode after another; each is counted once."""
    while not enough.is_set():
        seed = next(seeds)
        ends["begun"] += 1
        try:
            async with host.lease(Task("FrozenLake-v0", seed)) as episode:
                await episode.reset()
                while not (await episode.step("<answer>down</answer>")).ended:
                    pass
        except EnvkitError as error:
            ends[type(error).__name__] += 1
            await anyio.sleep(0.2)
        else:
            ends["finished"] += 1


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_a_server_under_load_survives_a_restart_of_its_docker_daemon(number: signal.Signals, tmp_path: Path) -> None:
    async def main(gateway: Gateway) -> None:
        worked, ends = Counter[str](), Counter[str]()
        causes: dict[str, str] = {}
        enough = anyio.Event()
        seeds = count()
        ids = [f"before-{worker}" for worker in range(WORKERS)]

        async with (
            SandboxClient(gateway.url) as client,
            EnvClient(gateway.url) as host,
            anyio.create_task_group() as tasks,
        ):
            for id in ids:
                await client.create(id, gateway.spec(memory_mib=128))
                tasks.start_soon(work, client, id, worked, causes)
            for _ in range(PLAYERS):
                tasks.start_soon(play, host, seeds, ends, enough)
            await until(lambda: len(worked) == WORKERS and ends["finished"] > PLAYERS, 30)
            await restart(number, tmp_path / "dockerd.log")
            await until(lambda: len(causes) == WORKERS, 10)
            for id in ids:
                assert await gateway.becomes(id, "lost") == causes[id] != ""
            await _until_served(gateway, client)
            finished = ends["finished"]
            await until(lambda: ends["finished"] >= finished + EPISODES_AFTER, 60)
            enough.set()
        begun = ends.pop("begun")
        assert ends.total() == begun == next(seeds), ends
        assert set(ends) <= {"finished", "SandboxLostError", "SandboxStartError"}
        assert await gateway.end() == 0
        assert gateway.left() == NOTHING

    with serving("docker", tmp_path, "envs.sandboxes=2", "restarts.budget=50", "restarts.window_s=10") as gateway:
        run(lambda: main(gateway), 240)
    assert docker("ps", "--all", "--quiet", "--filter", f"name={gateway.name}") == ""


async def _until_served(gateway: Gateway, client: SandboxClient) -> None:
    """Wait until a new sandbox starts and works."""
    with anyio.fail_after(60):
        for attempt in count():
            with suppress(EnvkitError):
                await client.create(f"after-{attempt}", gateway.spec(memory_mib=128))
                assert (await client.get(f"after-{attempt}").exec(["true"], timeout_s=20)).exit_code == 0
                return
            await anyio.sleep(0.2)
