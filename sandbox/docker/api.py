"""Async client of the Docker daemon: it runs the blocking calls of the package `docker` in threads."""

from __future__ import annotations

import io
import json
import math
import os
import re
import signal
import socket
import threading
from collections import deque
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit

import anyio
import anyio.from_thread

from envkit import clock
from envkit.errors import SandboxError
from envkit.installation import load
from envkit.types import JSON

from ..agent_client.socket_stream import SocketStream
from .attach_stream import AttachStream
from .container_config import Image

T = TypeVar("T")

_TIMEOUT_S = 120.0
_QUICK_TIMEOUT_S = 1.5
"""Timeout of quick queries. It is short, because these queries also detect a daemon that no longer answers."""
_REMOVAL_S = 10.0
_REMOVAL_PAUSE_S = 0.02
_CALLS_AT_ONCE = 8
_KILLED = 128 + signal.SIGKILL
LATE_EVENT_S = 0.5
"""Maximum delay in seconds from an out-of-memory kill to the event that reports the kill."""
_LINES_SHOWN = 8
_COLOURS = re.compile("\x1b\\[[0-9;]*m")


class DaemonError(SandboxError):
    """The daemon refused a request, or does not answer.

    Attributes:
        http_status: HTTP status of the response; 0 without a response.
    """

    def __init__(self, detail: str, status: int = 0) -> None:
        super().__init__(detail)
        self.http_status = status


