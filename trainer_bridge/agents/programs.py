"""Agents of two kinds: a program, in the sandbox of the episode or beside it, and a Python function.

Both call the policy at a base URL of their episode, with clients of OpenAI's or Anthropic's API. A program finds the
address in the variables that these clients read. The task is the text of the first observation; it replaces ``{task}``
in the command and in the variables, as ``{model}`` becomes a model's name.
"""

from __future__ import annotations

import inspect
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, suppress
from dataclasses import dataclass, field
from typing import TypeAlias

import anyio

from envkit.errors import SandboxLostError, SandboxStartError, UsageError
from envkit.protocols import Sandbox
from envkit.types import Info, ToolSchema

from .episode import Agent, AgentEndedError, AgentEpisode
from .proxy import AgentProxy

MODEL = "policy"
"""Name of the policy as a model. Any other name means it, too."""
_SHOWN = 2000
"""Maximum characters of a program's output in an error."""
_FOR_EVER_S = 1e9
_THREADS = anyio.CapacityLimiter(10_000)

OpenInside: TypeAlias = Callable[[Sandbox], AbstractAsyncContextManager[str]]
"""Makes the proxy reachable from a sandbox during a block, which gets the address inside."""


@dataclass(frozen=True, slots=True)
class AgentTask:
    """What an agent that is a function gets.

    Attributes:
        prompt: The task: the text of the first observation.
        system: System prompt of the environment; None without one.
        tools: Tools of the environment, in OpenAI's format.
        info: The environment's info about the reset.
        base_url: Base URL for an OpenAI client; without ``/v1`` at its end, it is that of an Anthropic client.
        api_key: API key for either client.
        model: Name of the policy as a model.
        sandbox: The sandbox of the episode; None if this process has no sandbox of it.
    """

    prompt: str
    system: str | None
    tools: Sequence[ToolSchema]
    info: Info
    base_url: str
    api_key: str
    model: str
    sandbox: Sandbox | None
    _episode: AgentEpisode = field(repr=False)

    async def step(self, action: str) -> str:
        """Play an action in the environment, such as a tool call in JSON, and return the text of the observation.

        Raises:
            CallRefusedError: The episode has ended.
        """
        return str((await self._episode.step(action))["observation"])


AgentFunction: TypeAlias = Callable[[AgentTask], Awaitable[None] | None]
"""An agent that is a Python function. It works on a task until it returns."""


@dataclass(frozen=True, slots=True)
class FunctionAgent(Agent):
    """An agent that is a Python function. One without ``async`` runs in a thread.

    Attributes:
        address: Address of the proxy, such as ``http://127.0.0.1:4000``.
    """

    function: AgentFunction
    proxy: AgentProxy
    address: str

    async def run(self, task: AgentEpisode) -> None:
        start, secret = task.reset, self.proxy.add(task)
        given = AgentTask(
            start.observation.text,
            start.system,
            start.tools,
            start.info,
            f"{self.address}/e/{secret}/v1",
            secret,
            MODEL,
            None if task.episode is None else task.episode.sandbox,
            task,
        )
        try:
            if inspect.iscoroutinefunction(self.function):
                await self.function(given)
            else:
                await anyio.to_thread.run_sync(self.function, given, limiter=_THREADS, abandon_on_cancel=True)
        except SandboxLostError:
            raise
        except Exception as error:  # of foreign code
            raise AgentEndedError(f"{type(error).__name__}: {error}"[:_SHOWN]) from error
        finally:
            self.proxy.end(secret)


@dataclass(frozen=True, slots=True)
class ProgramAgent(Agent):
    """An agent that is a program.

    Attributes:
        env: Variables in addition to those with the address of the policy.
        proxy: Serves its calls.
        address: Address of the proxy for a program beside the sandbox.
        inside: Makes the proxy reachable from the episode's sandbox, where the program runs in the folder
            ``info["folder"]`` of the reset, if there is one. None: the program runs beside it, in the current folder.
    """

    command: Sequence[str]
    env: Mapping[str, str]
    proxy: AgentProxy
    address: str
    inside: OpenInside | None

    async def run(self, task: AgentEpisode) -> None:
        secret = self.proxy.add(task)
        try:
            if self.inside is None:
                code: int | None
                code, output = await self._beside(self._filled(task, self.address, secret))
            else:
                sandbox = None if task.episode is None else task.episode.sandbox
                if sandbox is None:
                    raise UsageError(
                        f"agent.command: {task.request.task.env_id} has no sandbox in this process; set agent.place to "
                        "beside, or leave out env.url"
                    )
                folder = task.reset.info.get("folder")
                async with self.inside(sandbox) as address:
                    argv, env = self._filled(task, address, secret)
                    cwd = folder if isinstance(folder, str) and folder else None
                    done = await sandbox.exec(argv, env=env, cwd=cwd, timeout_s=_FOR_EVER_S)
                    code, output = done.exit_code, f"{done.stdout}{done.stderr}"
        except SandboxStartError as error:  # of what makes the proxy reachable inside
            raise AgentEndedError(str(error)) from error
        finally:
            self.proxy.end(secret)
        if code:
            raise AgentEndedError(f"exit code {code}: {output[-_SHOWN:].strip()}")

    def _filled(self, task: AgentEpisode, address: str, secret: str) -> tuple[list[str], dict[str, str]]:
        base = f"{address}/e/{secret}"
        values = {"{task}": task.reset.observation.text, "{model}": MODEL}
        variables = {
            **dict.fromkeys(("OPENAI_BASE_URL", "OPENAI_API_BASE"), f"{base}/v1"),
            "ANTHROPIC_BASE_URL": base,
            **dict.fromkeys(("OPENAI_API_KEY", "ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN"), secret),
            "ENVKIT_STEP_URL": f"{base}/v1/step",
            **self.env,
        }

        def fill(text: str) -> str:
            for name, value in values.items():
                text = text.replace(name, value)
            return text

        return [fill(word) for word in self.command], {name: fill(value) for name, value in variables.items()}

    async def _beside(self, filled: tuple[list[str], dict[str, str]]) -> tuple[int, str]:
        argv, env = filled
        process = await anyio.open_process(
            argv, stdin=subprocess.DEVNULL, stderr=subprocess.STDOUT, env={**os.environ, **env}, start_new_session=True
        )
        output = b""
        try:
            assert process.stdout is not None
            async for piece in process.stdout:
                output = (output + piece)[-4 * _SHOWN :]
            return await process.wait(), output.decode(errors="replace")
        finally:
            if process.returncode is None:
                _end_group(process.pid)
                with anyio.CancelScope(shield=True):
                    await process.wait()


def _end_group(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(pid, signal.SIGKILL)
