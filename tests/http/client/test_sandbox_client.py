"""Remote sandboxes of the client, where they differ from local ones."""

from __future__ import annotations

import anyio
import httpx
import pytest

import envkit
from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    SandboxConflictError,
    SandboxLostError,
    SandboxNotFoundError,
    SandboxRefusedError,
    TooLargeError,
    UnreachableError,
    UnsupportedError,
    UsageError,
)
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Capacity, Node
from envkit.types import CauseKind, SandboxSpec, SandboxState
from tests.causes import cause
from tests.http.envs import serving, slots
from tests.http.pools import pool_of
from tests.http.remote_sandboxes import Relay, by_client, scripted
from tests.sandbox.fake.backend import FakeBackend

SPEC = SandboxSpec(env={"SIZE": "5"}, memory_mib=64, network=("example.org",), ttl_s=600)


def test_a_lease_lasts_for_its_block() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        async with client.lease(SPEC) as leased:
            sandbox: Sandbox = leased
            assert (await sandbox.exec(["echo", "hi"], timeout_s=5)).stdout == "echo hi"
            (view,) = await client.views()
            assert (view.id, view.state, view.spec) == (sandbox.id, SandboxState.LEASED, SPEC)
        assert (await client.view(sandbox.id)).state is SandboxState.STOPPED
        with pytest.raises(SandboxLostError, match="lost: stopped"):
            await sandbox.exec(["echo"], timeout_s=5)
        assert str(await sandbox.wait()) == "stopped"

    by_client(main)


def test_a_rejection_by_the_server_raises_the_same_error() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        with pytest.raises(SandboxRefusedError, match=r"cpus=0\.5 is refused: this backend cannot limit cpu") as caught:
            async with client.lease(SandboxSpec(cpus=0.5)):
                pytest.fail("it was not rejected")
        assert not caught.value.everywhere
        with pytest.raises(SandboxRefusedError, match="'A=' is not a valid variable name") as caught:
            await client.create("odd", SandboxSpec(env={"A=": ""}))
        assert caught.value.everywhere

    by_client(main, FakeBackend(capabilities={"cpu": False}))


def test_a_block_that_fails_stops_its_sandbox_and_keeps_its_error() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        with pytest.raises(ZeroDivisionError):
            async with client.lease(SPEC):
                raise ZeroDivisionError
        with anyio.move_on_after(0.2):
            async with client.lease(SPEC):
                await anyio.sleep(10)
        assert [view.state for view in await client.views()] == [SandboxState.STOPPED] * 2

    by_client(main)


@pytest.mark.parametrize("start_s", [0.0, 30.0])
def test_a_task_cancelled_with_its_client_leaves_no_sandbox(start_s: float) -> None:
    async def main() -> None:
        async with (
            scripted(start_s=start_s) as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool) as address,
        ):
            with anyio.CancelScope() as scope:
                async with SandboxClient(address) as client, anyio.create_task_group() as tasks:
                    tasks.start_soon(use, client)
                    while not pool.views():  # noqa: ASYNC110
                        await anyio.sleep(0.01)
                    scope.cancel()
            assert {view.state for view in pool.views()} <= {SandboxState.STOPPED}
            assert pool.counts().states == {}

    async def use(client: SandboxClient) -> None:
        async with client.lease(SPEC):
            await anyio.sleep_forever()

    clock.run(main)


def test_a_named_sandbox_is_shared_by_all_clients() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        made = await client.create("mine", SPEC)
        assert (await client.create("mine", SPEC)).backend_id == made.backend_id
        with pytest.raises(SandboxConflictError):
            await client.create("mine", SandboxSpec())
        await client.get("mine").write("one", b"1")
        assert await client.get("mine").read("one") == b"1"
        await client.stop("mine")
        await client.stop("mine")
        await client.stop("nobody")
        with pytest.raises(SandboxLostError, match="sandbox nobody lost: there is no sandbox 'nobody'"):
            await client.get("nobody").read("one")
        with pytest.raises(SandboxNotFoundError):
            await client.view("nobody")

    by_client(main)


