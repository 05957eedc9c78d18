"""Images: what is built, from what, and why not."""

from __future__ import annotations

import os
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.errors import SandboxRefusedError, UsageError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.docker import image_build
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import CauseKind, SandboxSpec
from tests.contract.kinds import run
from tests.sandbox.containers import docker, image

TAG = f"envkit-test/python:{os.getpid()}"  # workers test at once


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """A package of one module."""
    path = tmp_path / "speaker-1.0-py3-none-any.whl"
    info = "speaker-1.0.dist-info"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("speaker.py", "print('spoken')\n")
        archive.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: speaker\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    return path


@pytest.fixture
def tag() -> Iterator[str]:
    yield TAG
    if docker("images", "--quiet", TAG):
        docker("rmi", TAG)


def stages() -> set[str]:
    """Ids of the images of build stages; a set, since Docker's order differs between calls."""
    return set(docker("images", "--all", "--quiet", "--filter", "label=envkit.stage").split())


async def build(name: str, base: str | None = None, packages: tuple[str, ...] = ()) -> list[str]:
    reported: list[str] = []
    assert (
        await image_build.build(name, base=base, offline=True, packages=packages, tag=TAG, announce=reported.append)
        == TAG
    )
    return reported


@pytest.mark.docker
def test_a_missing_base_is_refused_offline() -> None:
    async def main() -> None:
        with pytest.raises(UsageError, match="there is no image 'no/such:1' here"):
            await build("python", base="no/such:1")

    run(main)


@pytest.mark.alone  # other builds leave stages while they run
@pytest.mark.docker
def test_an_image_holds_the_packages_that_were_named_and_leaves_no_stage_behind(wheel: Path, tag: str) -> None:
    async def main() -> None:
        before = stages()
        reported = await build("python", base=image(), packages=(str(wheel),))
        assert any("FROM" in line for line in reported)
        assert stages() == before
        async with DockerBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=tag, untrusted=True))
            assert isinstance(sandbox, AgentSandbox)
            result = await sandbox.exec(["python3", "-c", "import speaker"], timeout_s=20)
            assert (result.stdout, result.stderr) == ("spoken\n", "")

    run(main)


@pytest.mark.docker
def test_an_image_without_python_is_refused_with_what_to_add(tmp_path: Path, tag: str) -> None:
    remove = "rm -f /usr/bin/python3* /usr/local/bin/python*"
    Path(tmp_path, "Dockerfile").write_text(f"FROM {image()}\nRUN {remove}\n")
    docker("build", "--quiet", "--network", "none", "--tag", tag, str(tmp_path))

    async def main() -> None:
        async with DockerBackend() as backend:
            with pytest.raises(SandboxRefusedError, match=r"no python3 on its PATH.*add Python 3.8") as refused:
                await backend.start(SandboxSpec(image=tag))
            assert refused.value.cause.kind is CauseKind.IMAGE_UNUSABLE

    run(main)
