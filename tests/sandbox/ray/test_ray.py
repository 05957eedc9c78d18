"""A real Ray cluster as a place for sandboxes: they come and go with its nodes, and nothing is left behind."""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

import anyio
import pytest
from anyio.from_thread import BlockingPortal, start_blocking_portal

from envkit import clock
from envkit.errors import CapacityError, SandboxError, SandboxLostError, SandboxRefusedError, UsageError
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.ray.backend import RayNodeBackend
from envkit.sandbox.ray.cluster import Cluster as Connection
from envkit.sandbox.ray.node_watcher import RayNodes
from envkit.types import Cause, SandboxSpec
from tests.contract.kinds import agent_above, new_marker, parent, run, sleepers, until
from tests.sandbox.pool.pools import FakeLedger
from tests.sandbox.ray.clusters import Cluster, running

pytestmark = [pytest.mark.ray, pytest.mark.bwrap, pytest.mark.xdist_group("ray")]

ORPHAN_TTL_S = 2.0

SERVER = """
import os, socket, threading
def serve(listener):
    while True:
        stream, _ = listener.accept()
        stream.sendall(stream.recv(100).upper())
        stream.close()
inner = socket.socket(socket.AF_UNIX)
inner.bind(os.environ["ENVKIT_SOCKETS"] + "/door")
inner.listen()
threading.Thread(target=serve, args=(inner,)).start()
serve(socket.create_server(("127.0.0.1", 8000)))
"""

# Starts a sandbox in which the marker sleeps, says so, and waits.
DRIVER = """
import sys, anyio
from envkit.sandbox.pool import Pool
from envkit.sandbox.ray.node_watcher import RayNodes
from envkit.types import SandboxSpec

async def main():
    address, marker = sys.argv[1:]
    pool = Pool()
    async with RayNodes(pool.add_node, pool.remove_node, address=address, orphan_ttl_s=2), pool:
        async with pool.lease(SandboxSpec(("sleep", marker))):
            print("ready", flush=True)
            await anyio.sleep_forever()

anyio.run(main)
"""


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    with running(2) as cluster:
        cluster.wait()
        yield cluster


@asynccontextmanager
async def opened(cluster: Cluster) -> AsyncIterator[Pool]:
    """A pool over the cluster, as of a server; afterwards no actor is left, and Ray was never in our own process."""
    ledger = FakeLedger()
    ledger.id = secrets.token_hex(8)
    pool = Pool(ledger=ledger)
    async with RayNodes(pool.add_node, pool.remove_node, address=cluster.address, orphan_ttl_s=ORPHAN_TTL_S), pool:
        assert len(cluster.actors()) >= 2
        yield pool
    await until(lambda: cluster.actors() == [])
    assert "ray" not in sys.modules


class Fleet(NamedTuple):
    """A pool that several tests use, in a loop of its own."""

    pool: Pool
    portal: BlockingPortal

    def run(self, main: Callable[[], Awaitable[object]]) -> None:
        async def bounded() -> None:
            with anyio.fail_after(90):
                await main()

        self.portal.call(bounded)


@pytest.fixture(scope="module")
def fleet(cluster: Cluster) -> Iterator[Fleet]:
    with start_blocking_portal() as portal, portal.wrap_async_context_manager(opened(cluster)) as pool:
        yield Fleet(pool, portal)


@asynccontextmanager
async def found(cluster: Cluster) -> AsyncIterator[dict[str, RayNodeBackend]]:
    """The backends of all nodes, by name."""
    backends: dict[str, RayNodeBackend] = {}

    def add(node: Node) -> None:
        assert isinstance(node.backend, RayNodeBackend)
        backends[node.name] = node.backend

    def remove(name: str, cause: Cause) -> None:
        backends.pop(name, None)

    async with RayNodes(add, remove, address=cluster.address, orphan_ttl_s=ORPHAN_TTL_S):
        yield backends


