"""Tests by experiment which sandboxes this machine can run and which limits it enforces, and reports the results."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from pathlib import Path

import anyio

from envkit import __version__, clock
from envkit.errors import EnvkitError, UsageError
from envkit.installation import why_missing
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap import uid_ranges
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker import container
from envkit.sandbox.docker.api import Daemon, DaemonError
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import SandboxSpec
from envkit.wiring.sandboxes.backends import Backend

CAPABILITIES = ("isolation", "network", "memory", "pids", "cpu", "disk", "uid", "seccomp")
_PROBE_S = 20.0
_DOCKER_SOCKET = Path("/var/run/docker.sock")
_ROUNDS = 5
_PACKAGES = ("torch", "transformers", "vllm", "docker", "fastapi")
_INSTALL = {
    "docker": "apt install docker.io, and as root: dockerd &",
    "docker daemon": "as root: dockerd &",
    "docker socket": "as root: usermod -aG docker USER, and log in again",
    "groups": "run as root, or give this user a control group of its own (systemd-run --user --scope -p Delegate=yes)",
}


@dataclass(frozen=True, slots=True)
class BackendFound:
    """Capabilities of one backend on this machine.

    Attributes:
        name: ``"local"``, ``"docker"`` or ``"process"``.
        problem: Why the backend does not work, in one line; None if it works.
        capabilities: Whether the backend enforces each of `CAPABILITIES`; empty if it does not work.
        start_ms: Median time from the start of a sandbox until a program can run in it, in milliseconds.
        exec_ms: Median time of five runs of the program ``true`` in a sandbox, in milliseconds.
        remedies: Commands that install or enable missing parts, if `problem` does not name these commands.
        shared: Kernel limits that all sandboxes of this kind share; one sandbox can exhaust them for all.
        unenforced: Limits not in `CAPABILITIES` that the sandboxes do not enforce, such as ``"memory_reserve"``.
    """

    name: str
    problem: str | None
    capabilities: Mapping[str, bool] = field(default_factory=dict)
    start_ms: float | None = None
    exec_ms: float | None = None
    remedies: Sequence[str] = ()
    shared: Sequence[str] = ()
    unenforced: Sequence[str] = ()


async def examine(image: str | None) -> tuple[Sequence[BackendFound], Mapping[str, str]]:
    """Start sandboxes of every kind, and return what was found, and facts about the machine by name.

    It takes a few seconds, and all sandboxes are removed. `image` is that of the Docker sandboxes; None takes the
    backend's default.
    """
    version, shared = await _docker_daemon()
    in_docker = await _docker(image)
    if in_docker.problem is None:
        in_docker = replace(in_docker, shared=shared)
    backends = [await _local(), in_docker, await _measure("process", ProcessBackend(), None)]
    return backends, await clock.to_thread(_machine, version)


async def _local() -> BackendFound:
    why = await clock.to_thread(bubblewrap.why_unavailable)
    if why is not None:
        return BackendFound("local", why)
    found = await _measure("local", LocalBackend(), None)
    return replace(found, shared=await clock.to_thread(uid_ranges.shared))


async def _docker(image: str | None) -> BackendFound:
    if (why := why_missing("docker")) is not None:
        return BackendFound("docker", why)
    if (why := await docker.why_unavailable()) is not None:
        return BackendFound("docker", why, remedies=[_docker_remedy()])
    image = image or docker.GAMES_IMAGE
    if (why := await docker.why_unavailable(image)) is not None:
        return BackendFound("docker", why)
    return await _measure("docker", DockerBackend(), image)


def _docker_remedy() -> str:
    """Return the command that installs or starts the Docker daemon, or gives access to its socket."""
    if _DOCKER_SOCKET.exists() and not os.access(_DOCKER_SOCKET, os.W_OK):
        return _INSTALL["docker socket"]
    return _INSTALL["docker" if shutil.which("dockerd") is None else "docker daemon"]


async def _docker_daemon() -> tuple[str, Sequence[str]]:
    """Return the version of the Docker daemon, and the kernel limits that its sandboxes share."""
    try:
        async with aclosing(await Daemon.connect()) as daemon:
            return str(daemon.info.get("ServerVersion", "unknown")), container.shared(daemon)
    except (DaemonError, UsageError):
        return "no", ()


async def _measure(name: str, backend: Backend, image: str | None) -> BackendFound:
    starts, execs = [], []
    capabilities: Mapping[str, bool] = {}
    unenforced: Sequence[str] = ()
    problem = None
    try:
        with anyio.fail_after(_PROBE_S):
            async with backend:
                capabilities = backend.capabilities()
                for _ in range(_ROUNDS):
                    began = clock.now()
                    sandbox = await backend.start(SandboxSpec(image=image))
                    try:
                        unenforced = [name for name in sandbox.unenforced if name not in CAPABILITIES]
                        await sandbox.probe(_PROBE_S)
                        starts.append(clock.now() - began)
                        began = clock.now()
                        done = await sandbox.exec(["true"], timeout_s=_PROBE_S)
                        execs.append(clock.now() - began)
                        if done.exit_code != 0:
                            problem = f"'true' ended with code {done.exit_code}: {done.stderr.strip()[-200:]}"
                    finally:
                        await sandbox.stop()
    except TimeoutError:
        problem = f"no answer within {_PROBE_S:g} s"
    except (EnvkitError, OSError) as error:
        problem = " ".join(str(error).split()) or type(error).__name__
    if problem is not None:
        return BackendFound(name, problem)
    remedies = [_INSTALL["groups"]] if name == "local" and not capabilities["memory"] else []
    start_ms, exec_ms = (round(1000 * statistics.median(times), 1) for times in (starts, execs))
    return BackendFound(name, None, capabilities, start_ms, exec_ms, remedies, unenforced=unenforced)


def _machine(docker_version: str) -> dict[str, str]:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20
    free_mib = shutil.disk_usage("/tmp").free >> 20
    found = {
        "envkit": __version__,
        "python": f"{platform.python_version()} ({sys.executable})",
        "system": f"{platform.system()} {platform.release()}, {platform.machine()}",
        "user": "root" if os.geteuid() == 0 else f"uid {os.geteuid()}",
        "processors": str(os.cpu_count()),
        "memory": f"{memory:,} MiB",
        "free in /tmp": f"{free_mib:,} MiB",
        "bubblewrap": _first_line("bwrap", "--version"),
        "docker daemon": docker_version,
        "control groups": _groups(),
        "user namespaces": _first_line("unshare", "--user", "echo", "yes"),
        "own uids": uid_ranges.why_unavailable() or "yes, for each local sandbox",
        "seccomp filters": "yes" if Path("/proc/sys/kernel/seccomp/actions_avail").exists() else "no",
        "runsc": "yes" if shutil.which("runsc") else "no (only for runtime: runsc)",
        "gpu": _first_line("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"),
    }
    for package in _PACKAGES:
        try:
            version = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            version = "no"
        found[f"package {package}"] = version
    return found


def _groups() -> str:
    if Path("/sys/fs/cgroup/cgroup.controllers").exists():
        return "version 2"
    return "version 1" if Path("/sys/fs/cgroup/memory").exists() else "no"


def _first_line(*command: str) -> str:
    """Return the first line of a program's output; ``no`` if the program fails or prints nothing."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return "no"
    return (done.stdout.strip().splitlines() or ["no"])[0]
