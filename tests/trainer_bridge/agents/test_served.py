"""Calls to a served model, which belong to no episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import EnvkitError
from envkit.trainer_bridge.agents.messages import CallRefusedError, ModelRequest
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.trainer_bridge.agents.served import ServedModel
from envkit.trainer_bridge.render import ChatRenderer
from envkit.types import Completion, SamplingParams
from tests.trainer_bridge.agents.agents import TOKENIZER, LetterEngine, user
from tests.trainer_bridge.agents.asgi_exchange import ask


class RecordingEngine(LetterEngine):
    """Records how it was called."""

    def __init__(self, *answers: str) -> None:
        super().__init__(*answers)
        self.params: list[SamplingParams] = []
        self.sessions: list[str | None] = []

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, **more: Any) -> Completion:
        self.params.append(params)
        self.sessions.append(more["session"])
        if self.answers == ["failure"]:
            raise EnvkitError("the replica was lost")
        return await super().generate(prompt_ids, params, **more)


def serving(engine: LetterEngine, main: Callable[[ServedModel], Awaitable[None]]) -> None:
    async def run() -> None:
        opening = ServedModel.opened(engine, ChatRenderer(TOKENIZER), max_tokens=400, turn_tokens=100)
        async with opening as model:
            await main(model)

    clock.run(run, virtual=True)


def test_a_client_chooses_the_temperature_and_each_call_has_another_seed() -> None:
    engine = RecordingEngine("one", "two", "three")

    async def main(model: ServedModel) -> None:
        for temperature in (0.0, 0.5, None):
            call = model.start(ModelRequest(messages=(user("hi"),), temperature=temperature, max_tokens=7))
            (reply,) = await call.replies()
            assert reply.content in ("one", "two", "three")

    serving(engine, main)
    assert [one.temperature for one in engine.params] == [0.0, 0.5, 1.0]
    assert {one.max_tokens for one in engine.params} == {7}
    assert len({one.seed for one in engine.params}) == 3
    assert engine.forgotten == engine.sessions


def test_all_who_wait_for_a_call_get_its_answer() -> None:
    async def main(model: ServedModel) -> None:
        call = model.start(ModelRequest(messages=(user("hi"),), n=2))
        found: list[list[str]] = []

        async def wait() -> None:
            found.append([one.content for one in await call.replies()])

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(wait)
            tasks.start_soon(wait)
        assert found == [["one", "two"]] * 2

    serving(LetterEngine("one", "two"), main)


def test_the_error_of_the_engine_reaches_the_client() -> None:
    async def main(model: ServedModel) -> None:
        with pytest.raises(CallRefusedError, match="the replica was lost") as caught:
            await model.start(ModelRequest(messages=(user("hi"),))).replies()
        assert caught.value.kind == "aborted"

    serving(RecordingEngine("failure"), main)


def test_a_prompt_that_is_too_long_is_refused_and_an_action_has_no_episode() -> None:
    async def main(model: ServedModel) -> None:
        with pytest.raises(CallRefusedError, match="exceed the context of 400"):
            model.start(ModelRequest(messages=(user("long " * 400),)))
        with pytest.raises(CallRefusedError, match="belongs to no episode"):
            await model.step("up")

    serving(LetterEngine(), main)


def test_a_proxy_with_a_model_answers_every_key_and_refuses_a_wrong_temperature() -> None:
    async def main(model: ServedModel) -> None:
        proxy = AgentProxy(model=model)
        body: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
        headers = {"Authorization": "Bearer ann"}
        answer = await ask(proxy, "/v1/chat/completions", body, headers=headers)
        assert answer.json["choices"][0]["message"]["content"] == "one"
        wrong = await ask(proxy, "/v1/chat/completions", {**body, "temperature": -1}, headers=headers)
        assert (wrong.status, "temperature" in wrong.json["error"]["message"]) == (400, True)

    serving(LetterEngine("one"), main)