@pytest.mark.detached
def test_sandboxes_on_several_nodes_behave_like_local_ones(fleet: Fleet, tmp_path: Path) -> None:
    marker = new_marker()

    async def use(sandbox: Sandbox) -> None:
        result = await sandbox.exec(["sh", "-c", "cat; id -u; nice; exit 3"], stdin=b"in ", timeout_s=20)
        assert (result.stdout, result.exit_code) == ("in 1000\n5\n", 3)
        shell = sandbox.shell()
        await shell.run("x=1; cd /tmp", timeout_s=20)
        assert (await shell.run("echo $x $PWD", timeout_s=20)).stdout == "1 /tmp\n"
        content = os.urandom(1 << 20)
        (tmp_path / sandbox.id).write_bytes(content)
        await sandbox.upload(tmp_path / sandbox.id, "/workspace/there")
        await sandbox.download("/workspace/there", tmp_path / f"{sandbox.id} again")
        assert (tmp_path / f"{sandbox.id} again").read_bytes() == content
        assert await sandbox.probe(5) < 5

    async def main() -> None:
        async with AsyncExitStack() as stack:
            lend = [stack.enter_async_context(fleet.pool.lease(SandboxSpec(("sleep", marker)))) for _ in range(4)]
            sandboxes = [await one for one in lend]
            assert len({fleet.pool.view(sandbox.id).node for sandbox in sandboxes}) == 2
            async with anyio.create_task_group() as tasks:
                for sandbox in sandboxes:
                    tasks.start_soon(use, sandbox)
            assert len(sleepers(marker)) == 4
        assert sleepers(marker) == []

    fleet.run(main)


@pytest.mark.detached
def test_what_listens_in_a_sandbox_on_another_node_is_reached(fleet: Fleet) -> None:
    async def main() -> None:
        async with fleet.pool.lease(SandboxSpec((sys.executable, "-c", SERVER))) as sandbox:
            await sandbox.exec(["sh", "-c", "until [ -e $ENVKIT_SOCKETS/door ]; do sleep 0.02; done"], timeout_s=20)
            for place in ("door", 8000):
                with anyio.fail_after(10):
                    async with await anyio.abc.SocketStream.from_socket(await sandbox.connect(place)) as stream:
                        await stream.send(b"hello")
                        assert await stream.receive() == b"HELLO"

    fleet.run(main)