def test_a_sandbox_that_dies_reports_its_cause_to_all_waiters() -> None:
    backend = scripted()

    async def main(client: SandboxClient, pool: Pool) -> None:
        found = cause("out of luck", CauseKind.OUT_OF_MEMORY, by_agent=True)
        async with client.lease(SPEC) as sandbox:
            causes = []

            async def wait() -> None:
                causes.append(await sandbox.wait())

            async def work() -> None:
                with pytest.raises(SandboxLostError, match="lost: out of luck") as caught:
                    await sandbox.exec(["sleep", "20"], timeout_s=30)
                causes.append(caught.value.cause)

            async with anyio.create_task_group() as tasks:
                tasks.start_soon(wait)
                tasks.start_soon(work)
                await anyio.sleep(0.2)
                backend.sandboxes[0].die(found)
            assert causes == [found, found]

    by_client(main, backend)


def test_an_unanswered_probe_times_out() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        async with client.lease(SPEC) as sandbox:
            with pytest.raises(DeadlineError):
                await sandbox.probe(0.2)

    by_client(main, scripted(hangs_after_s=0.0))


def test_a_client_rejects_what_only_a_pool_or_a_backend_can_do() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        with pytest.raises(UsageError, match="omit tenant"):
            async with client.lease(SPEC, tenant="acme"):
                pass
        with pytest.raises(UsageError, match="omit detached"):
            await client.create("x", SandboxSpec(detached=True))

    by_client(main)


async def until_waiting(pool: Pool, waiting: dict[str, int]) -> None:
    with anyio.fail_after(10):
        while pool.counts().waiting != waiting:  # noqa: ASYNC110
            await anyio.sleep(0.01)


def test_a_waiting_create_queues_and_counts_as_wanted() -> None:
    async def run() -> None:
        order: list[str] = []

        async def wait(client: SandboxClient, name: str) -> None:
            async with client.lease(SandboxSpec(), wait_s=20):
                order.append(name)

        async with (
            scripted() as backend,
            slots() as host,
            Pool([Node("here", backend, Capacity(sandboxes=1))]) as pool,
            serving(host, pool=pool) as address,
            SandboxClient(address) as client,
        ):
            async with anyio.create_task_group() as tasks, client.lease(SandboxSpec()):
                for number, name in enumerate(("first", "second", "third"), 1):
                    tasks.start_soon(wait, client, name)
                    await until_waiting(pool, {"": number})
                assert pool.wanted() == 3
            assert order == ["first", "second", "third"]
            async with client.lease(SandboxSpec()):
                with pytest.raises(CapacityError):
                    async with client.lease(SandboxSpec(), wait_s=0.1):
                        pass
            async with client.lease(SandboxSpec()) as sandbox:
                with pytest.raises(UnsupportedError, match="created without a folder transport"):
                    await sandbox.download("x", None)  # type: ignore[arg-type]

    clock.run(run)


def test_a_waiting_create_does_not_delay_a_shutdown() -> None:
    async def run() -> None:
        async def wait(address: str) -> None:
            async with httpx.AsyncClient(base_url=address, trust_env=False, timeout=60) as http:
                reply = await http.put("/v1/sandboxes/b", json={"wait_s": 50})
                assert (reply.status_code, reply.json()["type"]) == (503, "unreachable")

        async with (
            scripted() as backend,
            slots() as host,
            Pool([Node("here", backend, Capacity(sandboxes=1))]) as pool,
            anyio.create_task_group() as tasks,
        ):
            async with serving(host, pool=pool, drain_s=40, slow_reset_s=60) as address:
                await pool.create("a", SandboxSpec())
                tasks.start_soon(wait, address)
                await until_waiting(pool, {"": 1})
                began = clock.now()
            assert clock.now() - began < 20

    clock.run(run)


