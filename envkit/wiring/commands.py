"""Runs the commands of environments; see `envkit.registry.EnvSpec`."""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

from envkit import clock
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.types import CommandResult
from envkit.wiring.data import folder_of

RESERVED = ("spec", "sandboxes", "data", "build_image", "display", "announce", "progress")
"""Arguments that a command gets if it has them, and that are not part of its command line.

``sandboxes`` is an `envkit.protocols.SandboxPool`, which adds the option ``--backend``. ``data`` has the folder of each
kind of data by name; it may not exist. ``build_image(tag, dockerfile, context, base=, timeout_s=)`` builds a Docker
image unless it exists, and returns whether it was missing. ``announce`` shows a line, and ``progress`` the numbers of
finished parts and of all parts, on ``display``. ``spec`` is the environment.
"""


def run(
    spec: EnvSpec, name: str, function: Callable[..., Any], arguments: Mapping[str, Any], *, display: Display
) -> CommandResult:
    """Run `function`, the command `name` of an environment, with the `arguments` of its command line.

    The argument ``backend`` is the kind of the sandboxes, for a command that uses sandboxes.
    """
    done: int | None = None

    def progress(finished: int, total: int) -> None:
        nonlocal done
        if done is None:
            display.phase(name, total)
        display.advance(finished - (done or 0))
        done = finished

    wanted = inspect.signature(function).parameters.keys()
    at_hand: Mapping[str, object] = {
        "spec": spec,
        "display": display,
        "data": {one: folder_of(one) for one in spec.data},
        "announce": display.announce,
        "progress": progress,
    }
    given = dict(arguments) | {one: value for one, value in at_hand.items() if one in wanted}
    if not inspect.iscoroutinefunction(function):
        return function(**given)  # type: ignore[no-any-return]

    async def main() -> CommandResult:
        async with AsyncExitStack() as parts:
            if "sandboxes" in wanted:
                from envkit.wiring.sandboxes.tool_pool import open_tool_pool  # imported late: loads the backends

                pool = open_tool_pool(given.pop("backend", None) or "auto", announce=display.announce)
                given["sandboxes"] = await parts.enter_async_context(pool)
            if "build_image" in wanted:
                given["build_image"] = await parts.enter_async_context(_docker(display.announce))
            return await function(**given)  # type: ignore[no-any-return]

    return clock.run(main)


@asynccontextmanager
async def _docker(announce: Callable[[str], None]) -> AsyncIterator[Callable[..., Awaitable[bool]]]:
    """Yield ``build_image``, which connects to Docker when it is first called."""
    from envkit.sandbox.docker.api import Daemon
    from envkit.sandbox.docker.folder_build import build_folder

    async with AsyncExitStack() as parts:
        daemon: Daemon | None = None

        async def connected() -> Daemon:
            nonlocal daemon
            if daemon is None:
                daemon = await Daemon.connect()
                parts.push_async_callback(daemon.close)
            return daemon

        async def build(tag: str, dockerfile: str, context: Path | None, *, base: str | None, timeout_s: float) -> bool:
            if await (await connected()).image(tag) is not None:
                return False
            await build_folder(
                await connected(), tag, dockerfile, context, base=base, timeout_s=timeout_s, report=announce
            )
            return True

        yield build
