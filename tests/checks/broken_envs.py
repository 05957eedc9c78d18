"""One environment that keeps the contract, and others that violate it in one way each."""

from __future__ import annotations

import math
import os
import random
import tempfile
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import anyio
import gymnasium
from gymnasium.vector import AutoresetMode, SyncVectorEnv

from envkit.env import AsyncEnv
from envkit.errors import StepOrderError
from envkit.metrics import Fold
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, stable_hash

MOVES = ("down", "up")
LEFT = "a-broken-environment-left-this.log"


class Walk(gymnasium.Env[str, str]):
    """Walk down to 0 from somewhere below `top`, in as many moves as that."""

    metadata = {"metrics": {"success": "last", "action_is_valid": "mean"}}  # noqa: RUF012 - as Gymnasium's
    observation_space = action_space = Utf8Text(10_000_000)

    def __init__(self, top: int = 6) -> None:
        self._usual = self._top = top
        self._running = False
        self._moves = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        super().reset(seed=seed)
        level = int(self.np_random.integers(1 << 31)) if seed is None else seed
        self._top = int((options or {}).get("top", self._usual))
        self._at = self._start(level)
        self._moves = 0
        self._running = True
        return self._text(), {"legal_moves": list(MOVES)}

    def step(self, action: str) -> tuple[Any, float, bool, bool, Info]:
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        self._moves += 1
        self._at += {"down": -1, "up": 1}.get(action, 0)
        success, late = self._at == 0, self._moves >= self._top
        self._running = not (success or late)
        info: Info = {"legal_moves": list(MOVES), "success": success, "action_is_valid": action in MOVES}
        return self._text(), float(success), success, late and not success, info

    def _start(self, level: int) -> int:
        return 2 + stable_hash("Walk", level, self._top) % (self._top - 2)

    def _text(self) -> Any:
        return f"You are at {self._at}."


class WalkExpert:
    def __init__(self, **options: Any) -> None:
        pass

    def moves(self, observation: Observation) -> Sequence[str]:
        return ["down"]

    def is_hazardous(self, observation: Observation) -> bool:
        return False

    def answer(self, move: str) -> str:
        return move


class LostExpert(WalkExpert):
    def moves(self, observation: Observation) -> Sequence[str]:
        return ["up"]


class Unseeded(Walk):
    def _text(self) -> Any:
        return f"{super()._text()} It is {random.randrange(10**9)} o'clock."


class Leaking(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        moves = self._moves
        start = super().reset(seed=seed, options=options)
        self._moves = moves % 3  # from the previous episode
        return start


class ObservesDict(Walk):
    def _text(self) -> Any:
        return {"at": self._at}


class NanReward(Walk):
    def step(self, action: str) -> tuple[Any, float, bool, bool, Info]:
        text, _, *ends, info = super().step(action)
        return text, math.nan, ends[0], ends[1], info


class TellsNothing(Walk):
    """Declares no metric for success."""

    metadata = {"metrics": {"action_is_valid": "mean"}}  # noqa: RUF012 - as Gymnasium's


class RaisesOnBadAction(Walk):
    def step(self, action: str) -> tuple[Any, float, bool, bool, Info]:
        MOVES.index(action)
        return super().step(action)


class Declared(Walk):
    """Declares an option that has no effect."""

    options: ClassVar[Options] = {"unused": 3}

    def __init__(self, **options: Any) -> None:
        super().__init__()


class IgnoresOptions(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        return super().reset(seed=seed)


class KeepsOptions(Walk):
    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, Info]:
        self._usual = (options or {}).get("top", self._usual)
        return super().reset(seed=seed)


class IgnoresAutoreset(SyncVectorEnv):
    def __init__(self, num_envs: int, autoreset: AutoresetMode, **options: Any) -> None:
        super().__init__([lambda: Walk(**options)] * num_envs, autoreset_mode=AutoresetMode.NEXT_STEP)


class Leaves(Walk):
    """Leaves a running program."""

    def __init__(self, top: int = 6) -> None:
        super().__init__(top)
        os.posix_spawn("/bin/sleep", ["sleep", "8"], os.environ)


class LeavesFile(Walk):
    """Leaves a file."""

    def __init__(self, top: int = 6) -> None:
        super().__init__(top)
        Path(tempfile.gettempdir(), LEFT).write_text("made")


class Waits(AsyncEnv):
    """Takes 30 ms for the first step of each episode without blocking."""

    metrics: ClassVar[Mapping[str, Fold]] = {"success": "last"}

    def __init__(self) -> None:
        self._walk = Walk()
        self._is_first = True

    async def reset(self, *, seed: int, options: Options) -> Reset:
        text, info = self._walk.reset(seed=seed)
        self._is_first = True
        return Reset(Observation(text, MOVES), info)

    async def step(self, action: str) -> Step:
        if self._is_first:
            await self._wait()
        self._is_first = False
        text, reward, terminated, truncated, info = self._walk.step(action)
        return Step(Observation(text, MOVES), reward, terminated, truncated, info)

    async def _wait(self) -> None:
        await anyio.sleep(0.03)

    async def close(self) -> None:
        pass


class Blocks(Waits):
    async def _wait(self) -> None:
        threading.Event().wait(0.05)
