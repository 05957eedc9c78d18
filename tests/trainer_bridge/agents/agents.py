"""Agents as functions, and an engine whose answers have tokens that no tokenizer would choose."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from typing import Any

import anyio

from envkit import clock
from envkit.protocols import EnvHost
from envkit.trainer_bridge.agents.episode import Agent, AgentEpisode, AgentPlayer
from envkit.trainer_bridge.agents.messages import ChatMessage, ModelRequest, Reply
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.samples import samples_from, trained_parts
from envkit.types import (
    Completion,
    FinishReason,
    RolloutRequest,
    Sample,
    SamplingParams,
    Task,
    ToolSchema,
    Trajectory,
    floats,
    ints,
    stable_hash,
)
from tests.trainer_bridge.fakes import Answer, ScriptedEngine, ScriptedHost
from tests.trainer_bridge.render.tool_templates import tool_tokenizer

TOKENIZER: Any = tool_tokenizer("hermes")
RENDERER = ChatRenderer(TOKENIZER)
LIMITS = RolloutLimits(max_turns=50, max_tokens=4000, turn_tokens=200)
Run = Callable[[AgentEpisode], Awaitable[None]]

_TOOLS = re.compile(r"# Tools\n.*?Answer with <tool_call></tool_call>\.", re.DOTALL)
_SHORT: Mapping[str, str] = {
    "<|im_end|>\n": "| ",
    "<|im_end|>]\n": "|] ",
    "<|im_end|>": "|",
    "<|im_start|>system\n": "S:",
    "<|im_start|>user\n": "U:",
    "<|im_start|>assistant\n": "A:",
}


_FINISH = {"...": FinishReason.LENGTH, "!!!": FinishReason.ABORTED}


def logprob(version: int, prefix: Sequence[int], token: int) -> float:
    """The log-probability of a token after a prefix; another prefix or policy version gives another one."""
    return -1e-3 * (stable_hash(version, [*prefix], token) % 1000)


class LetterEngine(ScriptedEngine):
    """Answers with the scripted texts in order, one letter a token, and then the end token; an error is raised.

    An answer that ends with ``...`` is cut at the limit of tokens, and one that ends with ``!!!`` is aborted by the
    engine. One that begins with ``~`` waits for an abort, or for `release`. At each ``^``, the policy gets its next
    version.
    """

    def __init__(self, *answers: str | Exception) -> None:
        super().__init__()
        self.answers = [*answers]
        self.num_sampled = self.num_waiting = 0
        self._aborts: dict[str, anyio.Event] = {}
        self._released = anyio.Event()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        text = self.answers.pop(0)
        if isinstance(text, Exception):
            raise text
        finish = _FINISH.get(text[-3:], FinishReason.STOP)
        if text.startswith("~"):
            aborted = self._aborts[session or ""] = anyio.Event()
            self.num_waiting += 1
            async with anyio.create_task_group() as tasks:
                for event in (aborted, self._released):
                    tasks.start_soon(_wait, event, tasks.cancel_scope)
            self.num_waiting -= 1
            finish = FinishReason.ABORTED if aborted.is_set() else finish
        await anyio.lowlevel.checkpoint()
        ids: list[int] = []
        logps: list[float] = []
        versions: Counter[int] = Counter()
        for letter in [*text.removeprefix("~"), *[""] * (text[-3:] not in _FINISH)]:
            if letter == "^":
                self.version += 1
                continue
            for token in TOKENIZER.encode(letter, add_special_tokens=False) if letter else params.stop[:1]:
                logps.append(logprob(self.version, [*prompt_ids, *ids], token))
                ids.append(token)
                versions[self.version] += 1
        self.num_sampled += len(ids)
        return Completion(ints(ids), floats(logps), finish, tuple(versions.items()))

    async def abort(self, session: str) -> None:
        if session in self._aborts:
            self._aborts[session].set()

    def release(self) -> None:
        """Let the calls that wait go on."""
        self._released.set()


async def _wait(event: anyio.Event, scope: anyio.CancelScope) -> None:
    await event.wait()
    scope.cancel()


@dataclass
class Scripted:
    """An agent that is a function."""

    function: Run

    async def run(self, task: AgentEpisode) -> None:
        await self.function(task)


@dataclass
class Played:
    """An episode of an agent."""

    trajectory: Trajectory
    player: AgentPlayer
    samples: list[Sample] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = samples_from(self.trajectory) if self.trajectory.turns else []

    @property
    def rows(self) -> list[str]:
        """The samples as text, with the tokens that are trained on in brackets.

        ``S:``, ``U:`` and ``A:`` begin a message of the system, the user and the assistant, and ``|`` ends it.
        ``TOOLS`` is the list of tools.
        """
        found = []
        for one in self.samples:
            text = ""
            for is_own, part in groupby(zip(one.mask.tolist(), one.token_ids.tolist(), strict=True), itemgetter(0)):
                words = RENDERER.text([token for _, token in part])
                text += f"[{words}]" if is_own else words
            text = _TOOLS.sub("TOOLS", text)
            for long, short in _SHORT.items():
                text = text.replace(long, short)
            found.append(text)
        return sorted(found)

    @property
    def masked(self) -> Mapping[str, int]:
        """Number of sampled tokens that are not trained on, by cause."""
        return trained_parts(self.trajectory)[1]

    @property
    def num_trained(self) -> int:
        return sum(one.num_policy_tokens for one in self.samples)


async def play_agent(
    agent: Agent,
    engine: LetterEngine,
    *,
    host: EnvHost | None = None,
    limits: RolloutLimits = LIMITS,
    selects: Callable[[ModelRequest], bool] = lambda request: True,
    stable: Callable[[ChatMessage], ChatMessage] = lambda message: message,
) -> Played:
    """Play an episode with an agent, and check it; see `checked`."""
    host = host or ScriptedHost(lambda task, lease: [Answer("Fix it.")])
    async with clock.background_tasks() as tasks:
        player = AgentPlayer(agent, engine, RENDERER, limits, tasks, selects, stable)
        request = RolloutRequest("train/0/0", Task("A-v0", 0), 0)
        return checked(Played(await play(host, player, limits, request), player), engine)


def checked(found: Played, engine: LetterEngine) -> Played:
    """Return the only episode that an engine has answered for.

    Check that each trained token is where the engine sampled it, with the log-probability and the policy version that
    it had there, and that each sampled token is trained on once, or masked with a cause.
    """
    for one in found.samples:
        ids, logps, versions = one.token_ids.tolist(), one.logprobs.tolist(), one.versions.tolist()
        for at in one.mask.nonzero()[0].tolist():
            expected = logprob(versions[at], ids[:at], ids[at])
            assert abs(logps[at] - expected) < 1e-6, f"token {at} is trained on where it was not sampled: {found.rows}"
    assert "" not in found.masked, "tokens are masked without a cause"
    assert found.num_trained + sum(found.masked.values()) == engine.num_sampled, "a token was lost, or counts twice"
    return found


def played(run: Run, *answers: str | Exception, **settings: Any) -> Played:
    """Play an episode with an agent that is a function, in virtual time; see `play_agent`."""

    async def main() -> Played:
        return await play_agent(Scripted(run), LetterEngine(*answers), **settings)

    return clock.run(main, virtual=True)


# --- Messages --------------------------------------------------------------------------------------------------------


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


async def ask(task: AgentEpisode, *messages: ChatMessage, **fields: Any) -> Reply:
    """Ask the policy, receive the whole answer, and return it."""
    call = task.start(ModelRequest(messages=messages, **fields))
    (reply,) = await call.replies()
    call.delivered()
    return reply


TOOL: ToolSchema = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}},
    },
}
