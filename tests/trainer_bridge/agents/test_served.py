"""Calls to a served model, which belong to no episode."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import httpx
import pytest

from envkit import clock
from envkit.errors import EnvkitError
from envkit.trainer_bridge.agents.messages import CallRefusedError, ModelRequest
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.trainer_bridge.agents.served import ServedModel
from envkit.trainer_bridge.render import ChatRenderer
from envkit.types import Completion, SamplingParams
from tests.trainer_bridge.agents.agents import TOKENIZER, LetterEngine, user


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


CHAT = "/v1/chat/completions"
BODY: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}


async def ask(proxy: AgentProxy, path: str, body: dict[str, Any], key: str = "ann") -> httpx.Response:
    transport = httpx.ASGITransport(proxy)
    async with httpx.AsyncClient(transport=transport, base_url="http://model", timeout=None) as client:
        return await client.post(path, json=body, headers={"Authorization": f"Bearer {key}"})


def serving(engine: LetterEngine, main: Callable[[ServedModel], Awaitable[None]]) -> None:
    async def run() -> None:
        async with clock.background_tasks() as tasks:
            await main(ServedModel(engine, ChatRenderer(TOKENIZER), 400, 100, tasks))

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


def test_the_error_of_the_engine_reaches_the_client() -> None:
    async def main(model: ServedModel) -> None:
        with pytest.raises(CallRefusedError, match="the replica was lost") as caught:
            await model.start(ModelRequest(messages=(user("hi"),))).replies()
        assert caught.value.kind == "aborted"

    serving(RecordingEngine("failure"), main)


def test_an_answer_is_as_long_as_the_prompt_leaves_room_for() -> None:
    engine = RecordingEngine("one", "two")

    async def main(model: ServedModel) -> None:
        for words in (1, 60):
            request = ModelRequest(messages=(user("long " * words),), max_tokens=1000)
            room = 400 - model.count(request)
            await model.start(request).replies()
            assert engine.params[-1].max_tokens == min(100, room)
        assert room < 100
        with pytest.raises(CallRefusedError, match="leave no room for an answer in 400"):
            model.start(ModelRequest(messages=(user("long " * 400),)))
        with pytest.raises(CallRefusedError, match="belongs to no episode"):
            await model.step("up")

    serving(engine, main)


def test_a_tenant_does_not_see_the_answers_of_another() -> None:
    async def main(model: ServedModel) -> None:
        proxy = AgentProxy(model=model)
        first = await ask(proxy, "/v1/responses", {"input": "hi"})
        again = {"input": "and?", "previous_response_id": first.json()["id"]}
        other = await ask(proxy, "/v1/responses", again, key="bob")
        assert (other.status_code, (await ask(proxy, "/v1/responses", again)).status_code) == (400, 200)

    serving(LetterEngine("one", "two"), main)
