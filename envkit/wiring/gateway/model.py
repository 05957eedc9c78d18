"""The language model of a server: a process of its own, so that the gateway loads no torch and never waits for it."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import anyio

from envkit import clock, installation
from envkit.config.serving import ServeConfig
from envkit.errors import EnvkitError, UsageError
from envkit.http.api.model_routes import ModelRoutes
from envkit.protocols import Process
from envkit.restarts import Failures, RestartBudget
from envkit.sandbox.host import run_dirs
from envkit.types import Place
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.training.models import verify

_log = logging.getLogger(__name__)

_POLL_S = 0.2
"""Seconds between two requests to a process that loads its model."""
_PROBE_S = 5.0
"""Seconds between two requests to a process that answers."""
HANGS_S = 60.0
"""Seconds without an answer after which a process that answered before is restarted."""


@asynccontextmanager
async def open_model(config: ServeConfig, announce: Callable[[str], None]) -> AsyncIterator[ModelRoutes | None]:
    """Start the model of a server in the background. It is restarted when it ends or hangs.

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
        async with ModelRoutes(str(folder / "model.sock")) as routes, clock.background_tasks() as tasks:
            announce(f"model: {config.model} is loading")
            words = (str(folder / "model.sock"), name, *filter(None, [url]))
            tasks.start_soon(_keep, words, config.restarts.limit(), routes, announce)
            yield routes
    finally:
        run_dirs.remove(folder)


async def _keep(
    words: Sequence[str], budget: RestartBudget, routes: ModelRoutes, announce: Callable[[str], None]
) -> None:
    """Start ``model_server`` with the arguments `words`, and start it again whenever it has ended."""
    argv = [sys.executable, "-m", "envkit.wiring.gateway.model_server", *words]
    env = {"PYTHONPATH": os.pathsep.join(sys.path)}
    failures = Failures()
    while True:
        try:
            process = await LocalLauncher().start(argv, env, place=Place(), name="model")
        except (EnvkitError, OSError) as error:
            why = str(error)
            _log.warning("the model's process cannot be started: %s", why)
        else:
            try:
                async with clock.background_tasks() as tasks:
                    tasks.start_soon(_kill_if_it_hangs, process, routes, announce)
                    why = await process.wait()
            finally:
                await process.kill()
            _log.warning("the model's process ended: %s; its log is %s", why, process.log)
        routes.why_down = f"{why}; it is restarted"
        await anyio.sleep_until(failures.add(budget, now=clock.now()).at)


async def _kill_if_it_hangs(process: Process, routes: ModelRoutes, announce: Callable[[str], None]) -> None:
    """Wait until the process answers, and then until it does not, and kill it."""
    while not await routes.is_answered():  # noqa: ASYNC110 - another process listens
        await anyio.sleep(_POLL_S)
    routes.why_down = ""
    announce("model: answers")
    last_s = clock.now()
    while clock.now() - last_s < HANGS_S:
        with anyio.move_on_after(HANGS_S):
            if await routes.is_answered():
                last_s = clock.now()
            await anyio.sleep(_PROBE_S)
    _log.warning("the model did not answer for %g s", HANGS_S)
    await process.kill(grace_s=0)
