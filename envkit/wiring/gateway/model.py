"""The language model of a server: a process of its own, so that the gateway loads no torch and never waits for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from envkit import clock, installation
from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.http.api.model_routes import ModelRoutes
from envkit.restarts import Failures, RestartBudget
from envkit.sandbox.host import run_dirs
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import Cause, CauseKind, SandboxSpec
from envkit.wiring.sandboxes.env_sandboxes import liveness_times
from envkit.wiring.training.models import verify

_log = logging.getLogger(__name__)

_ID = ":model"
_POLL_S = 0.1
START_TIMEOUT_S = 600.0
"""Seconds that a model may take to load."""


@asynccontextmanager
async def open_model(config: ServeConfig, announce: Callable[[str], None]) -> AsyncIterator[ModelRoutes | None]:
    """Start the model of a server, and wait until it answers; it is restarted when it ends.

    Args:
        config: The configuration.
        announce: Called with lines for the user.

    Raises:
        UsageError: The model does not exist, or did not start; the message says why.
    """
    if config.model is None:
        yield None
        return
    name, _, url = config.model.partition("@")
    if why := installation.why_missing("torch"):
        raise UsageError(f"model: {why}")
    verify(name)
    folder = run_dirs.new_run_folder()
    try:
        async with AsyncExitStack() as parts:
            backend = await parts.enter_async_context(ProcessBackend())
            times = liveness_times(config.liveness)
            pool = await parts.enter_async_context(Pool([Node("model", backend)], liveness_times=times))
            process = _ModelProcess(pool, [name, *filter(None, [url])], folder / "model.sock", config.restarts.limit())
            tasks = await parts.enter_async_context(clock.background_tasks())
            announce(f"model: {config.model} is loading")
            tasks.start_soon(process.keep)
            await process.tried.wait()
            if process.why_down:
                raise UsageError(f"model: {config.model} did not start: {process.why_down}")
            yield ModelRoutes(str(process.socket), lambda: process.why_down)
    finally:
        run_dirs.remove(folder)


class _ModelProcess:
    """The process of a model.

    Attributes:
        socket: The Unix socket on which it answers.
        tried: Set when it first answered, or first ended.
        why_down: Why it does not answer; empty while it does.
    """

    def __init__(self, pool: Pool, words: Sequence[str], socket: Path, restarts: RestartBudget) -> None:
        self.socket = socket
        self.tried = anyio.Event()
        self.why_down = "loading"
        self._pool = pool
        self._restarts = restarts
        program = (sys.executable, "-m", "envkit.wiring.gateway.model_server", str(socket), *words)
        paths = {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}
        given = {name: value for name, value in os.environ.items() if name != "ENVKIT_SOCKETS"}
        self._spec = SandboxSpec(program, env={**given, **paths})

    async def keep(self) -> None:
        """Start the process, and start it again whenever it has ended."""
        failures = Failures()
        while True:
            ended, causes = anyio.Event(), list[object]()

            def on_end(cause: Cause, ended: anyio.Event = ended, causes: list[object] = causes) -> None:
                causes.append(cause)
                ended.set()

            try:
                await self._pool.create(_ID, self._spec)
                self._pool.watch(_ID, self._answers, on_end)
                await ended.wait()
            except EnvkitError as error:
                causes.append(error)
            self.why_down = f"{causes[0]}; it is restarted"
            self.tried.set()
            _log.warning("the model's process ended: %s", causes[0])
            await self._pool.stop(_ID)
            await anyio.sleep_until(failures.add(self._restarts, now=clock.now()).at)

    async def _answers(self) -> Cause:
        """Wait until the process answers, and then for ever: the pool notices its end."""
        with anyio.move_on_after(START_TIMEOUT_S):
            while not self.socket.exists():  # noqa: ASYNC110 - another process creates it
                await anyio.sleep(_POLL_S)
            self.why_down = ""
            self.tried.set()
            await anyio.sleep_forever()
        return Cause(CauseKind.START_FAILED, f"the model did not load within {START_TIMEOUT_S:g} s")
