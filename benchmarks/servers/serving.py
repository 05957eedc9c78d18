"""Context managers that run a server: `envkit serve`, OpenEnv's or a bare one, from this interpreter's packages."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple
from urllib.error import URLError
from urllib.request import urlopen

import anyio
from servers.peers_sandboxes import MissingPeerError, free_ports, start, stop
from servers.processes import cpu_s

from envkit import clock

_START_TIMEOUT_S = 120.0
_HERE = str(Path(__file__).parent)
_UVICORN = [
    "--factory",
    "--loop=uvloop",
    "--http=httptools",
    "--host=127.0.0.1",
    "--log-level=warning",
    "--no-access-log",
    "--timeout-keep-alive=75",
]


class Server(NamedTuple):
    """A running server.

    Attributes:
        url: Address of the server.
        pid: Process id of the server.
    """

    url: str
    pid: int

    def cpu_s(self) -> float:
        """Return the CPU seconds that the server and its descendants have used so far."""
        return cpu_s(self.pid)


@contextmanager
def on_processor(number: int | None) -> Iterator[None]:
    """During the block, restrict this process and programs that it starts to processor `number`; None: no limit."""
    before = os.sched_getaffinity(0)
    if number is not None:
        os.sched_setaffinity(0, {sorted(before)[number]})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def gateway(*words: str, processor: int | None = None, python: str = sys.executable) -> AsyncIterator[Server]:
    """Start ``envkit serve`` without an access log, with the environment of `served.py`.

    Args:
        words: Further arguments of ``envkit serve``.
        processor: Core on which the server's processes run; None means any core.
        python: Interpreter with envkit, to run the server of another checkout.
    """
    with TemporaryDirectory(prefix="envkit-bench-") as folder:
        (port,) = free_ports(1)
        own = [f"--port={port}", f"--state={folder}/state", "--set", "access_log=null", *words]
        command = [python, "-m", "envkit", "serve", *own]
        async with _serving(command, _with_environments(Path(folder)), port, "/v1/health", processor) as server:
            yield server


@asynccontextmanager
async def node(*words: str) -> AsyncIterator[Server]:
    """Start ``envkit serve --node`` with the environments of `served.py`; `words` are further arguments."""
    with TemporaryDirectory(prefix="envkit-bench-") as folder:
        (port,) = free_ports(1)
        command = [sys.executable, "-m", "envkit", "serve", "--node", f"--port={port}", *words]
        async with _serving(command, _with_environments(Path(folder)), port, "/v1/health", None) as server:
            yield server


@asynccontextmanager
async def uvicorn(
    app: str, *, package: str, variables: Mapping[str, str] | None = None, processor: int | None = None
) -> AsyncIterator[Server]:
    """Start uvicorn with an application of `served.py`, in its fastest configuration.

    Args:
        app: Name of the function that returns the application.
        package: Package that the application requires.
        variables: Environment variables for the application.
        processor: Core on which the server runs; None means any core.

    Raises:
        MissingPeerError: The package is not installed, or the server did not start.
    """
    if find_spec(package) is None:
        raise MissingPeerError("not installed: make .venv/sandboxes/done, and run this with .venv/sandboxes/bin/python")
    (port,) = free_ports(1)
    command = [sys.executable, "-m", "uvicorn", f"served:{app}", *_UVICORN, f"--port={port}"]
    environment = {**os.environ, "PYTHONPATH": _path(_HERE), **(variables or {})}
    async with _serving(command, environment, port, "/health", processor) as server:
        yield server


@asynccontextmanager
async def _serving(
    command: list[str], environment: dict[str, str], port: int, sign: str, processor: int | None
) -> AsyncIterator[Server]:
    address = f"http://127.0.0.1:{port}"
    with TemporaryDirectory(prefix="envkit-bench-") as folder:
        log = Path(folder, "log")
        with on_processor(processor):
            process = start(command, environment, log)
        try:
            await _until_it_answers(process, address + sign, log)
            yield Server(address, process.pid)
        finally:
            await clock.to_thread(stop, process)


async def _until_it_answers(process: subprocess.Popen[bytes], url: str, log: Path) -> None:
    deadline = clock.now() + _START_TIMEOUT_S
    while process.poll() is None and clock.now() < deadline:
        if await clock.to_thread(_answers, url):
            return
        await anyio.sleep(0.1)
    message = (await anyio.Path(log).read_text(errors="replace")).strip()
    raise MissingPeerError(f"{url} does not answer; its server says: {message[-2000:]}")


def _answers(url: str) -> bool:
    try:
        with urlopen(url, timeout=1) as response:
            return bool(response.status == 200)
    except (OSError, URLError):
        return False


def _with_environments(folder: Path) -> dict[str, str]:
    """Install `served.py` in a folder, and return environment variables that let programs find it."""
    folder.chmod(0o755)  # the users of sandboxes must read it
    folder /= "site-packages"  # of PYTHONPATH, sandboxes see only folders with this name
    metadata = folder / "served-1.0.dist-info"
    metadata.mkdir(parents=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: served\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[envkit.envs]\nserved = served:bring\n")
    (folder / "served.py").write_text(Path(_HERE, "served.py").read_text())
    return {**os.environ, "PYTHONPATH": _path(str(folder))}


def _path(folder: str) -> str:
    return os.pathsep.join(filter(None, [folder, os.environ.get("PYTHONPATH")]))
