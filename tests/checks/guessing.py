"""An environment with players for the tests of ``check-task``: guess the seed."""

from __future__ import annotations

from typing import Any

from envkit.env import AsyncEnv
from envkit.protocols import EpisodePlayer, Player
from envkit.trainer_bridge.rollout.players import Chooser
from envkit.types import Observation, Options, Reset, RolloutRequest, Step


class Guess(AsyncEnv):
    """The answer is the seed. The grader gives 1 for it; for ``void`` it cannot run, and ``half`` earns 0.5."""

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self.seed, self.action = seed, ""
        return Reset(Observation("Guess."), {}, is_graded=True)

    async def step(self, action: str) -> Step:
        self.action = action
        return Step(Observation(""), 0.0, True, False, {})

    async def grade(self) -> float | None:
        if self.action == "void":
            return None
        return 0.5 if self.action == "half" else float(self.action == str(self.seed))

    async def close(self) -> None: ...


class Says(Player):
    """A player that says one thing, or ``str(seed)`` for ``seed``. In some tasks, it says something else."""

    def __init__(self, action: str, **exceptions: str) -> None:
        self.action, self.exceptions, self.played = action, exceptions, 0

    def __call__(self, **options: Any) -> Says:
        return self

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        action = self.exceptions.get(f"task_{request.task.seed}", self.action)
        if action == "sometimes":
            self.played += 1
            action = "wrong" if self.played % 3 == 0 else "seed"
        return Chooser(lambda observation: str(request.task.seed) if action == "seed" else action)
