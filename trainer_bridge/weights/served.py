"""The files of published weights, served over HTTP to engines on other machines: all of each file, or a delta.

The files of a version lie beside its manifest, ``manifest.json``::

    {"files": [{"name": "model.safetensors", "bytes": 269060552, "blake2b": HEX,
                "delta": {"base": HEX, "bytes": 812345}}]}

``blake2b`` is the checksum (32 bytes) of a file, and ``base`` that of the older file to which the delta
``model.safetensors.delta`` applies. A file without an older one, or whose delta would be larger, has no delta.
`envkit_fetch` describes the format of deltas. This module does not import torch.
"""

from __future__ import annotations

import ipaddress
import secrets
import socket
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from hashlib import blake2b, file_digest
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread  # noqa: TID251 - for large files, which must not block the event loop
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import anyio
import orjson

from envkit import clock
from envkit.errors import UsageError
from envkit.types import JSON, Weights

from ..engines.vllm.plugin.envkit_fetch import DELTA, MANIFEST, encode, fits

_SINGLE = "model.safetensors"
"""Name in the manifest of weights in a single file."""


class WeightServer:
    """Serves the weights that were offered last.

    It listens at the port of `url`, or at a free one. All paths begin with a random token.

    Args:
        url: Its URL as the engines see it. If the host is this machine, it listens only to this machine. None: each
            engine gets the address that this machine has towards it.

    Raises:
        UsageError: It cannot listen there.
    """

    def __init__(self, url: str | None = None) -> None:
        self._url = None if url is None else url.rstrip("/")
        self._token = secrets.token_urlsafe(16)
        self._offered: Weights | None = None
        self._number = 0
        self._files: Mapping[str, _File] = {}
        self._offering = anyio.Lock()
        self._deltas: TemporaryDirectory[str] | None = None
        host = "127.0.0.1" if url is not None and is_this_machine(url) else ""
        port = urlsplit(url or "").port or 0
        try:
            self._http = _HttpServer((host, port), _Handler)
        except OSError as error:
            reason = f"cannot serve weights at port {port}: {error.strerror}"
            raise UsageError(f"engine.weights_url: {reason}; choose another one") from None
        # A thread, because large files must not block the event loop.
        Thread(target=self._http.serve_forever, args=(0.05,), name="weights", daemon=True).start()

    async def close(self) -> None:
        """Stop serving."""
        await clock.to_thread(self._http.shutdown)
        self._http.server_close()
        if self._deltas is not None:
            self._deltas.cleanup()

    async def offer(self, weights: Weights, engine: str) -> str:
        """Serve weights whose `location` is a path, with deltas against those that were offered before.

        Return the URL of their manifest, without its name, for the engine with the URL `engine`.

        Raises:
            OSError: A file cannot be read, or the manifest cannot be written.
        """
        async with self._offering:
            if weights != self._offered:
                await self._add(weights)
        base = self._url
        if base is None:
            base = f"http://{await clock.to_thread(_own_address, engine)}:{self._http.server_port}"
        return f"{base}/{self._token}/{self._number}"

    async def _add(self, weights: Weights) -> None:
        location = Path(weights.location)
        files: dict[str, _File] = {}
        deltas = TemporaryDirectory(prefix="deltas-", dir=location.parent)

        async def add(name: str, path: Path) -> None:
            delta = Path(deltas.name) / f"{name}{DELTA}"
            files[name] = await clock.to_thread(_with_delta, path, self._files.get(name), delta)

        async with anyio.create_task_group() as tasks:
            for name, path in _files(location).items():
                tasks.start_soon(add, name, path)
        self._offered, self._files, self._number = weights, files, self._number + 1
        prefix = f"/{self._token}/{self._number}/"
        self._http.contents = {prefix + name: path for name, path in _contents(files, Path(deltas.name)).items()}
        if self._deltas is not None:
            self._deltas.cleanup()
        self._deltas = deltas


@dataclass(frozen=True, slots=True)
class _File:
    path: Path
    checksum: str
    base: str = ""
    delta: Path | None = None


def _contents(files: Mapping[str, _File], folder: Path) -> dict[str, Path]:
    """Return the paths of what is served, by name. The manifest is written into `folder`."""
    entries: list[JSON] = []
    found = {MANIFEST: folder / MANIFEST}
    for name, one in files.items():
        entry: dict[str, JSON] = {"name": name, "bytes": one.path.stat().st_size, "blake2b": one.checksum}
        found[name] = one.path
        if one.delta is not None:
            entry["delta"] = {"base": one.base, "bytes": one.delta.stat().st_size}
            found[name + DELTA] = one.delta
        entries.append(entry)
    (folder / MANIFEST).write_bytes(orjson.dumps({"files": entries}))
    return found


def _files(location: Path) -> dict[str, Path]:
    """Return the files of weights by their names in the manifest."""
    return {one.name: one for one in location.iterdir()} if location.is_dir() else {_SINGLE: location}


def _with_delta(path: Path, before: _File | None, delta: Path) -> _File:
    """Return a file with its checksum, and with the delta against an older file.

    It has no delta if that would be larger, or cannot be written.
    """
    with path.open("rb") as file:
        checksum = file_digest(file, partial(blake2b, digest_size=32)).hexdigest()
    if before is None or before.checksum == checksum or not fits(before.path, path):
        return _File(path, checksum)
    try:
        with delta.open("wb") as out:
            for block in encode(before.path, path):
                out.write(block)
                if out.tell() >= path.stat().st_size:
                    return _File(path, checksum)
    except OSError:  # such as a full disk
        delta.unlink(missing_ok=True)
        return _File(path, checksum)
    return _File(path, checksum, before.checksum, delta)


class _HttpServer(ThreadingHTTPServer):
    """Serves `contents` by path, and nothing else."""

    daemon_threads = True
    contents: Mapping[str, Path] = MappingProxyType({})

    def handle_error(self, request: object, client_address: object) -> None:
        """Print nothing about a connection that broke; print other errors, which are faults of this module."""
        if not isinstance(sys.exception(), ConnectionError | TimeoutError):
            super().handle_error(request, client_address)  # type: ignore[arg-type]


class _Handler(SimpleHTTPRequestHandler):
    timeout = 60.0
    """Maximum seconds in which the other side takes nothing."""
    server: _HttpServer

    def translate_path(self, path: str) -> str:
        """Return the file that is served at `path`, or an empty path, which is not found."""
        return str(self.server.contents.get(path, ""))

    def copyfile(self, source: Any, outputfile: object) -> None:
        self.connection.sendfile(source)

    def log_message(self, format: str, *args: object) -> None:
        """Log nothing."""


def is_this_machine(url: str) -> bool:
    """Whether the host of a URL is localhost or a loopback address."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _own_address(engine: str) -> str:
    """Return the address of this machine from which packets to an engine leave. Nothing is sent."""
    parts = urlsplit(engine)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((parts.hostname, parts.port or 80))
        return str(probe.getsockname()[0])
