"""The base class `AsyncEnv`, and adapters between environments and `envkit.protocols.Episode`.

An environment that only computes is a ``gymnasium.Env`` with text observations and actions; `GymEpisode` plays its
episodes. An environment that does I/O is an `AsyncEnv`; `AsyncEpisode` plays its episodes. In the reverse direction,
`BlockingEnv` is a ``gymnasium.Env`` that plays the episodes of any `envkit.protocols.EnvHost`.
"""

from __future__ import annotations

import asyncio
import os
import reprlib
import sys
import threading
import traceback
import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, ExitStack
from numbers import Real
from types import FrameType
from typing import Any, ClassVar, TypeAlias, cast

import gymnasium
import msgspec
import numpy as np
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

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
from envkit.metrics import Fold
from envkit.protocols import EnvHost, Episode
from envkit.runs.files import encoded
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Reset, Step, Task
from envkit.types.outcomes import is_success

MAX_TEXT = 1 << 20
"""Maximum characters of an observation or action in `BlockingEnv`."""

OpenHost: TypeAlias = Callable[[], AbstractAsyncContextManager[EnvHost]]

_MAX_TRACE = 8192
"""Maximum characters of a traceback in an error; only the end of a longer one is kept."""

_INTENDED_ERRORS = (
    *(CapacityError, ConfigError, EnvError, OptionError),
    *(SandboxError, StepOrderError, UnknownEnvError, UsageError),
)
"""Errors that environments raise on purpose: about the caller's request, or about a sandbox that they use."""

_ERRORS_OF_PLAY = (CapacityError, EnvError, SandboxLostError, SandboxStartError)
"""Errors that the step and the grader of an `AsyncEnv` may raise on purpose. They void the episode, not the run."""

_MAX_REWARD = 3.4e38
"""Largest absolute value of a reward: training stores rewards as float32."""

_SANDBOX_CODE = ("envkit.wiring.", "envkit.sandbox.")
_BETWEEN = {"anyio", "envkit", "gymnasium"} | sys.stdlib_module_names
"""Top-level packages that call environments. Traceback frames in them are not the environment's own code."""

_LOOP_THREADS: dict[int, BlockingPortalProvider] = {}
"""The shared event-loop thread of each process id. A forked process needs its own: fork does not copy threads."""


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
    def grader_output(self) -> str:
        return self._env.grader_output


def _check_seen(text: object, info: object) -> None:
    """Check the observation and the info that a reset or step returned.

    Raises:
        TypeError: One of them is invalid, or cannot be written as JSON. The message says what to return instead.
    """
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
    """Return a step with the values that an environment returned, whose observation and info were checked.

    Raises:
        TypeError: A value is invalid. The message says what to return instead.
    """
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


class BlockingEnv(gymnasium.Env[str, str]):
    """A ``gymnasium.Env`` that plays the episodes of an `envkit.protocols.EnvHost`, which runs in another thread.

    Args:
        env_id: Id of the environment to play.
        open_host: Opens the host. The constructor enters its context in the event-loop thread, and `close` exits it.
        options: Options of all episodes, which ``reset(options=...)`` overrides for one episode.
    """

    def __init__(self, env_id: str, open_host: OpenHost, options: Options | None = None) -> None:
        self.observation_space = Utf8Text(MAX_TEXT)
        self.action_space = Utf8Text(MAX_TEXT)
        self._env_id = env_id
        self._options = dict(options or {})
        self._resources = ExitStack()
        self._episode: Episode | None = None
        self._is_graded = False
        self._portal: BlockingPortal = self._resources.enter_context(loop_thread())
        try:
            self._host = self._resources.enter_context(self._portal.wrap_async_context_manager(open_host()))
        except BaseException:
            self._resources.close()
            raise
        self._lease = self._resources.enter_context(ExitStack())
        # The finalizer also runs when the interpreter exits; the loop thread still exists at that time.
        self._finalizer = weakref.finalize(self, close_here, os.getpid(), self._resources)

    def __repr__(self) -> str:
        served = {} if self.spec is None or "url" not in self.spec.kwargs else {"url": self.spec.kwargs["url"]}
        options = "".join(f", {name}={value!r}" for name, value in {**served, **self._options}.items())
        return f"{type(self).__name__}({self._env_id!r}{options})"

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, Info]:
        """Start an episode with `seed`, by default a random one; `options` override those of the constructor.

        Returns the observation and the info, which contains ``legal_moves`` if the environment reports legal moves, and
        its ``system`` prompt and ``tools`` if it has any.
        """
        check_seed(seed)
        super().reset(seed=seed)
        task_seed = int(self.np_random.integers(1 << 31)) if seed is None else seed
        task = Task(self._env_id, task_seed, {**self._options, **(options or {})})
        self._end_lease()
        self._episode = self._lease.enter_context(self._portal.wrap_async_context_manager(self._host.lease(task)))
        start = self._portal.call(self._episode.reset)
        self._is_graded = start.is_graded
        info = dict(start.info)
        metrics = cast("Info", info.get("metrics") or {})
        declared: Info = {"metrics": {**({"success": "last"} if start.is_graded else {}), **metrics}}
        if "success_return" in info:
            declared["success_return"] = info["success_return"]
        info |= declared
        self.metadata = {**self.metadata, **declared}
        if start.system is not None:
            info["system"] = start.system
        if start.tools:
            info["tools"] = list(start.tools)
        return start.observation.text, _with_moves(info, start.observation)

    def step(self, action: str) -> tuple[str, float, bool, bool, Info]:
        """Play `action`; return observation, reward, terminated, truncated and info.

        If the step ends an episode with a grader, its reward includes the grade, and the info contains ``grade`` and
        ``success``, whether the grade is at least 1.

        Raises:
            StepOrderError: `step` was called before `reset`, or after the end of the episode.
            EnvError: The environment raised an exception, or its grader could not run.
        """
        if self._episode is None:
            raise StepOrderError("step before reset")
        step = self._portal.call(self._episode.step, action)
        info, reward = _with_moves(step.info, step.observation), step.reward
        if self._is_graded and step.ended:
            grade = self._portal.call(self._episode.grade)
            if grade is None:
                why = "no grade: the grader could not run, so the episode is void; play it again"
                raise EnvError(self._env_id, why)
            info = {"success": bool(is_success(None, grade, reward, None)), **info, "grade": grade}
            reward += grade
        return step.observation.text, reward, step.terminated, step.truncated, info

    def close(self) -> None:
        """End the episode and close the host; idempotent. At its exit, the interpreter does the same."""
        self._episode = None
        self._finalizer()

    def _end_lease(self) -> None:
        self._episode = None
        self._lease.close()


