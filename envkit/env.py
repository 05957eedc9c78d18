"""The base class `AsyncEnv`, and adapters between environments and `envkit.protocols.Episode`.

An environment that only computes is a ``gymnasium.Env`` with text observations and actions; `GymEpisode` plays its
episodes. An environment that does I/O is an `AsyncEnv`; `AsyncEpisode` plays its episodes.
"""

from __future__ import annotations

import asyncio
import reprlib
import sys
import traceback
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Real
from types import FrameType
from typing import Any, ClassVar

import gymnasium
import msgspec
import numpy as np

from envkit.errors import (
    CapacityError,
    ConfigError,
    EnvError,
    EnvkitError,
    OptionError,
    SandboxError,
    SandboxLostError,
    SandboxStartError,
    StepOrderError,
    UnknownEnvError,
    UsageError,
)
from envkit.installation import explain
from envkit.metrics import Fold
from envkit.protocols import Episode, Sandbox
from envkit.runs.files import encoded
from envkit.types import Info, Observation, Options, Reset, Step, Task

_MAX_TRACE = 8192
"""Maximum characters of a traceback in an error; only the end of a longer one is kept."""

_INTENDED_ERRORS = (
    *(CapacityError, ConfigError, EnvError, OptionError),
    *(SandboxError, StepOrderError, UnknownEnvError, UsageError),
)
"""Errors that environments raise on purpose: about the caller's request, or about a sandbox that they use."""

_SANDBOX_CODE = ("envkit.wiring.", "envkit.sandbox.")
_BETWEEN = {"anyio", "envkit", "gymnasium"} | sys.stdlib_module_names
"""Top-level packages that call environments. Traceback frames in them are not the environment's own code."""

_ERRORS_OF_PLAY = (CapacityError, EnvError, SandboxLostError, SandboxStartError)
"""Errors that the step and the grader of an `AsyncEnv` may raise on purpose. They void the episode, not the run."""

_MAX_REWARD = 3.4e38
"""Largest absolute value of a reward: training stores rewards as float32."""


class AsyncEnv(ABC):
    """An environment that does I/O, for example with a sandbox, a server or a judge model.

    Attributes:
        metrics: Maps each metric in ``info`` to its aggregation over an episode: ``"mean"``, ``"last"`` or ``"sum"``.
        success_return: `envkit.registry.EnvSpec.success_return`, set when the environment is created.
        grader_output: The end of what the grader printed, for people; set by `grade`, and emptied before each reset.
    """

    metrics: ClassVar[Mapping[str, Fold]] = {}
    success_return: float | None = None
    grader_output: str = ""

    @abstractmethod
    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Start an episode."""

    @abstractmethod
    async def step(self, action: str) -> Step:
        """Play one action."""

    @property
    def sandbox(self) -> Sandbox | None:
        """The sandbox of the running episode in which a foreign agent can work; None without one."""
        return None

    async def grade(self) -> float | None:
        """Return the reward of the grader, if the reset returned `is_graded`; see `envkit.protocols.Episode.grade`."""
        raise NotImplementedError(f"{type(self).__name__}.grade: the reset returned is_graded, so define this method")

    @abstractmethod
    async def close(self) -> None:
        """Release the environment's resources; idempotent. Called at the end of every episode."""


def _declared(metadata: Mapping[str, Any]) -> Info:
    """Return what an environment declares about its episodes, as part of the info of their resets."""
    folds, success_return = metadata.get("metrics"), metadata.get("success_return")
    return {"metrics": dict(folds or {}), **({} if success_return is None else {"success_return": success_return})}


def check_seed(seed: object) -> None:
    """Raise `OptionError` unless `seed` is a whole number from 0, or None."""
    if seed is not None and (not isinstance(seed, int) or seed < 0):
        raise OptionError("seed", f"must be a whole number from 0, or None, got {seed!r}")


