"""Sandboxes of other projects: SWE-ReX, and ROCK with its server. Their packages are imported when they start.

ROCK's programs run from a separate virtual environment, `ROCK_FOLDER`.

A wrapper replaces ``docker``, so that ROCK's and SWE-ReX's containers publish their ports only on 127.0.0.1. It
also removes ``--privileged``, which ROCK always passes and many machines reject. It changes nothing else.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import sysconfig
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager, suppress
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Protocol

import anyio
from waiting import FailedCallError

from envkit import clock

FILE = "/tmp/envkit-benchmark"

_DOCKER = """#!/bin/sh
before=
for word do
    shift
    [ "$word" = --privileged ] && continue
    [ "$before" = -p ] && word=127.0.0.1:$word
    before=$word
    set -- "$@" "$word"
done
exec {docker} "$@"
"""
_START_TIMEOUT_S = 180.0
ROCK_FOLDER = Path(__file__).resolve().parents[2] / ".venv" / "rock"
ROCK_ROUTES = "/apis/envs/sandbox/v1/"


class Contestant(Protocol):
    """One sandbox, used as its project intends."""

    async def execute(self, *argv: str) -> None:
        """Run a program that succeeds."""
        ...

    async def step(self, shell: int) -> None:
        """Run ``true`` in a shell that is already open."""
        ...

    async def open_shell(self, shell: int) -> None: ...

    async def write(self, content: bytes) -> None: ...

    async def read(self) -> bytes: ...


class MissingPeerError(Exception):
    """A peer is not installed, or did not start."""


@contextmanager
def docker_on_loopback(docker: str) -> Iterator[None]:
    """Make programs started in the block use a ``docker`` that publishes ports only on 127.0.0.1."""
    path = os.environ["PATH"]
    with TemporaryDirectory(prefix="envkit-bench-") as folder:
        program = Path(folder, "docker")
        program.write_text(_DOCKER.format(docker=docker))
        program.chmod(0o755)
        os.environ["PATH"] = f"{folder}:{path}"
        try:
            yield
        finally:
            os.environ["PATH"] = path


class SweRex:
    """A container of SWE-ReX with its own client, which opens a connection for every call."""

    def __init__(self, runtime: Any) -> None:
        self._runtime = runtime
        self._words = import_module("swerex.runtime.abstract")

    async def execute(self, *argv: str) -> None:
        answer = await self._call("execute", "Command", command=list(argv))
        _expect(answer.exit_code == 0, answer)

    async def open_shell(self, shell: int) -> None:
        await self._call("create_session", "CreateBashSessionRequest", session=str(shell))

    async def step(self, shell: int) -> None:
        answer = await self._call("run_in_session", "BashAction", command="true", session=str(shell))
        _expect(answer.exit_code == 0, answer)

    async def write(self, content: bytes) -> None:
        await self._call("write_file", "WriteFileRequest", path=FILE, content=content.decode())

    async def read(self) -> bytes:
        answer = await self._call("read_file", "ReadFileRequest", path=FILE)
        return str(answer.content).encode()

    async def _call(self, name: str, request: str, **fields: object) -> Any:
        try:
            return await getattr(self._runtime, name)(getattr(self._words, request)(**fields))
        except Exception as error:  # the client raises the server's exceptions
            raise FailedCallError(f"{type(error).__name__}: {error}") from error


@asynccontextmanager
async def swerex(image: str) -> AsyncIterator[SweRex]:
    """Start a container of SWE-ReX with this interpreter's packages mounted.

    Raises:
        MissingPeerError: SWE-ReX is not installed, or did not start.
    """
    _installed("swerex")
    logging.getLogger("aiohttp").setLevel(logging.CRITICAL)
    os.environ.setdefault("SWE_REX_LOG_STREAM_LEVEL", "CRITICAL")
    mounts = [word for path in (sys.base_prefix, sys.prefix) for word in ("-v", f"{path}:{path}:ro")]
    path = f"PATH={sys.prefix}/bin:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
    deployment = import_module("swerex.deployment.docker").DockerDeployment(
        image=image, pull="never", docker_args=[*mounts, "-e", path], startup_timeout=_START_TIMEOUT_S
    )
    try:
        await deployment.start()
    except Exception as error:
        raise MissingPeerError(f"did not start: {error}") from error
    try:
        yield SweRex(deployment.runtime)
    finally:
        await deployment.stop()


class Rock:
    """A sandbox of ROCK, with one persistent connection per caller; ROCK's own client opens one for every call."""

    def __init__(self, http: Any, sandbox_id: str) -> None:
        self._http = http
        self.id = sandbox_id

    async def execute(self, *argv: str) -> None:
        answer = await self.call("execute", command=list(argv))
        _expect(answer["exit_code"] == 0, answer)

    async def open_shell(self, shell: int) -> None:
        await self.call("create_session", session=str(shell))

    async def step(self, shell: int) -> None:
        answer = await self.call("run_in_session", command="true", session=str(shell), action_type="bash")
        _expect(answer["exit_code"] == 0, answer)

    async def write(self, content: bytes) -> None:
        await self.call("write_file", path=FILE, content=content.decode())

    async def read(self) -> bytes:
        return str((await self.call("read_file", path=FILE))["content"]).encode()

    async def stop(self) -> None:
        await self.call("stop")

    async def call(self, name: str, **fields: object) -> Any:
        return await _ask(self._http, name, {"sandbox_id": self.id, **fields})