def loop_thread() -> BlockingPortalProvider:
    """Return the event-loop thread that all blocking interfaces of this process share. It ends when all are closed."""
    return _LOOP_THREADS.setdefault(os.getpid(), BlockingPortalProvider())


def close_here(pid: int, resources: ExitStack) -> None:
    """Close resources that process `pid` opened; do nothing in a process that was forked from it.

    The garbage collector may call this in any thread. If the thread runs an event loop, which may be the shared one,
    closing there could deadlock, so a new thread closes the resources.
    """
    if os.getpid() != pid:
        return
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        resources.close()
    else:
        threading.Thread(target=resources.close, name="envkit-close").start()  # noqa: TID251 - no caller awaits it


def _with_moves(info: Info, observation: Observation) -> Info:
    """Return the info with the observation's legal moves, if any, under the key ``"legal_moves"``."""
    return {"legal_moves": list(observation.legal_moves), **info} if observation.legal_moves else info


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
    frames = list(_frames(error))
    raised_in = _module(frames[-1][0]) if frames else ""
    is_about_request = not (isinstance(error, (ConfigError, UsageError)) and raised_in.startswith(_SANDBOX_CODE))
    if isinstance(error, intended) and is_about_request:
        return error
    trace = "".join(traceback.format_exception(error))[-_MAX_TRACE:]
    return EnvError(
        env_id, f"{type(error).__name__} in {call}: {error}", _place(frames) or _definition(env, call), trace
    )


def _definition(env: object, call: str) -> str:
    """Return ``FILE:LINE`` of the definition of a method; empty if it is not written in Python."""
    code = getattr(getattr(getattr(env, "unwrapped", env), call, None), "__code__", None)
    return f"{code.co_filename}:{code.co_firstlineno}" if code else ""


def _place(frames: Sequence[tuple[FrameType, int]]) -> str:
    """Return ``FILE:LINE`` of the innermost frame of the environment's own code; empty if none is found.

    The environment's own code is its package, and all files outside of ``site-packages``. Libraries do not count.
    """
    own = [(frame, line) for frame, line in frames if _is_env_code(_module(frame))]
    # A base class such as `ToolEnv` calls the environment's own code.
    own = [one for one in own if not _module(one[0]).startswith("envkit.")] or own
    for frame, line in reversed(own):
        file = frame.f_code.co_filename
        if _package(_module(frame)) == _package(_module(own[0][0])) or "site-packages" not in file:
            return f"{file}:{line}"
    return ""


def _frames(error: BaseException) -> Iterator[tuple[FrameType, int]]:
    """Yield the frames of the error's traceback with their line numbers, outermost first."""
    return traceback.walk_tb(error.__traceback__)


def _module(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", ""))


def _package(module: str) -> str:
    return module.partition(".")[0]


def _is_env_code(module: str) -> bool:
    return module.startswith("envkit.environments.") or _package(module) not in _BETWEEN
