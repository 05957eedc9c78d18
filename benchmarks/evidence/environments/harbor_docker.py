"""Sandboxes for Harbor: plain Docker containers, for machines without docker compose.

    PYTHONPATH=FOLDER harbor run -e harbor_docker:PlainDocker ...

It needs Harbor, not envkit. ENVKIT_BASE is the base image of Dockerfiles with ``ARG BASE``.
"""

from __future__ import annotations

import asyncio
import hashlib
import os
from pathlib import Path

from harbor.environments.base import BaseEnvironment, ExecResult  # type: ignore[import-not-found]
from harbor.environments.capabilities import EnvironmentCapabilities  # type: ignore[import-not-found]

LABEL = "envkit.harbor"


async def docker(*words: str, timeout_s: float | None = None) -> tuple[int, str, str]:
    """Run the Docker CLI, with the builder of all versions; return its exit code, output and errors."""
    process = await asyncio.create_subprocess_exec(
        "docker", *words, stdout=-1, stderr=-1, env={**os.environ, "DOCKER_BUILDKIT": "0"}
    )
    out, err = await asyncio.wait_for(process.communicate(), timeout_s)
    return process.returncode or 0, out.decode(errors="replace"), err.decode(errors="replace")


async def checked(*words: str) -> str:
    code, out, err = await docker(*words)
    if code != 0:
        raise RuntimeError(f"docker {words[0]} failed: {err[-2000:]}")
    return out.strip()


class PlainDocker(BaseEnvironment):  # type: ignore[misc]
    """A container of one task."""

    @staticmethod
    def type() -> str:
        return "plain-docker"

    @property
    def capabilities(self) -> EnvironmentCapabilities:
        return EnvironmentCapabilities(disable_internet=True)

    def _validate_definition(self) -> None:
        if not self.task_env_config.docker_image and not (self.environment_dir / "Dockerfile").is_file():
            raise FileNotFoundError(f"{self.environment_dir} has no Dockerfile")

    async def start(self, force_build: bool) -> None:
        config = self.task_env_config
        image = config.docker_image
        if not image:
            image = f"envkit/harbor:{hashlib.sha256(str(self.environment_dir).encode()).hexdigest()[:16]}"
            base = os.environ.get("ENVKIT_BASE")
            options = ["--build-arg", f"BASE={base}"] if base else []
            await checked("build", "--network=host", "--quiet", "--tag", image, *options, str(self.environment_dir))
        network = ["--network=none"] if self._network_disabled else []
        env = [f"--env={name}={value}" for name, value in self._startup_env().items()]
        run = ("run", "--detach", f"--label={LABEL}", *network, *env)
        self._container = await checked(*run, image, "sh", "-c", "sleep infinity")
        folders = "/logs/agent /logs/verifier /logs/artifacts /tests /solution"
        await self.exec(f"mkdir -p {folders} && chmod 777 {folders}", user="root")
        await self._upload_environment_dir_after_start()

    async def stop(self, delete: bool) -> None:
        await docker("rm", "--force", "--volumes", self._container)

    async def exec(
        self,
        command: str,
        cwd: str | None = None,
        env: dict[str, str] | None = None,
        timeout_sec: int | None = None,
        user: str | int | None = None,
    ) -> ExecResult:
        user, cwd = self._resolve_user(user), cwd or self.task_env_config.workdir
        options = [f"--env={name}={value}" for name, value in (self._merge_env(env) or {}).items()]
        options += [f"--workdir={cwd}"] if cwd else []
        options += [f"--user={user}"] if user is not None else []
        code, out, err = await docker("exec", *options, self._container, "bash", "-c", command, timeout_s=timeout_sec)
        return ExecResult(stdout=out, stderr=err, return_code=code)

    async def upload_file(self, source_path: Path | str, target_path: str) -> None:
        await checked("cp", str(source_path), f"{self._container}:{target_path}")

    async def upload_dir(self, source_dir: Path | str, target_dir: str) -> None:
        await self.exec(f"mkdir -p {target_dir}", user="root")
        await checked("cp", f"{source_dir}/.", f"{self._container}:{target_dir}")

    async def download_file(self, source_path: str, target_path: Path | str) -> None:
        await checked("cp", f"{self._container}:{source_path}", str(target_path))

    async def download_dir(self, source_dir: str, target_dir: Path | str) -> None:
        await asyncio.to_thread(os.makedirs, target_dir, exist_ok=True)
        await checked("cp", f"{self._container}:{source_dir}/.", str(target_dir))
