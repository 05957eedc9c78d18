"""A real `envkit serve` for tests of the whole gateway, and its traces on the machine."""

from __future__ import annotations

import fcntl
import hashlib
import io
import os
import select
import signal
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import date, timedelta
from functools import cache
from pathlib import Path
from typing import Any

import anyio
import httpx
import pytest

from envkit import clock
from envkit.fleet.ledger import LeaseLedger
from envkit.runs import owners
from envkit.sandbox.bubblewrap import detached
from envkit.sandbox.host import cgroups, run_dirs
from envkit.types import SandboxSpec
from tests.contract.kinds import arguments, containers, processes, volumes
from tests.keys import key
from tests.programs.program import Program
from tests.sandbox.containers import docker, image, missing

LOCAL = pytest.param("local", marks=pytest.mark.bwrap)
DOCKER = pytest.param("docker", marks=pytest.mark.docker)

ROOT = Path(__file__).parents[3]
GAMES = "envkit-test/games"

_BUILD_S = 180
_READY_S = 180
_STOP_S = 40
_ENV_SERVER = b"envkit.wiring.env_server"


@dataclass
class Gateway:
    """A running ``envkit serve``.

    Attributes:
        kind: Its backend.
        url: Its address.
        process: The server process.
        name: Prefix of the names of its resources.
        log: File with its standard error.
        ledger: File of its ledger.
    """

    kind: str
    url: str
    process: subprocess.Popen[str]
    log: Path
    ledger: Path
    name: str = field(init=False)

    def __post_init__(self) -> None:
        self.name = owners.owner_name(self.process.pid)

    def wait_until_ready(self) -> None:
        """Wait until it reports that it is ready."""
        assert self.process.stdout is not None
        is_readable = select.select([self.process.stdout], [], [], _READY_S)[0]
        line = self.process.stdout.readline() if is_readable else ""
        assert line == f"ready {self.url}\n", self.log.read_text()

    def spec(self, *command: str, **fields: Any) -> SandboxSpec:
        """Return the spec of a sandbox that runs programs of this machine or of the test image."""
        return SandboxSpec(command, image=image() if self.kind == "docker" else None, **fields)

    @property
    def python(self) -> str:
        """Path of Python in its sandboxes."""
        return "/usr/bin/python3" if self.kind == "docker" else sys.executable

    async def get(self, path: str) -> Any:
        """Return the answer to a GET request."""
        async with self._client() as client:
            answer = await client.get(path)
            answer.raise_for_status()
            return answer.json()

    def _client(self) -> httpx.AsyncClient:
        # Reading the system's certificates, which it does not need, takes longer than many calls.
        return httpx.AsyncClient(base_url=self.url, timeout=20, verify=False)

    async def last_phase(self, id: str) -> tuple[str, str]:
        """Return the state of a sandbox and its reason."""
        phase = (await self.get(f"/v1/sandboxes/{id}"))["phases"][-1]
        return phase["state"], phase["reason"]

    async def becomes(self, id: str, state: str, timeout_s: float = 10) -> str:
        """Wait until a sandbox is in `state`; return the reason."""
        async with self._client() as client:
            deadline = clock.now() + timeout_s
            while clock.now() < deadline:
                last = (await client.get(f"/v1/sandboxes/{id}")).json()["phases"][-1]
                if last["state"] == state:
                    return str(last["reason"])
                await anyio.sleep(0.02)
        raise TimeoutError(f"{id} is {last}, expected {state}")

    async def env_sandboxes(self) -> dict[str, str]:
        """Return the backend ids of the leased sandboxes for environments, by their ids."""
        return {id: found for id, found in (await self._leased()).items() if id.startswith(":envs-")}

    async def user_sandboxes(self) -> dict[str, str]:
        """Return the backend ids of the other leased sandboxes, by their ids."""
        return {id: found for id, found in (await self._leased()).items() if not id.startswith(":envs-")}

    async def _leased(self) -> dict[str, str]:
        return await self._sandboxes("leased", "suspect")  # suspect: heartbeats may be late on a busy machine

    async def warm_sandboxes(self) -> dict[str, str]:
        """Return the backend ids of its warm sandboxes, by their ids."""
        return await self._sandboxes("ready")

    async def _sandboxes(self, *states: str) -> dict[str, str]:
        found = (await self.get("/v1/sandboxes"))["sandboxes"]
        return {one["sandbox_id"]: one["backend_id"] for one in found if one["state"] in states}

    async def seat(self, session_id: str) -> str | None:
        """Return the sandbox of a session according to the ledger."""
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / self.ledger.name
            await clock.to_thread(self._copy_ledger, copy)
            async with LeaseLedger(copy) as ledger:
                found = ledger.records.get(key(session_id))
        return None if found is None else found.sandbox_id

    def _copy_ledger(self, copy: Path) -> None:
        """Copy the ledger, which only the server may open, with its write-ahead log."""
        before = b""
        while (now := self.ledger.read_bytes()) != before:  # SQLite was writing it
            before = now
            copy.write_bytes(now)
            copy.with_name(f"{copy.name}-wal").write_bytes(
                self.ledger.with_name(f"{self.ledger.name}-wal").read_bytes()
            )

    async def wait_for_warm(self, count: int) -> None:
        """Wait until `count` warm sandboxes are ready."""
        with anyio.fail_after(30):
            while len(await self.warm_sandboxes()) < count:  # noqa: ASYNC110
                await anyio.sleep(0.02)

    async def metrics(self) -> dict[str, float]:
        """Return its metrics, by name and labels."""
        async with self._client() as client:
            lines = (await client.get("/metrics")).text.splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name: float(value) for name, value in pairs}

    def first_pid(self, sandbox_id: str) -> int:
        """Return the first process of a sandbox."""
        if self.kind == "docker":
            return int(docker("inspect", "--format", "{{.State.Pid}}", self.container(sandbox_id)))
        note = detached.find(sandbox_id)
        assert note is not None
        return note.first_pid

    def container(self, sandbox_id: str) -> str:
        """Return the container of a sandbox."""
        (found,) = docker(
            "ps", "--all", "--quiet", "--no-trunc", "--filter", f"label=envkit.sandbox={sandbox_id}"
        ).split()
        return found

    def env_server(self, sandbox_id: str) -> int:
        """Return the process of the env server in a sandbox."""
        first = self.first_pid(sandbox_id)
        return next(pid for pid in processes() if _ENV_SERVER in arguments(pid) and first in _above(pid))

    async def kill_env_sandbox(self, sandbox_id: str) -> None:
        """Kill the first process of a sandbox, and wait until its env server is gone."""
        server = self.env_server(sandbox_id)
        os.kill(self.first_pid(sandbox_id), signal.SIGKILL)
        while arguments(server):  # noqa: ASYNC110 - it may still answer until the kernel has ended it
            await anyio.sleep(0.005)

    async def end(self, signal_number: int = signal.SIGTERM) -> int:
        """Send a signal to the server and return its exit code."""
        self.process.send_signal(signal_number)
        return await self.exit_code()

    async def exit_code(self) -> int:
        return await clock.to_thread(self.process.wait, _STOP_S)

    def left(self) -> dict[str, set[str]]:
        """Return all resources of the server and its sandboxes on the machine."""
        return {
            "processes": {str(pid) for pid in processes_of(self.name)},
            "groups": {str(folder) for folder in self._groups()},
            "folders": {str(folder) for folder in self._folders()},
            "mounts": {line for line in Path("/proc/self/mounts").read_text().splitlines() if self.name in line},
            "containers": set(containers(self.process.pid)) if self.kind == "docker" else set(),
            "volumes": set(volumes(self.process.pid)) if self.kind == "docker" else set(),
        }

    def clear(self) -> None:
        """Remove all resources of the server; safe to repeat."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        for pid in processes_of(self.name):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for folder in self._folders():
            run_dirs.remove(folder)
        for group in self._groups():
            with suppress(OSError):
                group.rmdir()
        for container in containers(self.process.pid) if self.kind == "docker" else ():
            docker("rm", "--force", "--volumes", container)

    def _groups(self) -> set[Path]:
        return {folder for parent in cgroups.find().parents.values() for folder in parent.glob(f"{self.name}-*")}

    def _folders(self) -> Iterator[Path]:
        """Yield the folders of the server and of its sandboxes."""
        for folder in (folder for root in run_dirs.roots() for folder in root.glob("envkit-*")):
            with suppress(OSError):
                is_ours = folder.name.startswith(self.name)
                if is_ours or self.name in (folder / "first").read_text():
                    yield folder


NOTHING: dict[str, set[str]] = {
    name: set() for name in ("processes", "groups", "folders", "mounts", "containers", "volumes")
}


@contextmanager
def serving(
    kind: str,
    state: Path,
    *settings: str,
    port: int | None = None,
    is_awaited: bool = True,
    environments: Path | None = None,
) -> Iterator[Gateway]:
    """Run a server for the duration of the block, as from a shell.

    Args:
        kind: Its backend.
        state: Its state folder.
        settings: ``"key=value"`` settings.
        port: Its port; None chooses a free one.
        is_awaited: Whether the block starts when the server is ready.
        environments: Folder of `install_environment` with further environments.
    """
    port = port or free_port()
    log = state / f"{kind}-{port}.log"
    words = ["--backend", kind, "--port", str(port), "--state", str(state), "--set", "access_log=null"]
    env_image = None
    if kind == "docker":
        env_image = games_image() if environments is None else _games_image_with(environments)
        settings = (*settings, f"envs.image={env_image}")
    for setting in settings:
        words += ["--set", setting]
    env = {name: value for name, value in os.environ.items() if name != "ENVKIT_TOKEN"}
    if environments is not None:
        env["PYTHONPATH"] = os.pathsep.join([str(environments), *sys.path])
    with log.open("a") as errors:
        command = [sys.executable, "-m", "envkit", "serve", *words]
        process = Program(command, stdout=subprocess.PIPE, stderr=errors, text=True, env=env)
    with process:
        ledger = state / f"fleet-127.0.0.1-{port}.sqlite"
        gateway = Gateway(kind, f"http://127.0.0.1:{port}", process, log, ledger)
        try:
            if is_awaited:
                gateway.wait_until_ready()
            yield gateway
            if process.poll() is None:
                process.terminate()
                process.wait(_STOP_S)
        finally:
            gateway.clear()
            if env_image is not None and environments is not None:
                docker("image", "rm", "--force", env_image)


@cache
def games_image() -> str:
    """Return the tag of the image for env sandboxes with this envkit; build it if it is missing.

    The tag is a hash of the image's contents. Other images are removed when they are a day old.
    """
    found = hashlib.sha256(docker("image", "inspect", "--format", "{{.Id}}", image()).encode())
    for path in sorted((ROOT / "pyproject.toml", *(ROOT / "docker").glob("*.Dockerfile"), *_package_files())):
        found.update(b"%b %d\n" % (os.fsencode(path.relative_to(ROOT)), path.stat().st_size) + path.read_bytes())
    tag = f"{GAMES}:{found.hexdigest()[:16]}"
    with (Path(tempfile.gettempdir()) / f"{GAMES.replace('/', '-')}-{os.geteuid()}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test process may be building it
        if not docker("image", "ls", "--quiet", tag):
            _build_games_image(tag)
            _remove_old_games_images()
    return tag


def _package_files() -> Iterator[Path]:
    """Yield all files of envkit, including linked folders."""
    for parent, below, names in os.walk(ROOT / "envkit", followlinks=True):
        below[:] = [name for name in below if name != "__pycache__"]
        yield from (Path(parent, name) for name in names)


def _build_games_image(tag: str) -> None:
    command = [sys.executable, "-m", "envkit", "image", "build", "games", "--base", image(), "--offline", "--tag", tag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_BUILD_S, check=False)
    if done.returncode != 0:
        missing(f"no image of the games can be built here: {done.stderr.strip().splitlines()[-1]}")


def _remove_old_games_images() -> None:
    lines = docker("image", "ls", "--format", "{{.Repository}}:{{.Tag}} {{.CreatedAt}}", GAMES).splitlines()
    for tag, day, *_ in (line.split() for line in lines):
        if date.today() - date.fromisoformat(day) > timedelta(days=1):
            subprocess.run(["docker", "image", "rm", tag], capture_output=True, check=False)


def _games_image_with(environments: Path) -> str:
    """Add a folder of `install_environment` to that image, and return the id of the new image."""
    context = io.BytesIO()
    with tarfile.open(fileobj=context, mode="w", dereference=True) as archive:
        recipe = f"FROM {games_image()}\nCOPY added /opt/envkit\n".encode()
        entry = tarfile.TarInfo("Dockerfile")
        entry.size = len(recipe)
        archive.addfile(entry, io.BytesIO(recipe))
        archive.add(environments, "added", filter=_is_source)
    command = ["docker", "build", "--quiet", "-"]
    built = subprocess.run(command, input=context.getvalue(), capture_output=True, timeout=_BUILD_S, check=True)
    return built.stdout.decode().split()[-1]


def _is_source(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    return None if entry.name.endswith("__pycache__") else entry


def install_environment(folder: Path, name: str, source: str) -> None:
    """Create a ``site-packages`` folder with the environments that ``register_all`` of `source` registers."""
    folder.mkdir()
    (folder / f"{name}.py").write_text(source)
    metadata = folder / f"{name}-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[envkit.envs]\n{name} = {name}:register_all\n")


def free_port() -> int:
    """Return a free port."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def run(main: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    """Run a test's coroutine with a timeout of `timeout_s` seconds."""

    async def bounded() -> None:
        with anyio.fail_after(timeout_s):
            await main()

    clock.run(bounded)


def _above(pid: int) -> set[int]:
    """Return the ancestors of the process `pid`."""
    found: set[int] = set()
    with suppress(OSError, IndexError):
        while pid > 1:
            pid = int(Path(f"/proc/{pid}/stat").read_bytes().rpartition(b")")[2].split()[1])
            found.add(pid)
    return found


def processes_of(owner: str) -> list[int]:
    """Return the processes in sandboxes of a process with the name `owner`; see `owners.owner_name`."""
    return [pid for pid in processes() if owner in _group_names(pid)]


def _group_names(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cgroup").read_text()
    except OSError:
        return ""