@asynccontextmanager
async def rock(url: str | None, image: str) -> AsyncIterator[Rock]:
    """Start a sandbox of a ROCK server.

    Args:
        url: Address of the server; None starts a server.
        image: Image of the sandbox.

    Raises:
        MissingPeerError: ROCK is not installed, or did not start.
    """
    if url is None:
        async with rock_server() as own, rock(own, image) as contestant:
            yield contestant
        return
    _installed("aiohttp")
    aiohttp = import_module("aiohttp")
    async with aiohttp.ClientSession(url.rstrip("/") + ROCK_ROUTES) as http:
        try:
            contestant = await start_rock(http, image)
        except (OSError, FailedCallError) as error:
            raise MissingPeerError(str(error)) from error
        try:
            yield contestant
        finally:
            with anyio.CancelScope(shield=True):
                await contestant.stop()


async def start_rock(http: Any, image: str, *, cpus: float = 0.5) -> Rock:
    """Start a sandbox and wait until it is alive, with frequent polling.

    Args:
        http: An aiohttp session whose base URL is the server's API.
        image: Image of the sandbox.
        cpus: Number of CPUs to reserve for the sandbox, which may use at least two.

    Raises:
        FailedCallError: The server rejected the request.
        MissingPeerError: The sandbox did not start.
    """
    spec = {"image": image, "memory": "512m", "cpus": cpus, "limit_cpus": max(cpus, 2.0), "disk": None}
    sandbox_id = (await _ask(http, "start_async", {**spec, "startup_timeout": 600}))["sandbox_id"]
    contestant = Rock(http, sandbox_id)
    try:
        await _until_alive(http, sandbox_id)
    except BaseException:
        with anyio.CancelScope(shield=True):
            await contestant.stop()
        raise
    return contestant


async def _ask(http: Any, name: str, body: Mapping[str, object]) -> Any:
    async with http.post(name, json=body) as response:
        answer = await response.json()
    if answer.get("status") != "Success":
        raise FailedCallError(str(answer.get("error") or answer))
    return answer["result"]


async def _until_alive(http: Any, sandbox_id: str) -> None:
    answer = None
    with anyio.move_on_after(_START_TIMEOUT_S):
        while True:
            async with http.get("get_status", params={"sandbox_id": sandbox_id}) as response:
                answer = await response.json()
            if answer.get("status") == "Success" and answer["result"]["is_alive"]:
                return
            await anyio.sleep(0.2)
    raise MissingPeerError(f"ROCK's sandbox did not start: {answer}")