class Daemon:
    """A client of one Docker daemon. `connect` creates it; `aclose` closes its connections."""

    def __init__(self, api: Any, quick: Any, info: Mapping[str, Any]) -> None:
        self._api = api
        self._quick = quick
        self._limiter = anyio.CapacityLimiter(_CALLS_AT_ONCE)
        # A separate limiter for quick queries, so that they do not wait for slow calls
        self._queries = anyio.CapacityLimiter(_CALLS_AT_ONCE)
        self.info = info
        """Output of ``docker info``."""

    @property
    def is_near(self) -> bool:
        """Whether the daemon listens on a Unix socket, and therefore probably runs on this host."""
        return str(self._api.base_url).startswith("http+docker:")

    @property
    def distinguishes_memory_limit(self) -> bool:
        """Whether each OOM kill that the daemon reports is due to the container's own limit, as in cgroups v1."""
        return str(self.info.get("CgroupVersion") or "1") == "1"

    @classmethod
    async def connect(cls) -> Daemon:
        """Connect to the daemon that the Docker CLI would use: ``DOCKER_HOST``, or the default socket.

        Raises:
            DaemonError: No daemon answers.
            UsageError: The package docker is not installed.
        """
        return await clock.to_thread(_connect)

    async def aclose(self) -> None:
        for api in (self._api, self._quick):
            await self._call(api.close)

    async def create(self, options: Mapping[str, JSON]) -> str:
        """Create a container and return its id. An anyio cancellation takes effect only after the creation.

        If asyncio cancels the task, the container may be created all the same; `clear` or the next `reap` removes it.
        """
        return str((await self._call(self._api.create_container_from_config, options))["Id"])

    async def start(self, container: str) -> None:
        await self._call(self._api.start, container)

    async def remove(self, container: str) -> None:
        """Kill a container, remove it with its volumes, and return once it is gone.

        Raises:
            DaemonError: The daemon could not remove it within 10 s.
        """
        deadline = clock.now() + _REMOVAL_S
        while True:
            try:
                await self._call(self._api.remove_container, container, v=True, force=True)
                return
            except DaemonError as error:
                if error.http_status == 404:
                    return
                # A retry may help in other cases, e.g. if the container is starting.
                if error.http_status not in (409, 500) or clock.now() > deadline:
                    raise
            await anyio.sleep(_REMOVAL_PAUSE_S)

    async def attach(self, container: str, *, has_input: bool = True) -> AttachStream:
        """Return the standard streams of a container; earlier output is not included.

        Args:
            container: Id of the container.
            has_input: Whether to attach standard input and output; otherwise only standard error is attached. If one
                client closes standard input, the daemon closes it for all clients.

        Raises:
            DaemonError: The daemon does not answer, or refuses the request.
        """
        streams = {"stream": 1, "stdin": int(has_input), "stdout": int(has_input), "stderr": 1}
        connected, received = await self._call(_attached, self._api, container, streams)
        return AttachStream(await SocketStream.open(connected), received)

    async def inspect(self, container: str) -> Mapping[str, Any] | None:
        """Return the daemon's record of a container, with a timeout of 1.5 s; None if there is no such container."""
        return await self._unless_missing(self._query(self._quick.inspect_container, container))

    async def processes(self, container: str) -> tuple[int, int]:
        """Return the numbers of processes that a container has and may have; 0 if they are unknown."""
        statistics = partial(self._quick.stats, container, stream=False, one_shot=True)
        found = await self._unless_missing(self._query(statistics)) or {}
        pids = found.get("pids_stats") or {}
        return pids.get("current") or 0, pids.get("limit") or 0

    async def end_since(self, container: str, since: float) -> tuple[bool, int | None]:
        """Return how a container ended after the Unix time `since`, even if it is already removed.

        Returns:
            Whether the container ran out of memory, and its exit code (None if it has not ended).
        """
        return await self._query(_end_since, self._quick, container, since)

    async def containers(self, label: str) -> Sequence[Mapping[str, Any]]:
        """Return every container that has this label, given as ``NAME`` or ``NAME=VALUE``."""
        return await self._call(self._api.containers, all=True, filters={"label": label})

    async def volumes(self, label: str) -> Sequence[Mapping[str, Any]]:
        """Return every volume that has this label, given as ``NAME`` or ``NAME=VALUE``."""
        found = await self._call(self._api.volumes, filters={"label": label})
        return found["Volumes"] or ()

    async def remove_volume(self, name: str) -> None:
        """Remove a volume, unless it is missing or in use."""
        await self._remove(self._api.remove_volume, name)

    async def image(self, name: str) -> Image | None:
        """Return the properties of an image; None if the daemon does not have the image."""
        found = await self._unless_missing(self._call(self._api.inspect_image, name))
        if found is None:
            return None
        config = found.get("Config") or {}
        variables = (line.partition("=") for line in config.get("Env") or ())
        return Image(
            found["Id"],
            {name: value for name, _, value in variables},
            tuple(sorted(config.get("Volumes") or ())),
            config.get("WorkingDir") or "",
            config.get("User") or "",
            tuple(config.get("Entrypoint") or ()),
        )

    async def images(self, label: str) -> Sequence[Mapping[str, Any]]:
        """Return every image that has this label, given as ``NAME`` or ``NAME=VALUE``."""
        return await self._call(self._api.images, filters={"label": label})

    async def image_names(self) -> Sequence[str]:
        """Return the names of all images, sorted."""
        found = await self._call(self._api.images)
        return sorted(tag for image in found for tag in image.get("RepoTags") or () if tag != "<none>:<none>")

    async def pull(self, name: str) -> None:
        """Pull an image from its registry; this may take minutes."""
        repository, _, tag = name.rpartition(":") if ":" in name.rpartition("/")[2] else (name, "", "latest")
        await self._call(self._api.pull, repository, tag=tag)

    async def commit(self, container: str) -> str:
        """Create an image from a container's files and labels, and return its id. The container is paused meanwhile."""
        return str((await self._call(self._api.commit, container))["Id"])

    async def pause(self, container: str) -> None:
        """Pause all processes of a container."""
        await self._call(self._api.pause, container)

    async def unpause(self, container: str) -> None:
        """Resume a paused container."""
        await self._call(self._api.unpause, container)

    async def written_bytes(self, container: str) -> int:
        """Return the total size in bytes of the files that a container has changed in its root file system."""
        found = await self._call(self._api.containers, all=True, size=True, filters={"id": container})
        return int(found[0].get("SizeRw") or 0) if found else 0

    async def remove_image(self, image: str) -> None:
        """Remove an image, unless it is missing or in use."""
        await self._remove(self._api.remove_image, image, noprune=False)

    async def build(
        self,
        source: Path | str,
        *,
        tag: str,
        arguments: Mapping[str, str],
        report: Callable[[str], None],
        network: str = "none",
        timeout_s: float | None = None,
    ) -> None:
        """Build an image.

        Args:
            source: A folder with a Dockerfile, whose ``.dockerignore`` counts, or the content of a Dockerfile.
            tag: Tag of the image.
            arguments: Build arguments of the Dockerfile.
            report: Called with a line of text when a build step begins.
            network: Network of the build steps: ``"none"`` or ``"host"``.
            timeout_s: Seconds after which the build fails, at most twice as many if a step prints nothing; None for
                no limit.

        Raises:
            DaemonError: A build step failed.

        A cancelled build ends at the next line that it prints.
        """
        stopped = threading.Event()

        def on_line(line: str) -> None:
            anyio.from_thread.check_cancelled()
            if stopped.is_set():  # Ctrl-C cancels the task, and not its scope
                raise DaemonError("the build was cancelled")
            if line.startswith("Step "):
                anyio.from_thread.run_sync(report, line)

        options = {"buildargs": dict(arguments), "network_mode": network, "timeout": timeout_s}
        try:
            await self._call(_build, self._api, source, tag, options, on_line)
        finally:
            stopped.set()

    async def _remove(self, remove: Callable[..., Any], *arguments: Any, **options: Any) -> None:
        try:
            await self._call(remove, *arguments, **options)
        except DaemonError as error:
            if error.http_status not in (404, 409):  # missing, or in use
                raise

    async def _unless_missing(self, answer: Awaitable[T]) -> T | None:
        try:
            return await answer
        except DaemonError as error:
            if error.http_status == 404:
                return None
            raise

    async def _call(self, call: Callable[..., T], *args: object, **kwargs: object) -> T:
        async with self._limiter:
            return await clock.to_thread(_translated, call, args, kwargs)

    async def _query(self, query: Callable[..., T], *args: object) -> T:
        async with self._queries:
            return await clock.to_thread(_translated, query, args, {})