def test_a_broken_socket_loses_no_call_and_repeats_none() -> None:
    async def run() -> None:
        async with (
            scripted() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool) as address,
            Relay(address) as relay,
            SandboxClient(relay.address) as client,
            client.lease(SPEC) as sandbox,
        ):
            outputs = []

            async def count(key: int) -> None:
                outputs.append((await sandbox.exec(["count", "0.3"], timeout_s=5)).stdout)
                outputs.append((await sandbox.shell(f"s{key}").run("count 0.1", timeout_s=5)).stdout)

            async with anyio.create_task_group() as tasks:
                for key in range(4):
                    tasks.start_soon(count, key)
                await anyio.sleep(0.1)
                relay.cut()
                await anyio.sleep(0.25)
                relay.cut()
            assert sorted(outputs) == [str(number) for number in range(1, 9)]
            relay.close()
            with pytest.raises(UnreachableError):
                await sandbox.exec(["true"], timeout_s=5)

    clock.run(run)


@pytest.mark.bwrap
def test_data_larger_than_a_frame_passes_both_ways() -> None:
    async def main(client: SandboxClient, pool: Pool) -> None:
        async with client.lease(SandboxSpec(memory_mib=512)) as sandbox:
            content = bytes(range(256)) * (20 << 12)  # 20 MiB
            await sandbox.write("file", content)
            assert await sandbox.read("file") == content
            done = await sandbox.exec(["cat"], stdin=content, timeout_s=20, max_output_bytes=len(content))
            assert done.stdout_bytes == content
            with pytest.raises(TooLargeError):
                await sandbox.read("file", max_bytes=len(content) - 1)
            with pytest.raises(TooLargeError):
                await sandbox.read("\n" * 600_000)
            with pytest.raises(TooLargeError):
                await sandbox.exec(["cat"], stdin=content * 2, timeout_s=20)
            shown = await sandbox.shell().run("cat file", timeout_s=20, max_output_bytes=len(content))
            assert shown.stdout_bytes == content

    by_client(main, LocalBackend())


def test_an_open_socket_renews_the_leases_of_its_sandboxes_and_a_closed_one_does_not() -> None:
    async def main() -> None:
        async with (
            scripted() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool) as address,
        ):
            async with SandboxClient(address) as client:
                await client.create("a", SPEC, ttl_s=1.5)
                await anyio.sleep(3)
                assert pool.view("a").state is SandboxState.LEASED
            with anyio.fail_after(10):
                while pool.view("a").state is SandboxState.LEASED:  # noqa: ASYNC110
                    await anyio.sleep(0.05)

    clock.run(main)


def test_a_blocking_sandbox_can_be_remote() -> None:
    async def main(address: str) -> None:
        def use() -> None:
            with envkit.open_sandbox(url=address, memory_mib=64) as sandbox:
                assert sandbox.exec(["echo", "hi"], timeout_s=5).stdout == "echo hi"
                assert sandbox.shell().run("echo ho", timeout_s=5).stdout == "echo ho"
                sandbox.write("one", "text")
                kept = sandbox.snapshot()
                sandbox.write("one", "later")
                with sandbox.restore(kept) as other:
                    assert other.read("one") == b"text"
                with pytest.raises(UnsupportedError):
                    _ = sandbox.unenforced
            with pytest.raises(SandboxLostError):
                sandbox.read("one")
            with pytest.raises(UsageError, match="leave out backend or url"):
                envkit.open_sandbox("local", url=address)
            with pytest.raises(UsageError, match="token and ca are only for a server"):
                envkit.open_sandbox(token="ek_x")

        await clock.to_thread(use)

    async def run() -> None:
        async with scripted() as backend, slots() as host, pool_of(backend) as pool:
            async with serving(host, pool=pool) as address:
                await main(address)
            assert {view.state for view in pool.views()} == {SandboxState.STOPPED}

    clock.run(run)
