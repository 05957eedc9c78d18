"""The Ray driver: a child process in which Ray runs, started by `envkit.sandbox.ray.cluster`.

Ray may end the process in which it runs: if the cluster's head does not answer for a minute, if another head replaces
it, or if it cannot connect. Ray also installs signal handlers, uses much CPU time while the head does not answer, and
has calls that never return. A separate process protects the parent process from all this.

The argument of the process is the cluster's address. A message is a length and a pickled tuple. The parent writes calls
``(number, what, arguments)`` to standard input. The driver writes replies ``(number, outcome, value)`` to standard
output, in any order. Two messages precede them: the address at which the driver searches for the cluster (`TRIED`), and
whether it is connected (`HELLO`). The process exits at the end of its input.
"""

from __future__ import annotations

import asyncio
import logging
import os
import pickle
import resource
import struct
import sys
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, TypeAlias

import anyio

from envkit.errors import UsageError
from envkit.installation import load, why_missing

from . import head_address
from .node_agent import Answer, NodeActor, NodeKind

LENGTH = struct.Struct(">Q")
HELLO = 0
TRIED = -1
"""Numbers of the two messages that are not replies to a call. `TRIED` comes first, then `HELLO`."""

Outcome: TypeAlias = Literal["done", "failed", "unreached", "refused"]
"""Outcome in a reply. Unless it is ``"done"``, the value is a one-line reason. Only `HELLO` can be ``"refused"``."""

_CALLS_AT_ONCE = 10_000
_THREADS = 64
_LINE_CHARACTERS = 300
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Environment variable of the actors. By default, Ray would kill detached sandboxes when their actor ends."""


def packed(message: tuple[object, ...]) -> bytes:
    """Encode a message as the length of its pickle, followed by the pickle."""
    body = pickle.dumps(message)
    return LENGTH.pack(len(body)) + body


def main(address: str) -> None:
    """Connect to the cluster at `address`, and serve calls until standard input ends."""
    answers = os.dup(1)
    os.dup2(2, 1)  # Ray's prints go to standard error, so that standard output contains only messages
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    try:
        ray = _connected(address, lambda location: _write(answers, packed((TRIED, "done", location))))
    except UsageError as error:
        _write(answers, packed((HELLO, "refused", str(error))))
        return
    asyncio.run(_Driver(ray, answers).run())


class _Driver:
    """Executes the calls that the parent process sends."""

    def __init__(self, ray: Any, answers: int) -> None:
        self._ray = ray
        self._answers = answers
        self._actors: dict[int, asyncio.Future[Any]] = {}
        self._query: asyncio.Future[list[dict[str, Any]]] | None = None
        self._calls: Mapping[str, Callable[..., Awaitable[object]]] = {
            "nodes": self._nodes,
            "make": self._make,
            "ask": self._ask,
            "end": self._end,
        }

    async def run(self) -> None:
        """Execute calls from standard input, and end this process at the end of the input."""
        loop = asyncio.get_running_loop()
        loop.set_default_executor(ThreadPoolExecutor(_THREADS))
        reader = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._answer(HELLO, "done", None)
        async with anyio.create_task_group() as tasks:
            while True:
                try:
                    (length,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
                    number, what, arguments = pickle.loads(await reader.readexactly(length))
                except asyncio.IncompleteReadError:
                    os._exit(0)  # do not wait for threads, because they may hang in Ray's calls
                tasks.start_soon(self._do, number, what, arguments)

    async def _do(self, number: int, what: str, arguments: Sequence[object]) -> None:
        errors = self._ray.exceptions
        try:
            self._answer(number, "done", await self._calls[what](*arguments))
        except errors.RayTaskError as error:  # the actor raised an unhandled exception
            self._answer(number, "failed", _line(error.cause))
        except errors.RayError as error:
            self._answer(number, "unreached", _line(error))
        except (OSError, RuntimeError, ValueError) as error:
            self._answer(number, "failed", _line(error))

    def _answer(self, number: int, outcome: Outcome, value: object) -> None:
        _write(self._answers, packed((number, outcome, value)))

    async def _nodes(self) -> list[tuple[str, str, str, dict[str, float]]]:
        """Return the id, name, address and resources of each node that Ray considers alive.

        This waits while the head does not answer. Concurrent calls share one query to Ray.
        """
        if self._query is None or self._query.done():
            self._query = asyncio.ensure_future(asyncio.to_thread(self._ray.nodes))
        return [
            (str(node["NodeID"]), str(node["NodeName"]), str(node["NodeManagerAddress"]), dict(node["Resources"]))
            for node in await asyncio.shield(self._query)
            if node["Alive"]
        ]

    async def _make(self, number: int, node_id: str, kind: NodeKind, address: str) -> None:
        """Ask Ray to start an actor on a node, and return before it runs. If the start fails later, `_ask` fails."""
        self._actors[number] = making = asyncio.ensure_future(asyncio.to_thread(self._made, node_id, kind, address))
        await making

    def _made(self, node_id: str, kind: NodeKind, address: str) -> Any:
        scheduling = load("ray.util.scheduling_strategies")
        handle = (
            self._ray.remote(NodeActor)
            .options(
                num_cpus=0,
                max_concurrency=_CALLS_AT_ONCE,
                max_restarts=0,
                runtime_env={"env_vars": _KEEP_CHILDREN},
                scheduling_strategy=scheduling.NodeAffinitySchedulingStrategy(node_id, soft=False),
            )
            .remote(kind, address)
        )
        handle.serve.remote()
        return handle

    async def _ask(self, number: int, method: str, arguments: Sequence[object]) -> Answer:
        handle = await asyncio.shield(self._actors[number])
        answer: Answer = await getattr(handle, method).remote(*arguments)
        return answer

    async def _end(self, number: int) -> None:
        """End an actor, even if it is starting or has failed; idempotent."""
        if (making := self._actors.pop(number, None)) is not None:
            await asyncio.to_thread(self._ray.kill, await making)


def _connected(address: str, report: Callable[[str], None]) -> Any:
    """Find the address of the head, pass it to `report`, connect to the cluster, and return the module `ray`.

    Raises:
        UsageError: Ray is not installed, or there is no cluster at `address`.
    """
    if (why := why_missing("ray")) is not None:
        raise UsageError(why)
    location, advice = f"{address!r} (ray start --head)", ""
    try:
        found = head_address.find(address)
        location, advice = str(found), f"; {head_address.WHAT_TO_DO}"
        report(location)
        # Check that the head answers, because otherwise `ray.init` would fail only after minutes.
        head_address.require(found)
        ray: Any = load("ray")
        ray.init(address=found.address, log_to_driver=False, logging_level=logging.ERROR)
    except ImportError as error:
        raise UsageError(f"the package ray cannot be used: {_line(error)}") from None
    except (OSError, RuntimeError, ValueError) as error:
        if "Version mismatch" in str(error):  # library's message: Ray
            detail = _line(error).removeprefix("Version mismatch: ")
            raise UsageError(f"the cluster at {location} has another version of Ray or Python: {detail}") from None
        raise UsageError(f"there is no Ray cluster at {location}: {_line(error)}{advice}") from None
    return ray


def _write(answers: int, message: bytes) -> None:
    data = memoryview(message)
    while data:
        data = data[os.write(answers, data) :]


def _line(error: BaseException) -> str:
    """Return an error's message as one line of at most 300 characters."""
    return " ".join(str(error).split())[:_LINE_CHARACTERS] or type(error).__name__


if __name__ == "__main__":
    main(sys.argv[1])
