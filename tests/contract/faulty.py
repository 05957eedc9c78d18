"""Environments that return or raise what no environment may, for `test_faults.py`."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import gymnasium

import envkit
from envkit.env import AsyncEnv
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step


def _raise(error: BaseException) -> NoReturn:
    raise error


def _numbers() -> Iterator[int]:
    yield from itertools.count()


def _step(**changed: Any) -> Callable[[], object]:
    values = {"text": "!", "reward": 0.5, "terminated": True, "truncated": False, "info": {}, **changed}
    return lambda: tuple(values.values())


def _info(value: object) -> Callable[[], object]:
    return _step(info={"value": value})


STEP_FAULTS: Mapping[str, tuple[Callable[[], object], str]] = {
    "nothing": (lambda: None, "TypeError in step: "),
    "a short tuple": (lambda: ("", 0.0, {}), "Error in step: "),
    "a generator": (_numbers, "Error in step: "),
    "text None": (_step(text=None), "the observation is None; return text"),
    "text surrogate": (_step(text="\ud800"), "surrogates not allowed"),
    "reward None": (_step(reward=None), "the reward is None; return a finite number"),
    "reward list": (_step(reward=[0.5]), "the reward is [0.5]; return a finite number"),
    "reward huge": (_step(reward=10**400), "the reward is 1000"),
    "reward beyond float32": (_step(reward=-1e39), "the reward is -1e+39; return a finite number"),
    "reward nan": (_step(reward=float("nan")), "the reward is nan; return a finite number"),
    "flag": (_step(truncated="no"), "truncated is 'no'; return True or False"),
    "info None": (_step(info=None), "the info is None; return a dict"),
    "info object": (_info(object()), "not JSON serializable: object"),
    "info huge": (_info(10**400), "Integer exceeds 64-bit range"),
    "KeyError": (lambda: _raise(KeyError("x")), "KeyError in step: 'x'"),
    "sys.exit": (lambda: sys.exit(3), "SystemExit in step: 3"),
    "GeneratorExit": (lambda: _raise(GeneratorExit()), "GeneratorExit in step"),
    "KeyboardInterrupt": (lambda: _raise(KeyboardInterrupt()), "KeyboardInterrupt in step"),
}
RESET_FAULTS: Mapping[str, tuple[Callable[[], object], str]] = {
    "reset: nothing": (lambda: None, "TypeError in reset: "),
    "reset: info None": (lambda: ("?", None), "the info is None; return a dict"),
    "reset: text surrogate": (lambda: ("\ud800", {}), "surrogates not allowed"),
    "reset: sys.exit": (lambda: sys.exit(3), "SystemExit in reset: 3"),
}
FAULTS = {**STEP_FAULTS, **RESET_FAULTS}
_RESETS = itertools.count()


def _fault_of(options: Options | None) -> str:
    return str((options or {}).get("fault", list(FAULTS)[next(_RESETS) % len(FAULTS)]))


class Faulty(gymnasium.Env[str, str]):
    """Commits the fault that the option `fault` names; without it, each reset commits the next one."""

    def __init__(self, fault: str = "") -> None: ...

    metadata: dict[str, Any] = {}  # noqa: RUF012 - as Gymnasium's
    observation_space = action_space = Utf8Text(9999)

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        self.fault = _fault_of(options)
        if self.fault in RESET_FAULTS:
            return FAULTS[self.fault][0]()  # type: ignore[return-value]
        return self.fault, {"legal_moves": ["a"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        return FAULTS[self.fault][0]()  # type: ignore[return-value]


class AsyncFaulty(AsyncEnv):
    """The same as an `AsyncEnv`."""

    def __init__(self, fault: str = "") -> None: ...

    async def reset(self, *, seed: int, options: Options) -> Reset:
        self.fault = _fault_of(options)
        if self.fault in RESET_FAULTS:
            found: Any = FAULTS[self.fault][0]()
            return Reset(Observation(found[0]), found[1]) if isinstance(found, tuple) else found
        return Reset(Observation(self.fault, ("a",)), {})

    async def step(self, action: str) -> Step:
        found: Any = FAULTS[self.fault][0]()
        return Step(Observation(found[0]), *found[1:]) if isinstance(found, tuple) and len(found) == 5 else found

    async def close(self) -> None: ...


def register_all() -> None:
    """Register both."""
    envkit.register("Faulty-v0", f"{__name__}:Faulty")
    envkit.register("AsyncFaulty-v0", f"{__name__}:AsyncFaulty")
