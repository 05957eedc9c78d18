"""The commands of ``envkit tasks ENV``: `run` runs one, and `ls` and `show` are those that every environment has.

Other commands are those of environments; see `envkit.registry.EnvSpec`.
"""

from __future__ import annotations

import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import typer

from envkit import clock, registry
from envkit.environments.tools import write_call
from envkit.errors import PlayerStoppedError, UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.registry import EnvSpec
from envkit.runs.display import Display
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.rollout.players import Chooser
from envkit.types import CommandResult, Observation, Options, Reset, RolloutRequest, StopReason, Table, Trajectory
from envkit.wiring import tasks as task_sets
from envkit.wiring.data import folder_of
from envkit.wiring.environments import open_resources, slots

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
                from envkit.wiring.sandboxes.backends import open_tool_pool  # imported late: loads the backends

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
                parts.push_async_callback(daemon.aclose)
            return daemon

        async def build(tag: str, dockerfile: str, context: Path | None, *, base: str | None, timeout_s: float) -> bool:
            if await (await connected()).image(tag) is not None:
                return False
            await build_folder(
                await connected(), tag, dockerfile, context, base=base, timeout_s=timeout_s, report=announce
            )
            return True

        yield build


_LOOK = write_call("bash", command="pwd && ls -lA")


_Split: TypeAlias = Annotated[str, typer.Option(metavar="SPLIT", help="Split of the tasks.")]


def ls(split: _Split = "eval", *, spec: EnvSpec, options: Options) -> CommandResult:
    """List the splits with their numbers of tasks, and the tasks of a split if they have names."""
    found, splits = task_sets.task_set(spec, options), task_sets.splits(spec, options)
    task_sets.require_split(spec, splits, split)
    if found is None:
        chosen = f", in the splits {', '.join(splits)}" if splits else ""
        return CommandResult([f"every seed from 0 is a task of {spec.id}{chosen}"])
    counts = [(one, "any number" if (count := found.count(one)) is None else str(count)) for one in splits]
    parts: list[str | Table] = [[("SPLIT", "TASKS"), *counts]]
    if names := task_sets.names(spec, options, split):
        parts += ["", [("INDEX", f"TASK ({split})"), *((str(index), name) for index, name in enumerate(names))]]
    return CommandResult(parts)


class _Look(Player):
    """Lists the files of the working directory if there is a shell, and stops before the episode is graded."""

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        left = [_LOOK] if "bash" in _tools(start) else []

        def act(observation: Observation) -> str:
            if not left:
                raise PlayerStoppedError(StopReason.ABORTED)
            return left.pop()

        return Chooser(act)


def show(
    task: Annotated[str, typer.Argument(metavar="TASK", help="Name of the task, or its index in the split.")],
    split: _Split = "eval",
    *,
    spec: EnvSpec,
    options: Options,
    backend: str | None,
    judge: str | None,
    announce: Callable[[str], None],
) -> CommandResult:
    """Show a task as a player gets it: its statement, tools, files and limits."""
    ((label, chosen),) = task_sets.select(spec, options, split, [task]).items()

    async def main() -> Trajectory:
        async with (
            open_resources(spec.needs, backend=backend, judge=judge, announce=announce) as resources,
            slots(1, options, resources) as host,
        ):
            return await play(host, _Look(), RolloutLimits(max_turns=2), RolloutRequest("show", chosen, 0))

    shown = clock.run_blocking(main)
    if shown.start is None:
        raise UsageError(f"task {label} cannot be played here: {shown.outcome.error}")
    start = shown.start
    parts: list[str | Table] = [f"task {label} of {spec.id}"]
    for title, text in (
        ("system prompt", start.system),
        ("statement", start.observation.text),
        ("legal moves", ", ".join(start.observation.legal_moves)),
        ("tools", "\n".join(f"{name}: {description}" for name, description in _tools(start).items())),
        ("files", "".join(turn.step.observation.text for turn in shown.turns if turn.step is not None)),
    ):
        parts += [f"\n{title}:\n{text.rstrip()}"] if text else []
    used = {**registry.option_defaults(spec), **chosen.options}
    rows = [(name, str(value)) for name, value in used.items() if value is not None]
    return CommandResult([*parts, "", [("OPTION", "VALUE"), *rows]])


def _tools(start: Reset) -> dict[str, str]:
    """Return the first line of the description of each tool by its name."""
    functions = [tool["function"] for tool in start.tools]
    return {str(one["name"]): str(one.get("description", "")).partition("\n")[0] for one in functions}
