"""A ``gymnasium.Env`` that plays the episodes of any `envkit.protocols.EnvHost`, and the thread of its event loop."""

from __future__ import annotations

import asyncio
import os
import threading
import weakref
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager, ExitStack
from typing import Any, TypeAlias, cast

import gymnasium
from anyio.from_thread import BlockingPortal, BlockingPortalProvider

from envkit.env import check_seed
from envkit.errors import EnvError, StepOrderError
from envkit.protocols import EnvHost, Episode
from envkit.spaces import Utf8Text
from envkit.types import Info, Observation, Options, Task
from envkit.types.outcomes import is_success

MAX_TEXT = 1 << 20
"""Maximum characters of an observation or action in `BlockingEnv`."""

OpenHost: TypeAlias = Callable[[], AbstractAsyncContextManager[EnvHost]]

_LOOP_THREADS: dict[int, BlockingPortalProvider] = {}
"""The shared event-loop thread of each process id. A forked process needs its own: fork does not copy threads."""


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
        self._episode = None
        self._lease.close()
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