class GymEpisode(Episode):
    """Plays a task in a ``gymnasium.Env``. It calls the environment directly, not in a thread."""

    computes = True

    def __init__(self, env: gymnasium.Env[str, str], task: Task) -> None:
        self._env = env
        self._task = task
        self._running = False
        self._last_moves: Sequence[object] = ()
        """The value of ``info["legal_moves"]`` from which `_moves` was made."""
        self._moves: tuple[str, ...] = ()

    async def reset(self) -> Reset:
        try:
            text, info = self._env.reset(seed=self._task.seed, options=dict(self._task.options))
            start = Reset(self._observe(text, info), {**info, **_declared(self._env.metadata)})
        except BaseException as error:  # with SystemExit and others, which would end or block the event loop
            raise env_error(error, self._task.env_id, "reset", env=self._env) from error
        self._running = True
        return start

    async def step(self, action: str) -> Step:
        return self.step_now(action)

    def step_now(self, action: str) -> Step:
        """Play a step without ``await``."""
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        try:
            text, reward, terminated, truncated, info = self._env.step(action)
            step = _checked(self._observe(text, info), reward, terminated, truncated, info)
        except BaseException as error:
            self._running = False
            raise env_error(error, self._task.env_id, "step", env=self._env) from error
        self._running = not step.ended
        return step

    def _observe(self, text: str, info: Info) -> Observation:
        _check_seen(text, info)
        moves = info.get("legal_moves")
        if not isinstance(moves, (list, tuple)):
            return Observation(text)
        if moves != self._last_moves:  # in most environments the legal moves never change
            self._last_moves = moves[:]
            self._moves = tuple(map(str, moves))
        return Observation(text, self._moves)


class AsyncEpisode(Episode):
    """Plays a task in an `AsyncEnv`.

    The reset may reject the task, for example with an `OptionError`. An error in a step or grader is raised as an
    `EnvError`, unless a sandbox was lost or did not start: a file that the agent deleted voids only its episode.
    """

    def __init__(self, env: AsyncEnv, task: Task) -> None:
        self._env = env
        self._task = task
        self._running = False

    async def reset(self) -> Reset:
        self._env.grader_output = ""
        try:
            start = await self._env.reset(seed=self._task.seed, options=self._task.options)
            if not isinstance(start, Reset):
                raise TypeError(f"the result is {reprlib.repr(start)}; return a Reset")
            _check_seen(getattr(start.observation, "text", start.observation), start.info)
            encoded(start)
            declared = _declared({"metrics": self._env.metrics, "success_return": self._env.success_return})
            start = msgspec.structs.replace(start, info={**start.info, **declared})
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise env_error(error, self._task.env_id, "reset", env=self._env) from error
        self._running = True
        return start

    async def step(self, action: str) -> Step:
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        self._running = False  # a cancelled step leaves the environment in an unknown state
        try:
            step = await self._env.step(action)
            if not isinstance(step, Step):
                raise TypeError(f"the result is {reprlib.repr(step)}; return a Step")
            _check_seen(getattr(step.observation, "text", step.observation), step.info)
            step = _checked(*step)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise env_error(error, self._task.env_id, "step", _ERRORS_OF_PLAY, env=self._env) from error
        self._running = not step.ended
        return step

    async def grade(self) -> float | None:
        self._running = False
        try:
            grade = await self._env.grade()
            return None if grade is None else _number("grade", grade)
        except asyncio.CancelledError:
            raise
        except BaseException as error:
            raise env_error(error, self._task.env_id, "grade", _ERRORS_OF_PLAY, env=self._env) from error

    @property
    def sandbox(self) -> Sandbox | None:
        return self._env.sandbox

    @property
    def grader_output(self) -> str:
        return self._env.grader_output


def _check_seen(text: object, info: object) -> None:
    """Raise `TypeError` if the observation or info is invalid or not JSON. The message says what to return instead."""
    if not isinstance(text, str):
        raise TypeError(
            f"the observation is {reprlib.repr(text)}; return text that a language model can read, and the rest in info"
        )
    if not isinstance(info, dict):
        raise TypeError(f"the info is {reprlib.repr(info)}; return a dict")
    try:
        encoded(info if text.isascii() else [text, info])
    except TypeError as error:
        raise TypeError(
            f"the observation or info is not JSON ({error}); use only numbers, texts, lists and dicts"
        ) from error