@asynccontextmanager
async def rock_server() -> AsyncIterator[str]:
    """Start a ROCK server and yield its address. It consists of Ray, ``rocklet`` and the HTTP server."""
    if not (ROCK_FOLDER / "done").exists():
        raise MissingPeerError("not installed: make .venv/rock/done")
    with TemporaryDirectory(prefix="rock-") as name:
        folder = Path(name)
        ray, host, admin = free_ports(3)
        alone = ["--head", "--block", "--node-ip-address=127.0.0.1", "--include-dashboard=false", "--num-cpus=2"]
        space = ["--object-store-memory=100000000", f"--temp-dir={folder}/ray"]
        served = ["rock.admin.main:create_app", "--factory", "--loop=uvloop", "--http=httptools"]
        commands = {
            ray: ["ray", "start", *alone, *space, f"--port={ray}"],
            host: ["rocklet", "--host=127.0.0.1", f"--port={host}"],
            admin: ["uvicorn", *served, "--host=127.0.0.1", f"--port={admin}", "--timeout-keep-alive=30"],
        }
        environment = _rock_environment(folder, ray, host)
        started: list[subprocess.Popen[bytes]] = []
        try:
            for port, (program, *words) in commands.items():
                log = folder / f"{program}.log"
                started.append(start([f"{ROCK_FOLDER}/bin/{program}", *words], environment, log))
                await _until_it_listens(started[-1], port, log)
            yield f"http://127.0.0.1:{admin}"
        finally:
            for process in reversed(started):
                stop(process)


def _rock_environment(folder: Path, ray_port: int, host_port: int) -> dict[str, str]:
    """Write ROCK's configuration to `folder`; return the environment variables of its programs, which use these ports.

    ROCK's interpreter and packages are mounted read-only into each sandbox.
    """
    rock = str(ROCK_FOLDER)
    packages = sysconfig.get_path("purelib", vars={"base": rock})
    mounts = {sys.base_prefix: sys.base_prefix, rock: rock}
    volumes = [{"local": here, "container": there} for here, there in mounts.items()]
    volumes += [
        {"local": rock, "container": "/tmp/miniforge"},
        {"local": f"{packages}/rock/rocklet/local_files", "container": "/tmp/local_files"},
    ]
    config = {
        "ray": {"address": f"127.0.0.1:{ray_port}", "namespace": "benchmark"},
        "runtime": {"image_os_profiles": {"linux": {"runtime_env": {"volume_mounts": volumes}}}},
        "aes_encrypt_key": "A" * 43 + "=",
    }
    (folder / "rock.yml").write_text(json.dumps(config))  # JSON is YAML
    return os.environ | {
        "ROCK_CONFIG": str(folder / "rock.yml"),
        "ROCK_ADMIN_ENV": "local",
        "ROCK_ADMIN_ROLE": "admin",
        "ROCK_WORKER_ENV_TYPE": "local",
        "ROCK_WORKER_ROCKLET_PORT": str(host_port),
        "ROCK_PYTHON_ENV_PATH": sys.base_prefix,
        "ROCK_PROJECT_ROOT": packages,
        "ROCK_SERVICE_STATUS_DIR": str(folder),
        "ROCK_SCHEDULER_STATUS_DIR": str(folder),
        "ROCK_ENVHUB_DB_URL": f"sqlite:///{folder}/envs.db",
        "HOME": str(folder),
        "RAY_TMPDIR": str(folder),  # Ray writes the cluster's address to its folder `ray`
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # a local cluster, so that Ray listens on 127.0.0.1
    }


def start(command: list[str], environment: dict[str, str], log: Path) -> subprocess.Popen[bytes]:
    with log.open("wb") as output:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )


def stop(process: subprocess.Popen[bytes]) -> None:
    """End a program, and kill the processes of its session that it leaves behind."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


async def _until_it_listens(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    deadline = clock.now() + _START_TIMEOUT_S
    while process.poll() is None and clock.now() < deadline:
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return
        await anyio.sleep(0.2)
    message = (await anyio.Path(log).read_text(errors="replace")).strip().rpartition("\n")[-1]
    raise MissingPeerError(f"{log.stem} did not start: {message}")


def free_ports(number: int) -> list[int]:
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(number)]
    try:
        return [int(each.getsockname()[1]) for each in sockets]
    finally:
        for each in sockets:
            each.close()


def _installed(package: str) -> None:
    if find_spec(package) is None:
        raise MissingPeerError("not installed: make .venv/sandboxes/done, and run this with .venv/sandboxes/bin/python")


def _expect(held: bool, answer: object) -> None:
    if not held:
        raise FailedCallError(str(answer))
