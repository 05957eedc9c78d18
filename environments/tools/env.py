"""The base class of environments in which a model uses a sandbox through tools."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import anyio
import msgspec

from envkit import clock
from envkit.env import AsyncEnv
from envkit.errors import (
    MissingFileError,
    OptionError,
    RefusedFileError,
    RequestError,
    SandboxLostError,
    StepOrderError,
    TooLargeError,
    did_you_mean,
)
from envkit.metrics import Fold
from envkit.protocols import Judge, Sandbox, SandboxPool
from envkit.types import JSON, Cause, Info, Observation, Options, Reset, SandboxSpec, Step, Submission

from .calls import CallStatus, ToolCall, parse_call
from .limits import LEASE_S, MAX_OUTPUT, ToolLimits, cut_middle
from .shell_tools import bash, edit_file, submit, view_file
from .tool import Tool, ToolFunction, tool_of

EnvT = TypeVar("EnvT", bound="ToolEnv")

_GRACE_S = 10.0
"""Seconds beyond its timeout after which a tool call is cancelled. Tools that obey their timeout end before."""

_MAX_FILE = 16 << 20
"""Maximum bytes of a submitted file."""

_FOR_THE_MODEL = (MissingFileError, RefusedFileError, RequestError, OSError, ValueError)
"""Exceptions of a tool that are a result for the model. Others are errors of the environment.

