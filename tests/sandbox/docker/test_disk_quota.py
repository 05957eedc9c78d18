"""What Docker sandboxes whose root file system can be written take of the daemon's disk, alive and as snapshots."""

from __future__ import annotations

import os
import signal

import anyio
import pytest

from envkit.errors import SandboxError, SandboxLostError, SandboxStartError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.containers import containers_of, docker, image

pytestmark = [
    pytest.mark.docker,
    pytest.mark.skipif(os.geteuid() != 0, reason="only root can watch what a sandbox writes"),
]


async def started(backend: DockerBackend, disk_mib: int) -> AgentSandbox:
    sandbox = await backend.start(SandboxSpec(image=image(), profile="system", disk_mib=disk_mib))
    assert isinstance(sandbox, AgentSandbox)
    return sandbox


async def lost(sandbox: AgentSandbox, *lines: str) -> str:
    """Return why a sandbox is lost that runs a script."""
    with pytest.raises(SandboxLostError) as caught:
        await sandbox.exec(["sh", "-c", "\n".join(lines)], timeout_s=30)
    return str(caught.value)


def taken_mib(cause: str) -> int:
    return int(cause.partition("its files take ")[2].partition(" MiB")[0])


@pytest.mark.parametrize("place", ["/f$n", "/etc/hosts"])
def test_a_sandbox_that_fills_its_root_is_ended_soon_after_its_bound(place: str) -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=100)
            fill = f"while n=$((n+1)); do dd if=/dev/zero of={place} bs=1M count=60 oflag=append conv=notrunc; done"
            cause = await lost(sandbox, "dd if=/dev/zero of=/var/first bs=1M count=50", fill)
            assert cause.endswith("more than disk_mib=100")
            assert 100 < taken_mib(cause) < 400
        assert containers_of(sandbox.id) == []

    run(main)


def test_a_sandbox_says_how_much_of_its_bound_it_has_written_and_its_snapshots_how_large_they_are() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=100)
            await sandbox.exec(["dd", "if=/dev/zero", "of=/var/large", "bs=1M", "count=95"], timeout_s=30)
            with anyio.fail_after(20):
                while (await sandbox.stats())["disk_percent"] not in range(90, 101):  # noqa: ASYNC110 - nobody tells
                    await anyio.sleep(0.1)
            assert (await sandbox.stats())["disk_place"] == "/"
            name = await sandbox.snapshot()
            assert 95 << 20 <= await backend.snapshot_bytes(name) < 100 << 20
            await backend.remove_snapshot(name)
            assert await backend.snapshot_bytes(name) == 0
            with pytest.raises(SandboxStartError, match="there is no snapshot"):
                await backend.restore(name, SandboxSpec(profile="system", disk_mib=100))

    run(main)


def test_files_that_are_deleted_and_still_open_or_run_count() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=60)
            fill = "dd if=/dev/zero bs=1M count=25"
            grow = f"exec 3>/a 4>/b; rm /a /b; {fill} >&3; {fill} >&4"
            cause = await lost(sandbox, grow, f"cp /bin/sleep /c; {fill} >> /c; /c 20 & sleep 0.3; rm /c", "wait")
            assert 60 < taken_mib(cause) < 100

    run(main)


def test_a_sandbox_with_very_many_files_is_ended() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=20)
            many = "import os\nn = 0\nwhile True: os.mknod('/var/%d' % n); n += 1"
            cause = await lost(sandbox, f'python3 -c "{many}"')
            assert "files, more than the limit 5120 for disk_mib=20" in cause

    run(main)


def test_no_file_is_larger_than_the_bound_and_a_sandbox_below_it_runs_on() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=20)
            result = await sandbox.exec(["sh", "-c", "truncate -s 20M /f && rm /f; truncate -s 21M /f"], timeout_s=20)
            assert result.exit_code == 128 + signal.SIGXFSZ
            for _ in range(4):
                fill = "dd if=/dev/zero of=/f bs=1M count=15; rm /f"
                assert (await sandbox.exec(["sh", "-c", fill], timeout_s=20)).exit_code == 0
            await anyio.sleep(0.6)
            assert await sandbox.probe(5) < 5

    run(main)


def test_a_snapshot_of_a_root_counts_holes_too_and_leaves_nothing_when_it_is_refused() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, disk_mib=20)
            await sandbox.exec(["sh", "-c", "for n in 1 2; do truncate -s 15M /f$n; done"], timeout_s=20)
            images = set(docker("images", "--all", "--quiet").split())
            with pytest.raises(
                SandboxError, match=r"no snapshot: the files of the sandbox take 30 MiB \(limit 20 MiB\)"
            ):
                await sandbox.snapshot()
            assert set(docker("images", "--all", "--quiet").split()) == images
            await sandbox.exec(["sh", "-c", "rm /f2"], timeout_s=20)  # it is not left standing still
            again = await backend.restore(await sandbox.snapshot(), SandboxSpec(profile="system", disk_mib=20))
            assert (await again.exec(["stat", "-c", "%s", "/f1"], timeout_s=20)).stdout == "15728640\n"

    run(main)


def test_a_detached_sandbox_is_monitored_after_it_is_attached_again() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            spec = SandboxSpec(image=image(), profile="system", disk_mib=30, detached=True, ttl_s=60)
            sandbox = await backend.start(spec)
        async with DockerBackend() as backend:
            again = await backend.attach(sandbox.id)
            fill = "for n in 1 2 3; do dd if=/dev/zero of=/f$n bs=1M count=20; done; sleep 20"
            assert (await lost(again, fill)).endswith("more than disk_mib=30")

    run(main)
