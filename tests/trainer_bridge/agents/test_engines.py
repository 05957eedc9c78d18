"""Agents on engines: new weights and lost servers, between two calls and within one."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import anyio
import anyio.from_thread
import pytest
import safetensors.torch

from envkit import clock
from envkit.protocols import Engine
from envkit.trainer_bridge.agents.episode import AgentEpisode, AgentPlayer
from envkit.trainer_bridge.agents.messages import ChatMessage
from envkit.trainer_bridge.render import ChatRenderer
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.types import PauseMode, RolloutRequest, Sample, Task, Weights
from tests.trainer_bridge.agents.agents import RENDERER, Played, Run, Scripted, ask, user
from tests.trainer_bridge.engines.vllm.fake_server import FakeServer, fleet, until
from tests.trainer_bridge.fakes import Answer, ScriptedHost
from tests.trainer_bridge.models import chat_tokenizer, open_model, shake, slow_logps, write_chat
from tests.trainer_bridge.watched import Watched

LIMITS = RolloutLimits(max_turns=9, max_tokens=300, turn_tokens=12)


async def played_on(engine: Engine, renderer: ChatRenderer, run: Run) -> Played:
    host = ScriptedHost(lambda task, lease: [Answer("Fix it.")])
    async with AgentPlayer.opened(Scripted(run), engine, renderer, LIMITS) as player:
        return Played(await play(host, player, LIMITS, RolloutRequest("train/0/0", Task("A-v0", 0), 0)), player)


def trained(sample: Sample) -> list[tuple[Sequence[int], int, float, int]]:
    """The trained tokens of a sample: the tokens before each, the token, its log-probability and its policy version."""
    ids, logps, versions = sample.token_ids.tolist(), sample.logprobs.tolist(), sample.versions.tolist()
    return [(ids[:at], ids[at], logps[at], versions[at]) for at in sample.mask.nonzero()[0].tolist()]


def test_each_token_is_trained_on_as_the_weights_sampled_it_that_the_engine_had_then(tmp_path: Path) -> None:
    folder = write_chat(tmp_path / "model", seed=5)
    models: list[Any] = [open_model(folder) for _ in range(3)]
    for version in (1, 2):
        shake(models[version], seed=90 + version)
        safetensors.torch.save_model(models[version], str(tmp_path / f"{version}.safetensors"))

    async def main() -> Played:
        watched = Watched(folder)
        engine = watched.engine

        async def push(version: int) -> None:
            await engine.pause(PauseMode.KEEP)
            await engine.load(Weights(version, str(tmp_path / f"{version}.safetensors")))
            await engine.resume()

        async def run(task: AgentEpisode) -> None:
            first = await ask(task, user("a?"))
            await push(1)
            in_the_fifth = len(watched.fed) + 5
            async with anyio.create_task_group() as tasks:

                async def start() -> None:
                    tasks.start_soon(push, 2)
                    await anyio.lowlevel.checkpoint()

                def start_in_the_pass() -> None:
                    if len(watched.fed) == in_the_fifth:
                        anyio.from_thread.run(start)

                watched.before_pass = start_in_the_pass
                await ask(task, user("a?"), ChatMessage("assistant", first.content), user("b?"))

        return await played_on(engine, ChatRenderer(chat_tokenizer()), run)

    done = clock.run(main, virtual=True)
    found = [one for sample in done.samples for one in trained(sample)]
    assert [version for *_, version in found] == [0] * 12 + [1] * 5 + [2] * 7
    for before, token, logp, version in found:
        assert logp == pytest.approx(slow_logps(models[version], before)[token], abs=1e-4)


def test_a_server_that_is_lost_within_a_call_costs_no_token_and_no_episode() -> None:
    async def main() -> tuple[Played, FakeServer]:
        first, second = FakeServer(token_s=0.005), FakeServer(token_s=0.005)
        async with fleet(first, second) as group:

            async def run(task: AgentEpisode) -> None:
                answer = await ask(task, user("a?"))
                async with anyio.create_task_group() as tasks:
                    tasks.start_soon(ask, task, user("a?"), ChatMessage("assistant", answer.content), user("b?"))
                    await until(lambda: first.running == 1)
                    await anyio.sleep(0.02)
                    await first.kill()
                await group.engine.load(Weights(1, "/weights-1"))
                await ask(task, user("c?"))

            return await played_on(group.engine, RENDERER, run), second

    done, second = clock.run(main)
    assert [len(trained(sample)) for sample in done.samples] == [24, 12]
    for sample in done.samples:
        for before, token, logp, _ in trained(sample):
            assert token == len(before)
            assert logp == pytest.approx(-token / 100)
    assert [{version for *_, version in trained(sample)} for sample in done.samples] == [{0}, {1}]
    assert len(second.requests) == 2
    assert (done.masked, done.trajectory.is_void) == ({}, False)
