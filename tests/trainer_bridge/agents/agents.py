"""Agents as functions, and an engine whose answers have tokens that no tokenizer would choose."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import anyio

from envkit import clock
from envkit.trainer_bridge.agents.episode import AgentEpisode
from envkit.trainer_bridge.agents.messages import ChatMessage, ModelRequest, Reply
from envkit.trainer_bridge.agents.player import AgentPlayer
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.samples import samples_from
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
LIMITS = RolloutLimits(max_turns=50, max_tokens=4000, turn_tokens=200)
Run = Callable[[AgentEpisode], Awaitable[None]]


def logprob(prefix: Sequence[int], token: int) -> float:
    """The log-probability of a token after a prefix; another prefix gives another one."""
    return -1e-3 * (stable_hash([*prefix], token) % 1000)


class LetterEngine(ScriptedEngine):
    """Answers with the scripted texts in order, one letter a token, and then the end token.

    An answer that ends with ``...`` is cut at the limit of tokens, one that begins with ``~`` waits for an abort.
    """

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.answers = [*answers]
        self.sampled: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        self._aborts: dict[str, anyio.Event] = {}

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        so_far: Completion | None = None,
    ) -> Completion:
        text = self.answers.pop(0)
        ids = [TOKENIZER.encode(letter, add_special_tokens=False)[0] for letter in text.removeprefix("~")]
        finish = FinishReason.LENGTH if text.endswith("...") else FinishReason.STOP
        if finish is FinishReason.STOP:
            ids.append(params.stop[0])
        if text.startswith("~"):
            self._aborts[session or ""] = anyio.Event()
            await self._aborts[session or ""].wait()
            finish = FinishReason.ABORTED
        await anyio.lowlevel.checkpoint()
        self.sampled.append((tuple(prompt_ids), tuple(ids)))
        logps = [logprob([*prompt_ids, *ids[:at]], token) for at, token in enumerate(ids)]
        return Completion(ints(ids), floats(logps), finish, ((self.version, len(ids)),))

    async def abort(self, session: str) -> None:
        if session in self._aborts:
            self._aborts[session].set()


@dataclass
class Scripted:
    """An agent that is a function."""

    function: Run

    async def run(self, task: AgentEpisode) -> None:
        await self.function(task)


@dataclass
class Played:
    """An episode of a scripted agent."""

    trajectory: Trajectory
    engine: LetterEngine
    player: AgentPlayer
    host: ScriptedHost
    samples: list[Sample] = field(init=False)

    def __post_init__(self) -> None:
        self.samples = samples_from(self.trajectory) if self.trajectory.turns else []

    @property
    def texts(self) -> list[str]:
        """The samples, with the tokens that are trained on in brackets."""
        found = []
        for one in self.samples:
            text, is_open = "", False
            for token, is_own in zip(one.token_ids.tolist(), one.mask.tolist(), strict=True):
                text += {(False, True): "[", (True, False): "]"}.get((is_open, is_own), "")
                text, is_open = text + TOKENIZER.decode(token), is_own
            found.append(text + ("]" if is_open else ""))
        return found

    @property
    def num_trained(self) -> int:
        return sum(one.num_policy_tokens for one in self.samples)


def played(
    run: Run,
    *answers: str,
    host: ScriptedHost | None = None,
    limits: RolloutLimits = LIMITS,
    selects: Callable[[ModelRequest], bool] = lambda request: True,
) -> Played:
    """Play an episode with an agent, and check that each trained token is where the engine sampled it."""
    engine, host = LetterEngine(*answers), host or ScriptedHost(lambda task, lease: [Answer("Fix it.")])

    async def main() -> Played:
        renderer = ChatRenderer(TOKENIZER)
        async with AgentPlayer.opened(Scripted(run), engine, renderer, limits, selects) as player:
            request = RolloutRequest("train/0/0", Task("A-v0", 0), 0)
            return Played(await play(host, player, limits, request), engine, player, host)

    found = clock.run(main, virtual=True)
    for one in found.samples:
        ids, logps = one.token_ids.tolist(), one.logprobs.tolist()
        for at in one.mask.nonzero()[0].tolist():
            assert abs(logps[at] - logprob(ids[:at], ids[at])) < 1e-6, "trained where it was not sampled"
    total = sum(len(ids) for _, ids in engine.sampled)
    assert sum(len(turn.completion.token_ids) for turn in found.trajectory.turns) == total, "a token was lost"
    return found


# --- Messages --------------------------------------------------------------------------------------------------------


def system(text: str) -> ChatMessage:
    return ChatMessage("system", text)


def user(text: str) -> ChatMessage:
    return ChatMessage("user", text)


def assistant(text: str) -> ChatMessage:
    return ChatMessage("assistant", text)


def of(reply: Reply) -> ChatMessage:
    """The answer as the client sends it back."""
    return ChatMessage("assistant", reply.content, reply.calls)


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
