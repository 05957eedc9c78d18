"""Plays episodes whose agents are programs in sandboxes, with a scripted policy."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from envkit import clock
from envkit.config.parts import AgentSection
from envkit.protocols import EnvHost, Sandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.trainer_bridge.agents.episode import AgentPlayer
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.types import Reset, RolloutRequest, SandboxSpec, Task
from envkit.wiring.training.agents import open_player, views_of
from tests.trainer_bridge.agents.agents import LIMITS, RENDERER, LetterEngine, Played
from tests.trainer_bridge.fakes import Answer, ScriptedEpisode

After = Callable[[Sandbox], Awaitable[None]]


async def nothing(sandbox: Sandbox) -> None:
    pass


@dataclass
class SandboxEpisode(ScriptedEpisode):
    """An episode with a sandbox, in which `after` is done when its agent has ended, in place of a grader."""

    own: Sandbox | None = None
    after: After = nothing

    @property
    def sandbox(self) -> Sandbox | None:
        return self.own

    async def reset(self) -> Reset:
        return Reset((await super().reset()).observation, {}, is_graded=True)

    async def grade(self) -> float:
        assert self.own is not None
        await self.after(self.own)
        return 1.0


class SandboxHost(EnvHost):
    """Leases episodes with a sandbox each.

    Attributes:
        tasks: The text of each episode's first observation, and what is done after its agent.
        sandboxes: The sandboxes, in the order of their start.
    """

    capacity = 9

    def __init__(self, backend: LocalBackend, spec: SandboxSpec) -> None:
        self._backend = backend
        self._spec = spec
        self.tasks: list[tuple[str, After]] = []
        self.sandboxes: list[Sandbox] = []

    @asynccontextmanager
    async def lease(self, task: Task) -> AsyncIterator[SandboxEpisode]:
        text, after = self.tasks[task.seed]
        sandbox = await self._backend.start(self._spec)
        self.sandboxes.append(sandbox)
        yield SandboxEpisode([Answer(text)], own=sandbox, after=after)
        await sandbox.stop()


class Stage:
    """Plays episodes, all behind one proxy."""

    def __init__(self, host: SandboxHost, player: AgentPlayer, engine: LetterEngine) -> None:
        self.host = host
        self.player = player
        self.engine = engine

    async def play(self, task: str, after: After = nothing) -> Played:
        number = len(self.host.tasks)
        self.host.tasks.append((task, after))
        request = RolloutRequest(f"train/{number}/0", Task("A-v0", number), number)
        return Played(await play(self.host, self.player, self.player.limits, request), self.player)


def on_stage(
    main: Callable[[Stage], Awaitable[None]],
    section: AgentSection,
    engine: LetterEngine,
    *,
    limits: RolloutLimits = LIMITS,
    spec: SandboxSpec | None = None,
) -> None:
    """Run `main` with a stage for the agent of `section`, in sandboxes of bubblewrap."""

    async def run() -> None:
        seen = replace(spec or SandboxSpec(), views=tuple(views_of(section)))
        async with LocalBackend() as backend, open_player(section, engine, RENDERER, limits) as player:
            assert isinstance(player, AgentPlayer)
            await main(Stage(SandboxHost(backend, seen), player, engine))

    clock.run(run)