@pytest.mark.detached
def test_a_node_that_is_killed_takes_its_own_sandboxes_and_one_that_is_added_gets_new_ones_and_loses_old_ones(
    cluster: Cluster, fleet: Fleet
) -> None:
    markers, others = {"a": new_marker(), "b": new_marker()}, new_marker()
    pool = fleet.pool

    async def main(local: LocalBackend) -> None:
        for name in ("a", "b"):
            await pool.create(name, SandboxSpec(("sleep", markers[name]), orphan_ttl_s=60))
        gone, kept = ("b", "a") if pool.view("a").node.endswith(cluster.head) else ("a", "b")
        node, doomed, spared = pool.view(gone).node, markers[gone], markers[kept]
        assert pool.view(kept).node != node
        other = await local.start(
            SandboxSpec(("sleep", others), detached=True, orphan_ttl_s=60, ledger="of-another-server")
        )

        async def kill() -> None:
            await clock.to_thread(cluster.kill, node[-8:])

        began = clock.now()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(kill)
            with pytest.raises(SandboxLostError) as lost:
                await pool.get(gone).exec(["sleep", "1000"], timeout_s=1000)
        assert clock.now() - began < 20
        assert str(lost.value.cause) == f"node {node} of the Ray cluster is lost"
        assert (await pool.get(kept).exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
        assert len(sleepers(doomed)) == 1  # it would wait for another server, and all nodes are on this machine
        added = await clock.to_thread(cluster.add)
        new = ""
        with anyio.fail_after(30):
            while not new.endswith(added):
                with suppress(CapacityError):
                    async with pool.lease(SandboxSpec()) as sandbox:
                        new = pool.view(sandbox.id).node
                await anyio.sleep(0.2)
        await until(lambda: sleepers(doomed) == [])
        assert len(sleepers(spared)) == len(sleepers(others)) == 1
        await other.stop()
        await pool.stop(kept)
        assert sleepers(spared) == []

    async def beside() -> None:
        async with LocalBackend() as local:
            await main(local)

    fleet.run(beside)


@pytest.mark.detached
def test_a_node_whose_actor_hangs_is_lost_though_its_connections_stand(cluster: Cluster) -> None:
    marker = new_marker()

    async def main() -> None:
        async with found(cluster) as backends:
            name, backend = min(backends.items())
            sandbox = await backend.start(SandboxSpec(("sleep", marker)))
            await until(lambda: sleepers(marker) != [])
            actor = parent(parent(agent_above(sleepers(marker)[0])))
            assert actor in cluster.actors()
            os.kill(actor, signal.SIGSTOP)
            began = clock.now()
            with pytest.raises(SandboxLostError, match=f"node {name} of the Ray cluster is lost"):
                await sandbox.exec(["true"], timeout_s=60)
            assert clock.now() - began < 20
            assert backends.get(name) is not backend
            await until(lambda: sleepers(marker) == [], 40)  # once Ray has ended the actor, which holds a channel

    run(main)


@pytest.mark.detached
def test_a_detached_sandbox_is_found_again_on_its_node_and_ends_when_it_is_stopped(cluster: Cluster) -> None:
    marker = new_marker()

    async def main() -> None:
        async with found(cluster) as backends:
            name, backend = sorted(backends.items())[0]
            assert backend.capabilities()["isolation"] is True
            sandbox = await backend.start(SandboxSpec(("sleep", marker), detached=True, orphan_ttl_s=30))
            await sandbox.write("kept", b"x")
            assert await sandbox.diagnose() == ""
            with pytest.raises(SandboxRefusedError, match="'/nowhere' is not a folder"):
                await backend.start(SandboxSpec(image="/nowhere"))
        assert len(sleepers(marker)) == 1
        async with found(cluster) as backends:
            other = await backends[name].start(SandboxSpec(detached=True, orphan_ttl_s=30, ledger="a-ledger"))
            assert await backends[name].list_detached("a-ledger") == [other.id]
            await backends[name].remove(other.id)
            assert await backends[name].list_detached("a-ledger") == []
            again = await backends[name].attach(sandbox.id)
            assert await again.read("kept") == b"x"
            await again.stop()
            assert sleepers(marker) == []
            with pytest.raises(SandboxError, match=f"there is no detached sandbox '{sandbox.id}'"):
                await backends[name].attach(sandbox.id)

    run(main)


@pytest.mark.detached
def test_of_a_server_that_is_killed_nothing_is_left(cluster: Cluster) -> None:
    marker = new_marker()
    argv = [sys.executable, "-c", DRIVER, cluster.address, marker]

    async def main() -> None:
        await until(lambda: sleepers(marker) == [], 20)
        await until(lambda: set(cluster.actors()) <= others, 20)

    others = set(cluster.actors())
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as driver:
        assert driver.stdout is not None
        assert driver.stdout.readline() == "ready\n"
        assert len(sleepers(marker)) == 1
        driver.kill()
    run(main)


@pytest.mark.detached
def test_without_its_head_a_cluster_serves_on_and_one_with_a_new_head_is_joined(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def main(old: Cluster) -> None:
        pool = Pool()
        async with RayNodes(pool.add_node, pool.remove_node, address=old.address, orphan_ttl_s=ORPHAN_TTL_S), pool:
            await pool.create("old", SandboxSpec())
            with running(1, int(old.address.rpartition(":")[2])) as new:
                await clock.to_thread(old.behead)
                await until(lambda: "the head of the Ray cluster does not answer" in caplog.text)
                assert (await pool.get("old").exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
                await pool.create("late", SandboxSpec())
                await clock.to_thread(old.freeze)
                await clock.to_thread(new.wait)
                with pytest.raises(SandboxLostError, match="another head has replaced the head of the cluster"):
                    await pool.get("old").exec(["sleep", "60"], timeout_s=60)
                made = None
                with anyio.fail_after(30):
                    while made is None:
                        with suppress(CapacityError):
                            made = await pool.create("new", SandboxSpec())
                        await anyio.sleep(0.2)
                assert (await pool.get("new").exec(["echo", "again"], timeout_s=20)).stdout == "again\n"
                await pool.stop("new")

    with running(1) as old:
        old.wait()
        run(partial(main, old), 170)


@pytest.mark.detached
def test_a_server_on_a_machine_where_ray_never_ran_joins_a_cluster(cluster: Cluster, tmp_path: Path) -> None:
    home, ray_folder = tmp_path / "home", tmp_path / "ray"
    home.mkdir()
    words = ["--backend", "ray", "--port", "0", "--set", f"ray.address={cluster.address}", "--set", "access_log=null"]
    words += ["--set", "envs.sandboxes=1", "--set", "envs.warm=0"]
    with (
        (tmp_path / "log").open("w") as log,
        subprocess.Popen(
            [sys.executable, "-m", "envkit", "serve", *words, "--state", str(tmp_path / "state")],
            env={**os.environ, "HOME": str(home), "RAY_TMPDIR": str(ray_folder)},
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
        ) as server,
    ):
        assert server.stdout is not None
        reported = server.stdout.readline()
        server.terminate()
    assert reported.startswith("ready http://127.0.0.1:"), (tmp_path / "log").read_text()
    assert not ray_folder.exists()


def test_a_cluster_that_does_not_start_gives_the_reason(tmp_path: Path) -> None:
    (tmp_path / "ray").write_text("no folder")
    broken = Cluster(str(tmp_path), 1)
    with broken.process, pytest.raises(AssertionError, match=r"the Ray cluster has ended: (?s:.*)FileExistsError"):
        broken.wait()


@pytest.mark.parametrize(
    ("address", "hint"),
    [
        ("127.0.0.1:1", "there is no Ray cluster at '127.0.0.1:1' .as given by ray.address.: .*refused; start one"),
        (
            "ray://127.0.0.1:1",
            "'ray://127.0.0.1:1' .as given by ray.address.: Ray Client is not supported; run this on",
        ),
        ("here", "'here' .as given by ray.address. is not the address of a Ray cluster; use a host and port, such as"),
    ],
)
def test_a_missing_cluster_is_reported_with_what_to_do(address: str, hint: str) -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match=hint):
            async with Connection(address):
                pass

    run(main)


def test_waiting_for_a_head_is_logged_and_can_be_cancelled_at_once(caplog: pytest.LogCaptureFixture) -> None:
    async def connect(place: str) -> None:
        async with Connection(place):
            pass

    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            place = "127.0.0.1:{1}".format(*silent.getsockname())
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(connect, place)
                reported = f"waiting for the Ray cluster at {place!r} (as given by ray.address)"
                await until(lambda: reported in caplog.text, 30)
                began = clock.now()
                tasks.cancel_scope.cancel()
            assert clock.now() - began < 4

    run(main)


def test_a_server_says_at_once_that_the_cluster_is_gone_which_the_machine_used_last(tmp_path: Path) -> None:
    left = tmp_path / "ray" / "ray_current_cluster"
    left.parent.mkdir()
    left.write_text("127.0.0.1:1\n")
    alone = ["bwrap", "--dev-bind", "/", "/", "--unshare-pid", "--proc", "/proc"]  # among no other heads
    words = ["-m", "envkit", "serve", "--backend", "ray", "--port", "0", "--state", str(tmp_path)]
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    found = subprocess.run(
        [*alone, sys.executable, *words],
        env={**environment, "RAY_TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert found.returncode == 2
    assert f"there is no Ray cluster at '127.0.0.1:1' (as given by {left}, for the last cluster" in found.stderr
    assert "Connection refused; start one (ray start --head), or name another one" in found.stderr
