"""With a real model: what an agent trains on has the log-probabilities that the model computes at that place."""

from __future__ import annotations

from pathlib import Path

import anyio

from envkit import clock
from envkit.trainer_bridge.agents.episode import AgentEpisode, AgentPlayer
from envkit.trainer_bridge.agents.messages import ChatMessage, ModelRequest
from envkit.trainer_bridge.engines.transformers import TransformersEngine
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.samples import samples_from
from envkit.types import RolloutRequest, Task, Trajectory
from tests.trainer_bridge.agents.agents import Scripted, ask, user
from tests.trainer_bridge.fakes import Answer, ScriptedHost
from tests.trainer_bridge.models import chat_tokenizer, open_model, slow_logps, write_chat

LIMITS = RolloutLimits(max_turns=50, max_tokens=400, turn_tokens=12)


async def fork_rewrite_and_ask_at_once(task: AgentEpisode) -> None:
    """Continue an answer, fork before it, begin and rewrite answers, sample several, and call twice at once."""
    first = await ask(task, user("you see a wall"))
    second = await ask(task, user("you see a wall"), ChatMessage("assistant", first.content), user("up"))
    await ask(task, user("you see a wall"), ChatMessage("assistant", first.content), user("down"))
    await ask(task, user("you see a wall"), ChatMessage("assistant", f"{first.content} and left"), user("left"))
    await ask(
        task,
        user("you see a wall"),
        ChatMessage("assistant", first.content),
        ChatMessage("assistant", "up"),
        continues=True,
    )
    several = task.start(ModelRequest(messages=(ChatMessage("system", "answer"), user("right")), n=3))
    for index, _ in enumerate(await several.replies()):
        several.delivered(index)
    async with anyio.create_task_group() as tasks:
        for word in ("up", "down"):
            tasks.start_soon(
                ask,
                task,
                user("you see a wall"),
                ChatMessage("assistant", first.content),
                user("up"),
                ChatMessage("assistant", second.content),
                user(word),
            )


def test_trained_tokens_have_the_log_probabilities_of_the_model(tmp_path: Path) -> None:
    model = open_model(write_chat(tmp_path, seed=3))
    engine, renderer = TransformersEngine(model, pad_id=0), ChatRenderer(chat_tokenizer())

    async def main() -> Trajectory:
        host = ScriptedHost(lambda task, lease: [Answer("Go.")])
        async with AgentPlayer.opened(Scripted(fork_rewrite_and_ask_at_once), engine, renderer, LIMITS) as player:
            return await play(host, player, LIMITS, RolloutRequest("train/0/0", Task("A-v0", 0), 0, seed=7))

    played = clock.run(main)
    samples = samples_from(played)
    trained = 0
    for sample in samples:
        ids = sample.token_ids.tolist()
        for at in sample.mask.nonzero()[0].tolist():
            assert abs(sample.logprobs[at] - slow_logps(model, ids[:at])[ids[at]]) < 1e-4
            trained += 1
    assert trained == sum(len(turn.completion.token_ids) for turn in played.turns)
    assert (len(played.turns), len(samples)) == (10, 8)
