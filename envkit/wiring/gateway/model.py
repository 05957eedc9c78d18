"""The language model of a server: a process of its own, so that the gateway loads no torch and never waits for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import anyio

from envkit import clock, installation
from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.http.api.model_routes import ModelRoutes
from envkit.sandbox.host import run_dirs
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import Cause, CauseKind, SandboxSpec
from envkit.wiring.sandboxes.env_sandboxes import liveness_times
from envkit.wiring.training.models import verify

_log = logging.getLogger(__name__)

_ID = ":model"
_POLL_S = 0.2
"""Seconds between two requests to a process that loads its model."""
_PROBE_S = 5.0
"""Seconds between two requests to a process that answers."""
HANGS_S = 60.0
"""Seconds without an answer after which a process that answered before is restarted."""


@asynccontextmanager
async def open_model(config: ServeConfig, announce: Callable[[str], None]) -> AsyncIterator[ModelRoutes | None]:
    """Start the model of a server in the background. It is restarted when it ends or hangs.

    Args:
        config: The configuration.
        announce: Called with lines for the user.

    Raises:
        UsageError: The model does not exist, or torch is not installed.
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
            routes = await parts.enter_async_context(ModelRoutes(str(folder / "model.sock")))
            backend = await parts.enter_async_context(ProcessBackend())
            times = liveness_times(config.liveness)
            pool = await parts.enter_async_context(
                Pool([Node("model", backend)], liveness_times=times, restarts=config.restarts.limit())
            )
            tasks = await parts.enter_async_context(clock.background_tasks())
            words = (str(folder / "model.sock"), name, *filter(None, [url]))
            process = _ModelProcess(pool, words, routes, announce)
            announce(f"model: {config.model} is loading")
            tasks.start_soon(process.keep)
            yield routes
    finally:
        run_dirs.remove(folder)


class _ModelProcess:
    """Keeps the process of a model running: ``model_server`` with the arguments `words`."""

    def __init__(
        self,
        pool: Pool,
        words: tuple[str, ...],
        routes: ModelRoutes,
        announce: Callable[[str], None],
    ) -> None:
        self._pool = pool
        self._routes = routes
        self._announce = announce
        program = (sys.executable, "-m", "envkit.wiring.gateway.model_server", *words)
        paths = {"PYTHONPATH": os.pathsep.join(str(Path(path).absolute()) for path in sys.path)}
        given = {name: value for name, value in os.environ.items() if name != "ENVKIT_SOCKETS"}
        self._spec = SandboxSpec(program, env={**given, **paths})

    async def keep(self) -> None:
        """Start the process, and start it again whenever it has ended."""
        while True:
            cause: object
            try:
                await self._pool.create(_ID, self._spec)
                async with clock.background_tasks() as tasks:
                    tasks.start_soon(self._lose_if_it_hangs)
                    cause = await self._pool.get(_ID).wait()
            except EnvkitError as error:
                cause = error
            self._routes.why_down = f"{cause}; it is restarted"
            _log.warning("the model's process ended: %s", cause)
            await self._pool.stop(_ID)
            await anyio.sleep_until(self._pool.failed(_ID, "model", cause).at)

    async def _lose_if_it_hangs(self) -> None:
        """Wait until the process answers, and then until it does not; the pool itself notices its end."""
        while not await self._routes.is_answered():  # noqa: ASYNC110 - another process listens
            await anyio.sleep(_POLL_S)
        self._routes.why_down = ""
        self._announce("model: answers")
        last_s = clock.now()
        while clock.now() - last_s < HANGS_S:
            with anyio.move_on_after(HANGS_S):
                if await self._routes.is_answered():
                    last_s = clock.now()
                await anyio.sleep(_PROBE_S)
        self._pool.lose(_ID, Cause(CauseKind.UNRESPONSIVE, f"it did not answer for {HANGS_S:g} s"))
