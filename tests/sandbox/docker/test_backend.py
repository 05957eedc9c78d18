"""Sandboxes of Docker: their life, their end and its cause, and that nothing is left of them."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    SandboxError,
    SandboxLostError,
    SandboxRefusedError,
)
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.docker.api import Daemon
from envkit.sandbox.docker.backend import DockerBackend, why_unavailable
from envkit.types import JSON, SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.containers import containers_of, docker, image

pytestmark = pytest.mark.docker


async def started(backend: DockerBackend, spec: SandboxSpec) -> AgentSandbox:
    sandbox = await backend.start(spec)
    assert isinstance(sandbox, AgentSandbox)
    return sandbox


def test_a_container_that_somebody_removes_is_seen_within_two_seconds() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, SandboxSpec(image=image()))
            await clock.to_thread(docker, "rm", "--force", "--volumes", *containers_of(sandbox.id))
            with anyio.fail_after(2):
                assert str(await sandbox.wait()) == "removed"
            with pytest.raises(SandboxLostError, match=f"{sandbox.id} lost: removed"):
                await sandbox.exec(["true"], timeout_s=5)

    run(main)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        (SandboxSpec(image="no/such:1"), r"there is no image 'no/such:1' here \(docker pull no/such:1, or "),
        (SandboxSpec(image="No Such"), "invalid reference format"),
        (SandboxSpec(runtime="no-such"), "Docker has no runtime 'no-such', only .*runc"),
        (SandboxSpec(profile="system", untrusted=True), "profile 'system' does not enforce disk, uid"),
        (SandboxSpec(network="open", untrusted=True), "an open network does not enforce network"),
        (SandboxSpec(cpus=100_000), "CPUs"),
    ],
)
def test_what_cannot_be_had_is_refused_with_the_reason(spec: SandboxSpec, why: str) -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            with pytest.raises(SandboxRefusedError, match=why):
                await backend.start(replace(spec, image=spec.image or image()))

    run(main)


def test_the_system_profile_has_a_root_that_can_write_and_names_what_it_gives_up() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            sandbox = await started(backend, SandboxSpec(image=image(), profile="system"))
            assert {"uid", "memory_reserve"} <= set(sandbox.unenforced)
            result = await sandbox.exec(
                ["sh", "-c", "id -u; echo new > /usr/local/file; mknod /tmp/d b 8 0"], timeout_s=20
            )
            assert result.stdout == "0\n"
            assert "Operation not permitted" in result.stderr
            await sandbox.write(f"{sandbox.grader_home}/key", b"42", user="grader")
            assert await sandbox.read(f"{sandbox.grader_home}/key") == b"42"  # one user is all that there is
            name = await sandbox.snapshot()
            again = await backend.restore(name, SandboxSpec(profile="system"))
            assert await again.read("/usr/local/file") == b"new\n"
        assert name not in docker("images", "--all", "--quiet", "--no-trunc").splitlines()

    run(main)


def test_a_daemon_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    async def main() -> None:
        assert await why_unavailable() == "no Docker daemon answers: No such file or directory"
        with pytest.raises(SandboxError, match="no Docker daemon answers"):
            await DockerBackend().__aenter__()

    monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/no.sock")
    run(main)


def test_a_daemon_behind_tls_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    async def main() -> None:
        why = await why_unavailable()
        assert why is not None
        assert "uses ssh" in why
        assert "ssh -L" in why

    monkeypatch.setenv("DOCKER_HOST", "ssh://somebody@nowhere.invalid")
    run(main)


def test_removing_a_container_that_is_being_removed_waits_until_it_is_gone() -> None:
    labels: dict[str, JSON] = {"envkit.test": f"removal-{os.getpid()}"}
    options: dict[str, JSON] = {"Image": image(), "Cmd": ["sleep", "60"], "Labels": labels}

    async def main() -> None:
        daemon = await Daemon.connect()
        for is_started in (False, True, True):
            container = await daemon.create(options)
            if is_started:
                await daemon.start(container)

            async def remove(container: str = container) -> None:
                await daemon.remove(container)
                assert await daemon.inspect(container) is None

            async with anyio.create_task_group() as tasks:
                for _ in range(4):
                    tasks.start_soon(remove)
        await daemon.remove("no-such-container")
        await daemon.aclose()

    run(main)