The client of a pool on a server raises `RequestError` for a request that only a tool's arguments can have made invalid,
such as a path with NUL or a text that is too long.
"""

_LIMITS = [field.name for field in fields(ToolLimits)]

_CALLS = frozenset({CallStatus.OK, CallStatus.UNKNOWN_TOOL, CallStatus.BAD_ARGUMENTS})
"""Statuses of a call, whose result has the role ``tool``. Other text is answered as ``user``."""


class ToolEnv(AsyncEnv):
    """An environment in which a model works on a task in a sandbox, by calling tools.

    A subclass sets the class attributes, and defines `start` and, if it grades by itself, `grade`. It is registered
    with ``needs={"sandbox"}`` or ``needs={"sandbox", "judge"}``. Each episode has its own sandbox, from `reset` to
    `submission` or `close`. An action is a tool call (see `parse_call`) or text without one, to which the environment
    answers how to call a tool. The episode ends with the call of a tool named ``submit``, or is truncated by a limit.
    All rewards of steps are 0.

    If the agent ends its own sandbox, for example by using up its memory, the episode ends with reward 0 and without a
    grader; ``info["sandbox_ended"]`` is the cause. Any other loss of the sandbox raises `SandboxLostError`.

    Attributes:
        tools: Functions that become the tools; see `tool_of`.
        spec: Spec of the sandbox; see also `spec_of`.
        system: System prompt; None for no system prompt.
        options: Names of the environment's options, with their defaults. The limits below are also options.
        max_turns: Maximum number of actions.
        command_timeout_s: Maximum seconds of one tool call.
        episode_timeout_s: Maximum seconds of all tool calls together.
        max_output: Maximum characters of a tool's result.
        sandboxes: Leases the sandboxes.
        judge: The judge model; None if the environment does not need one.
        data: Folders of the environment's data by name; see `EnvSpec.data`.
        grade_limit_s: Maximum seconds of the programs of the grader by its own limits, for the deadline of those who
            wait for it; None if there is no such limit. It is read after `start`.
        submitted: Result of the tool ``submit``; None before it was called.
        sandbox_ended: Why the agent ended its sandbox; None if it did not.

    Raises:
        ConfigError: A tool's docstring or annotations are incomplete.
        OptionError: An option is unknown, or the value of a limit is invalid.
    """

    tools: Sequence[ToolFunction] = (bash, view_file, edit_file, submit)
    spec: SandboxSpec = SandboxSpec()
    system: str | None = None
    options: ClassVar[Options] = {}
    max_turns: int = 50
    command_timeout_s: float = 60.0
    episode_timeout_s: float = 1800.0
    max_output: int = MAX_OUTPUT

    metrics: ClassVar[Mapping[str, Fold]] = {
        "action_is_valid": "mean",
        **{f"tool_call_{status}": "mean" if status is CallStatus.OK else "sum" for status in CallStatus},
    }

    grade_limit_s: float | None = None
    submitted: str | None = None
    sandbox_ended: Cause | None = None

    def __init__(
        self,
        *,
        sandboxes: SandboxPool,
        judge: Judge | None = None,
        data: Mapping[str, Path] | None = None,
        **options: JSON,
    ) -> None:
        self.sandboxes, self.judge, self.data = sandboxes, judge, dict(data or {})
        self._defaults = self.option_defaults()
        self._defaults = self._with(options)
        self.use_tools(self.tools)
        self._limits = self._limits_of(self._defaults)
        self._lease = AsyncExitStack()
        self._sandbox: Sandbox | None = None
        self._turns, self._used_s = 0, 0.0
        self._running = False

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if "grade" in cls.__dict__:
            cls.grade = _unless_agent_ended_it(cls.grade)  # type: ignore[assignment, method-assign]

    @classmethod
    def option_defaults(cls) -> Options:
        """Return the environment's options and the limits, with their defaults."""
        return {**cls.options, **{name: getattr(cls, name) for name in _LIMITS}, **cls.options}

    @property
    def sandbox(self) -> Sandbox:
        """The sandbox of the running episode."""
        if self._sandbox is None:
            raise StepOrderError("there is no sandbox before reset, or after close")
        return self._sandbox

    def use_tools(self, tools: Sequence[ToolFunction]) -> None:
        """Replace the tools. Call it before an episode starts, at the latest in `lease`.

        Raises:
            ConfigError: A tool's docstring or annotations are incomplete.
        """
        self.tools = tools
        found = [tool_of(function) for function in tools]
        self._tools: Mapping[str, Tool] = {tool.name: tool for tool in found}
        self._schemas = tuple(tool.schema for tool in found)

    async def start(self, seed: int, options: Options) -> str:
        """Prepare `self.sandbox` for an episode and return the task's text. `options` has a value for every option."""
        raise NotImplementedError(f"{type(self).__name__}.start: define this method")

    def spec_of(self, seed: int, options: Options) -> SandboxSpec:
        """Return the spec of an episode's sandbox. Override it if the spec depends on the task."""
        return self.spec

    def lease(self, seed: int, options: Options) -> AbstractAsyncContextManager[Sandbox]:
        """Return an episode's sandbox as a context manager. Override it to start episodes from a snapshot."""
        return self.sandboxes.lease(self.spec_of(seed, options), wait_s=LEASE_S)

    async def reset(self, *, seed: int, options: Options) -> Reset:
        """Lease a sandbox and start an episode in it."""
        await self.close()
        chosen = self._with(options)
        self._limits = self._limits_of(chosen)
        self._turns, self._used_s = 0, 0.0
        self.submitted = self.sandbox_ended = None
        self._sandbox = await self._lease.enter_async_context(self.lease(seed, chosen))
        text = await self.start(seed, {name: chosen[name] for name in self.options})
        self._running = True
        is_graded = type(self).grade is not ToolEnv.grade
        return Reset(
            Observation(text),
            {},
            system=self.system,
            tools=self._schemas,
            is_graded=is_graded,
            step_limit_s=self._limits.command_timeout_s + _GRACE_S,
            grade_limit_s=self.grade_limit_s,
            episode_limit_s=self._limits.episode_timeout_s,
        )

    async def step(self, action: str) -> Step:
        """Run the tool that the action calls."""
        if not self._running:
            raise StepOrderError("step before reset, or after the end of the episode")
        self._turns += 1
        call = parse_call(action, self._schemas)
        info: Info = {f"tool_call_{status}": status is call.status for status in CallStatus}
        info["action_is_valid"] = call.status is CallStatus.OK
        notes = []
        try:
            result = await self._run(call) if call.status is CallStatus.OK else f"Error: {call.problem}"
        except SandboxLostError as error:
            if not error.cause.by_agent:
                raise
            self.sandbox_ended = error.cause
            info["sandbox_ended"] = msgspec.to_builtins(error.cause)
            result = f"The sandbox has ended: {error.cause}. The episode is over."
        terminated = self.sandbox_ended is not None or self.submitted is not None
        if not terminated and self._used_s >= self._limits.episode_timeout_s:
            notes.append(f"The episode is over: its tools have used up {self._limits.episode_timeout_s:g} s.")
        elif not terminated and self._turns >= self._limits.max_turns:
            notes.append(f"The episode is over: its limit is {self._limits.max_turns} turns.")
        truncated = bool(notes)
        self._running = not (terminated or truncated)
        text = "\n".join([cut_middle(result, self._limits.max_output), *notes])
        observation = Observation(text, role="tool" if call.status in _CALLS else "user")
        return Step(observation, 0.0, terminated, truncated, info)

    async def submission(self, *paths: str) -> Submission:
        """Return what the agent has submitted: the result of ``submit``, and those files at `paths` that exist.

        Files above 16 MiB, and files that the agent cannot read, are left out. Call this once, in `grade`: it releases
        the agent's sandbox after the files are read, so that the sandbox of a grader has room.
        """
        found = await read_files(self.sandbox, paths)
        await self.close()
        return Submission(self.submitted or "", found)

    async def close(self) -> None:
        """Release the sandbox."""
        self._running = False
        self._sandbox = None
        await self._lease.aclose()

    async def _run(self, call: ToolCall) -> str:
        """Run a valid call and return the result. The time that it takes counts."""
        left_s = self._limits.episode_timeout_s - self._used_s
        timeout_s = min(self._limits.command_timeout_s, left_s)
        result = f"Error: {call.name} did not finish within {timeout_s:g} s"
        began_s = clock.now()
        try:
            with anyio.move_on_after(timeout_s + _GRACE_S):
                result = await self._tools[call.name].run(call.arguments, sandbox=self.sandbox, timeout_s=timeout_s)
                if call.name == "submit":
                    self.submitted = result
        except _FOR_THE_MODEL as error:
            result = f"Error: {error}"
        finally:
            self._used_s += clock.now() - began_s
        return result

    def _with(self, changes: Options) -> Options:
        """Return the options of an episode that changes some of them."""
        for name in changes:
            if name not in self._defaults:
                raise OptionError(str(name), f"no such option{did_you_mean(str(name), self._defaults)}")
        return {**self._defaults, **changes}

    def _limits_of(self, options: Options) -> ToolLimits:
        return ToolLimits(**{name: options[name] for name in _LIMITS})  # type: ignore[arg-type]


async def read_files(sandbox: Sandbox, paths: Sequence[str]) -> dict[str, bytes]:
    """Return the content of those files that exist and that the agent can read, up to 16 MiB each."""
    found: dict[str, bytes] = {}
    for path in paths:
        with suppress(MissingFileError, RefusedFileError, TooLargeError):
            found[path] = await sandbox.read(path, max_bytes=_MAX_FILE)
    return found


def _unless_agent_ended_it(
    grade: Callable[[EnvT], Awaitable[float | None]],
) -> Callable[[EnvT], Awaitable[float | None]]:
    """Return a method like `grade` that returns 0 for an episode whose sandbox the agent has ended."""

    @functools.wraps(grade)
    async def graded(self: EnvT) -> float | None:
        if self.sandbox_ended is not None:
            return 0.0
        try:
            return await grade(self)
        except SandboxLostError as error:
            if not error.cause.by_agent:
                raise
            self.sandbox_ended = error.cause
            return 0.0

    return graded