def _checked(observation: Observation, reward: object, terminated: object, truncated: object, info: Info) -> Step:
    """Return a step with checked values; raise `TypeError` with what to return instead if one is invalid."""
    for name, flag in (("terminated", terminated), ("truncated", truncated)):
        if not isinstance(flag, (bool, np.bool_)):
            raise TypeError(f"{name} is {reprlib.repr(flag)}; return True or False")
    return Step(observation, _number("reward", reward), bool(terminated), bool(truncated), info)


def _number(name: str, value: object) -> float:
    if not isinstance(value, (Real, np.bool_)) or not -_MAX_REWARD <= value <= _MAX_REWARD:  # type: ignore[operator]
        raise TypeError(
            f"the {name} is {reprlib.repr(value)}; return a finite number up to {_MAX_REWARD:g}, such as 0.0"
        )
    return float(value)


def env_error(
    error: BaseException,
    env_id: str,
    call: str,
    intended: tuple[type[EnvkitError], ...] = _INTENDED_ERRORS,
    *,
    env: object = None,
) -> EnvkitError:
    """Return the error to report for an environment that raised `error`.

    An error that environments raise on purpose (`intended`) is returned unchanged. Any other error becomes an
    `EnvError`. So does a `ConfigError` or `UsageError` that the code which opens sandboxes for environments raised.

    Args:
        error: The exception, with its traceback.
        env_id: Id of the environment.
        call: The method that raised: ``"reset"``, ``"step"``, ``"grade"``, ``"render"`` or ``"__init__"``.
        intended: Classes of errors that environments raise on purpose in this call.
        env: The environment. An error about what its method returned names the line where the method is defined.
    """
    frames = list(traceback.walk_tb(error.__traceback__))
    raised_in = _module(frames[-1][0]) if frames else ""
    is_about_request = not (isinstance(error, (ConfigError, UsageError)) and raised_in.startswith(_SANDBOX_CODE))
    if isinstance(error, intended) and is_about_request:
        return error
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return EnvError(
        env_id, f"{type(error).__name__} in {call}: {error}", _place(frames) or _definition(env, call), trace
    )


@contextmanager
def attributed(env_id: str, call: str) -> Iterator[None]:
    """Convert an exception in a ``with`` block to an `EnvError` of the environment; see `env_error`.

    An `ImportError` for a missing package of an envkit extra is not converted, so that the command line can print how
    to install the extra.
    """
    try:
        yield
    except (Exception, SystemExit) as error:
        if isinstance(error, ImportError) and explain(error) is not None:
            raise
        raised = error if isinstance(error, EnvkitError) else env_error(error, env_id, call)
        raise raised from (None if raised is error else error)


def _definition(env: object, call: str) -> str:
    """Return ``FILE:LINE`` of the definition of a method; empty if it is not written in Python."""
    code = getattr(getattr(getattr(env, "unwrapped", env), call, None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return ``FILE:LINE`` of the innermost frame of the environment's own code; empty if none is found.

    The environment's own code is its package, and all files outside of ``site-packages``. Libraries do not count.
    """
    own = [(_module(frame), frame.f_code.co_filename, line) for frame, line in frames if _is_env_code(_module(frame))]
    # A base class such as `ToolEnv` calls the environment's own code.
    own = [one for one in own if not one[0].startswith("envkit.")] or own
    for module, file, line in reversed(own):
        if module.partition(".")[0] == own[0][0].partition(".")[0] or "site-packages" not in file:
            return f"{file}:{line}"
    return ""


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _is_env_code(module: str) -> bool:
    return module.startswith("envkit.environments.") or module.partition(".")[0] not in _BETWEEN
