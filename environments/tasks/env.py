"""The base class of environments whose tasks are judged in a second sandbox."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any
from weakref import WeakKeyDictionary

import msgspec

from envkit.errors import UsageError
from envkit.protocols import Player, Sandbox, SandboxPool
from envkit.types import GRADER_HOME, Options, Reset, SandboxSpec

from ..tools import ToolEnv
from ..tools.limits import LEASE_S
from .judge import in_fresh_sandbox
from .players import Cheat, OwnCheats, PlanPlayer, solution_of
from .prepared import lease_prepared
from .task import Plan, SandboxTask, Verdict

_MAX_OUTPUT = 4000
"""Maximum characters of `grader_output`."""
_FIND = """
find_in() {
    for path in "$1"/lib/python3*/*-packages/"$name" "$1"/lib/python3*/*-packages/"$name".py "$2"; do
        [ ! -e "$path" ] || echo "$path"
    done
}
cd /
for name in "$@"; do
    for place in /usr /usr/local /root/.local /home/*/.local; do find_in "$place" ""; done
    for place in /opt/*; do find_in "$place" "$place/$name"; done
    while read -r _ place _; do find_in "$place" ""; done < /proc/mounts
    python3 -c '
import importlib.util, sys
found = importlib.util.find_spec(sys.argv[1])
if found is not None: print(found.origin or sys.argv[1])
' "$name" 2> /dev/null
done
"""
_CLEAN: WeakKeyDictionary[SandboxPool, set[Hashable]] = WeakKeyDictionary()
"""Sandboxes in which `require_no_copies` found nothing."""


class TaskEnv(ToolEnv):
    """An environment on `ToolEnv` that plays one `SandboxTask` per episode. A subclass defines `task_of`.

    Its players ask `task_of` for the task of an episode: register ``players={"oracle": "module:Class.oracle"}``, and
    ``"cheat:own": "module:Class.own"`` too if tasks have their own cheats.

    Attributes:
        task: The task of the running episode.
    """

    task: SandboxTask[Any]

    def __init__(self, *, sandboxes: SandboxPool, **arguments: Any) -> None:
        super().__init__(sandboxes=sandboxes, **arguments)
        self.check_options(self._defaults)

    @classmethod
    def check_options(cls, options: Options) -> None:
        """Raise `OptionError` if the value of an option is invalid. Override it if there are options."""

    @classmethod
    def task_of(cls, seed: int, options: Options) -> SandboxTask[Any]:
        """Return the task of a seed, the same in every process. Options without a value have their defaults."""
        raise NotImplementedError(f"{cls.__name__}.task_of: define this method")

    @classmethod
    def player(cls, plan_of: Callable[[SandboxTask[Any]], Plan], **options: Any) -> Player:
        """Return a player that carries out the plan that a function returns for a task."""
        return PlanPlayer(cls.task_of, cls._with_defaults(options), plan_of)

    @classmethod
    def oracle(cls, **options: Any) -> Player:
        """Return a player that carries out the known solution of each task."""
        return cls.player(solution_of, **options)

    @classmethod
    def own(cls, **options: Any) -> Player:
        """Return a player of each task's own cheats."""
        return OwnCheats(cls.task_of, cls._with_defaults(options))

    @classmethod
    def _with_defaults(cls, options: Options) -> Options:
        return {"max_turns": cls.max_turns, **cls.options, **options}

    @classmethod
    def cheats(cls, cheats: Mapping[str, Cheat]) -> Mapping[str, Callable[..., Player]]:
        """Return the players of cheats by name, such as ``cheat:flood``, for `EnvSpec.players`."""
        return {f"cheat:{name}": partial(cls.player, cheat.plan_for) for name, cheat in cheats.items()}

    async def open_task(self, seed: int, options: Options) -> SandboxTask[Any]:
        """Return the task of an episode. Override it if it takes long, or needs `self.data`."""
        return self.task_of(seed, options)

    @asynccontextmanager
    async def lease(self, seed: int, options: Options) -> AsyncIterator[Sandbox]:
        """Lease a sandbox that is prepared for the task of a seed.

        Raises:
            UsageError: envkit or one of `SandboxTask.modules` is in the sandbox.
        """
        self.task = task = await self.open_task(seed, options)
        self.grade_limit_s = task.judge_limit_s

        async def prepare(sandbox: Sandbox) -> None:
            await require_no_copies(self.sandboxes, sandbox, task.spec, task.modules)
            await task.prepare(sandbox)

        if task.prepared_key is not None:
            async with lease_prepared(self.sandboxes, task.spec, task.prepared_key, prepare) as sandbox:
                yield sandbox
        else:
            async with self.sandboxes.lease(task.spec, wait_s=LEASE_S) as sandbox:
                await prepare(sandbox)
                yield sandbox

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode; see `ToolEnv.reset`. If the task has a name, it is ``info["task"]``."""
        start = await super().reset(seed=seed, options=options)
        name = self.task.name
        return msgspec.structs.replace(start, info={**start.info, "task": name}) if name else start

    async def start(self, seed: int, options: Options) -> str:
        return self.task.statement

    async def grade(self) -> float | None:
        """Return the reward that the judge gives the agent's work, and keep the end of the log in `grader_output`.

        Raises:
            SandboxLostError, SandboxStartError, CapacityError: The judge had no sandbox; see `in_fresh_sandbox`.
        """
        verdict = await self.judged()
        self.grader_output = f"{self.grader_output}\n{verdict.log}".strip("\n")[-_MAX_OUTPUT:]
        return verdict.reward

    async def work(self) -> Any:
        """Return the agent's work, or the verdict if it cannot be taken. Override it for work outside of a sandbox."""
        return await self.task.collect(self.sandbox)

    async def judged(self) -> Verdict:
        """Collect the agent's work, release its sandbox if no task follows, and judge the work."""
        work = await self.work()
        if isinstance(work, Verdict):
            return work
        if not self.task.later:
            await self.close()
        return await self.judge_work(work)

    async def judge_work(self, work: Any) -> Verdict:
        """Judge the agent's work in a new sandbox. Override it for a judge that needs several.

        Raises:
            UsageError: The judge's spec is that of the agent, and there is a copy; see `lease`.
        """
        task = self.task

        async def judge(sandbox: Sandbox) -> Verdict:
            if task.judge_spec == task.spec:  # work that runs here could read the answers, even if no agent could
                await require_no_copies(self.sandboxes, sandbox, task.spec, task.modules)
            return await task.judge(sandbox, work)

        return await in_fresh_sandbox(
            self.sandboxes,
            task.judge_spec,
            judge,
            ended=lambda cause: Verdict(reward=0.0, log=f"the judge's sandbox has ended: {cause}"),
        )


async def require_no_copies(
    sandboxes: SandboxPool, sandbox: Sandbox, spec: SandboxSpec, modules: Sequence[str]
) -> None:
    """Raise an error if envkit or one of `modules` is in a sandbox; looked up once per pool, image and modules.

    Sandboxes of the backend ``process`` are not checked: they isolate nothing, and show all of this machine.

    Raises:
        UsageError: The sandbox has a copy; the message has its place.
    """
    clean = _CLEAN.setdefault(sandboxes, set())
    key = (spec.image, spec.untrusted, spec.profile, tuple(modules))
    if key in clean or sandbox.grader_home != GRADER_HOME:
        return
    for name in ("envkit", *modules):
        found = await sandbox.exec(["sh", "-c", _FIND, "sh", name])
        if copies := found.stdout.splitlines():
            raise UsageError(
                f"{name} is installed in the sandbox, at {copies[0]}, where the agent can read the answers; "
                "uninstall it, or use an image without it (without an image, a spec with untrusted=True hides packages)"
            )
    clean.add(key)