def _connect() -> Daemon:
    docker = load("docker")
    try:
        settings = docker.utils.kwargs_from_env()
        _require_listener(docker.utils.parse_host(settings.get("base_url"), tls="tls" in settings))
        api = docker.APIClient(**settings, version="auto", timeout=_TIMEOUT_S, max_pool_size=_CALLS_AT_ONCE)
        quick = docker.APIClient(
            **settings, version=api.api_version, timeout=_QUICK_TIMEOUT_S, max_pool_size=_CALLS_AT_ONCE
        )
    except (docker.errors.DockerException, OSError) as error:
        raise DaemonError(f"no Docker daemon answers: {_innermost(error)}") from None
    return Daemon(api, quick, _translated(api.info, (), {}))


def _require_listener(url: str) -> None:
    """Raise `OSError` if nothing listens at the daemon's address, because the package would leak a socket then."""
    parts = urlsplit(url)
    is_local = parts.scheme == "http+unix"
    if not is_local and parts.scheme != "http":
        raise DaemonError(
            f"DOCKER_HOST={url} uses {parts.scheme}, which does not support attaching to containers;"
            " forward the daemon's socket (ssh -L /tmp/docker.sock:/var/run/docker.sock HOST) and use that socket"
        )
    if not is_local:
        return socket.create_connection((parts.hostname or "", parts.port or 0), _QUICK_TIMEOUT_S).close()
    with socket.socket(socket.AF_UNIX) as stream:
        stream.settimeout(_QUICK_TIMEOUT_S)
        return stream.connect(parts.path)


def _attached(api: Any, container: str, streams: Mapping[str, int]) -> tuple[socket.socket, bytes]:
    """Return a connection for a container's standard streams, which is no longer one of the package.

    Also return what the package has already read from it, with the head of the response.
    """
    raw = api.attach_socket(container, streams)
    try:
        connected = socket.socket(fileno=os.dup(raw.fileno()))
        connected.setblocking(False)  # for both descriptors, so that `peek` does not wait
        raw._sock.settimeout(0)
        return connected, raw._response.raw._fp.fp.peek()
    finally:
        raw._response.close()


def _translated(call: Callable[..., T], args: Sequence[object], kwargs: Mapping[str, object]) -> T:
    """Run `call` and return its result; raise its errors as `DaemonError`."""
    errors = load("docker").errors
    try:
        return call(*args, **kwargs)
    except errors.APIError as error:
        status = error.response.status_code if error.response is not None else 0
        raise DaemonError(str(error.explanation or error), status) from None
    except errors.DockerException as error:
        raise DaemonError(str(error)) from None
    except OSError as error:  # errors of the package requests are OSErrors too
        raise DaemonError(f"the Docker daemon does not answer: {_innermost(error)}") from None


def _innermost(error: BaseException) -> str:
    """Return the message of the innermost cause of `error`: it is shorter and more specific than the outer messages."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return (error.strerror if isinstance(error, OSError) and error.strerror else str(error)) or type(error).__name__


def _end_since(api: Any, container: str, since: float) -> tuple[bool, int | None]:
    is_out_of_memory, code = False, None
    filters = json.dumps({"container": [container], "event": ["oom", "die"]})
    query = {"since": f"{since:.3f}", "until": f"{clock.wall() + LATE_EVENT_S:.3f}", "filters": filters}
    # Not `api.events`, which would wait without a timeout for a daemon that has stopped answering.
    answer = api.get(f"{api.base_url}/v{api.api_version}/events", params=query, stream=True, timeout=api.timeout)
    with answer, suppress(load("requests.exceptions").ChunkedEncodingError):  # the daemon exits
        answer.raise_for_status()
        for event in map(json.loads, answer.iter_lines()):
            if event["Action"] == "oom":
                is_out_of_memory = True
            else:
                code = int(event["Actor"]["Attributes"]["exitCode"])
            if is_out_of_memory or code not in (None, _KILLED):
                break
    return is_out_of_memory, code


def _build(api: Any, source: Path | str, tag: str, options: Mapping[str, Any], on_line: Callable[[str], None]) -> None:
    where = {"path": str(source)} if isinstance(source, Path) else {"fileobj": io.BytesIO(source.encode())}
    lines = api.build(**where, tag=tag, rm=True, forcerm=True, decode=True, **options)
    output: deque[str] = deque(maxlen=_LINES_SHOWN)
    latest = clock.wall() + (options["timeout"] or math.inf)
    try:
        for line in lines:
            if "error" in line or clock.wall() > latest:
                raise DaemonError("\n".join((*output, str(line.get("error", "the build was ended")).strip())))
            if text := _COLOURS.sub("", str(line.get("stream", ""))).strip():
                output.append(text)
                on_line(text)
    except load("urllib3.exceptions").HTTPError as error:  # the package leaves errors of a stream as they are
        raise DaemonError("\n".join((*output, f"the build was ended: {error}"))) from None
    finally:
        if lines.gi_frame is not None:  # the package leaves a stream open that was not read to its end
            lines.gi_frame.f_locals["response"].close()
