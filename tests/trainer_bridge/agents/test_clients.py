"""The clients that agent programs use, OpenAI's and Anthropic's, call a served proxy."""

from __future__ import annotations

import json
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import anyio
import httpx
import openai
import pytest
import uvicorn

from envkit import clock
from envkit.trainer_bridge.agents.messages import AgentToolCall, CallRefusedError, ChatMessage, ModelRequest, Reply
from envkit.trainer_bridge.agents.proxy import AgentProxy
from tests.trainer_bridge.agents.scripted_calls import ScriptedCall, ScriptedCalls

USER: Any = {"role": "user", "content": "hi"}
CALL = AgentToolCall("look", {"at": "ä"})
ANSWER = Reply(
    content="I look", thought="hm", calls=(CALL,), finish="tool_calls", tokens=[("a", -0.5)], prompt_tokens=4
)
ANSWERED = ChatMessage("assistant", "I look", calls=(CALL,))


class StartedCalls(ScriptedCalls):
    """An episode whose calls can be waited for."""

    def __init__(self, *script: Any) -> None:
        super().__init__(list(script))
        self._sent, self._received = anyio.create_memory_object_stream[ScriptedCall](9)

    def start(self, request: ModelRequest) -> ScriptedCall:
        call = super().start(request)
        self._sent.send_nowait(call)
        return call

    async def next_call(self) -> ScriptedCall:
        with anyio.fail_after(20):
            return await self._received.receive()

    def close(self) -> None:
        self._sent.close()
        self._received.close()


class Served:
    """A proxy that listens on a port of this machine, with one episode, and the clients of an agent."""

    def __init__(self, episode: StartedCalls, proxy: AgentProxy, url: str) -> None:
        self.episode = episode
        self.proxy = proxy
        self.secret = proxy.add(episode)
        self.url = f"{url}/e/{self.secret}"
        self.openai = openai.AsyncOpenAI(base_url=f"{self.url}/v1", api_key="unused", timeout=20)
        self.anthropic = anthropic.AsyncAnthropic(base_url=self.url, api_key="unused", timeout=20)


@asynccontextmanager
async def serving(*script: Any, keep_alive_s: float = 5.0) -> AsyncIterator[Served]:
    proxy = AgentProxy(keep_alive_s=keep_alive_s)
    listening = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(proxy, log_level="critical", lifespan="off"))
    served = Served(StartedCalls(*script), proxy, f"http://127.0.0.1:{listening.getsockname()[1]}")
    is_over = anyio.Event()

    async def serve() -> None:
        await server.serve(sockets=[listening])
        is_over.set()

    async with clock.background_tasks() as tasks:
        tasks.start_soon(serve)
        try:
            yield served
        finally:
            await served.openai.close()
            await served.anthropic.close()
            served.episode.close()
            server.should_exit = True
            await is_over.wait()


def played(main: Callable[[], Awaitable[None]]) -> None:
    clock.run(main)


def test_openai_reads_an_answer_and_sends_it_back_as_the_same_message() -> None:
    async def main() -> None:
        async with serving(ANSWER, "done") as served:
            complete = served.openai.chat.completions.create
            choice = (await complete(model="gpt", messages=[USER], logprobs=True)).choices[0]
            assert choice.message.tool_calls is not None
            assert choice.logprobs is not None
            assert choice.finish_reason == "tool_calls"
            result = {"role": "tool", "tool_call_id": choice.message.tool_calls[0].id, "content": "x"}
            await complete(model="gpt", messages=[USER, choice.message.model_dump(), result])  # type: ignore[list-item]
            assert served.episode.request.messages[1:] == (ANSWERED, ChatMessage("tool", "x"))

    played(main)


def test_openai_reads_a_stream() -> None:
    async def main() -> None:
        async with serving(ANSWER) as served:
            options: Any = {"stream_options": {"include_usage": True}}
            async with served.openai.chat.completions.stream(model="gpt", messages=[USER], **options) as stream:
                completion = await stream.get_final_completion()
            message = completion.choices[0].message
            assert message.content == "I look"
            assert message.tool_calls is not None
            assert json.loads(message.tool_calls[0].function.arguments) == {"at": "ä"}
            assert completion.usage is not None
            assert completion.usage.prompt_tokens == 4

    played(main)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_reads_several_answers(stream: bool) -> None:
    async def main() -> None:
        async with serving(["a", "b", "c"]) as served:
            answer: Any = await served.openai.chat.completions.create(model="gpt", messages=[USER], n=3, stream=stream)
            if stream:
                texts = ["", "", ""]
                async for chunk in answer:
                    texts[chunk.choices[0].index] += chunk.choices[0].delta.content or ""
            else:
                texts = [choice.message.content for choice in answer.choices]
            assert texts == ["a", "b", "c"]

    played(main)


@pytest.mark.parametrize("stream", [False, True])
def test_openai_goes_on_from_a_response(stream: bool) -> None:
    async def main() -> None:
        async with serving(ANSWER, "done") as served:
            if stream:
                async with served.openai.responses.stream(model="gpt", input="hi") as streamed:
                    response: Any = await streamed.get_final_response()
            else:
                response = await served.openai.responses.create(model="gpt", input="hi")
            assert response.output_text == "I look"
            output: Any = {"type": "function_call_output", "call_id": response.output[-1].call_id, "output": "x"}
            await served.openai.responses.create(model="gpt", input=[output], previous_response_id=response.id)
            assert served.episode.request.messages[1:] == (ANSWERED, ChatMessage("tool", "x"))

    played(main)


@pytest.mark.parametrize("stream", [False, True])
def test_anthropic_reads_an_answer_and_sends_it_back_as_the_same_message(stream: bool) -> None:
    async def main() -> None:
        async with serving(ANSWER, "done") as served:
            thinking: Any = {"type": "enabled", "budget_tokens": 1024}
            sent: Any = {"model": "claude", "max_tokens": 2000, "messages": [USER], "thinking": thinking}
            if stream:
                async with served.anthropic.messages.stream(**sent) as streamed:
                    message: Any = await streamed.get_final_message()
            else:
                message = await served.anthropic.messages.create(**sent)
            assert [block.type for block in message.content] == ["thinking", "text", "tool_use"]
            assert (message.stop_reason, message.content[2].input) == ("tool_use", {"at": "ä"})
            result: Any = {"type": "tool_result", "tool_use_id": message.content[2].id, "content": "x"}
            history: Any = [
                USER,
                {"role": "assistant", "content": message.content},
                {"role": "user", "content": [result]},
            ]
            await served.anthropic.messages.create(model="claude", max_tokens=9, messages=history)
            assert served.episode.request.messages[1:] == (ANSWERED, ChatMessage("tool", "x"))

    played(main)


def test_anthropic_counts_tokens() -> None:
    async def main() -> None:
        async with serving() as served:
            counted = await served.anthropic.messages.count_tokens(model="claude", messages=[USER])
            assert counted.input_tokens == 2

    played(main)


def test_both_clients_wait_through_keep_alives() -> None:
    async def main() -> None:
        async with serving(keep_alive_s=0.005) as served, clock.background_tasks() as tasks:

            async def answer() -> None:
                call = await served.episode.next_call()
                await anyio.sleep(0.05)
                call.answer("yes")

            tasks.start_soon(answer)
            async with served.openai.chat.completions.stream(model="gpt", messages=[USER]) as chat:
                assert (await chat.get_final_completion()).choices[0].message.content == "yes"
            tasks.start_soon(answer)
            async with served.anthropic.messages.stream(model="claude", max_tokens=9, messages=[USER]) as stream:
                assert await stream.get_final_text() == "yes"

    played(main)


@pytest.mark.parametrize(
    ("kind", "openai_error", "anthropic_error"),
    [
        ("context", openai.BadRequestError, anthropic.BadRequestError),
        ("budget", openai.PermissionDeniedError, anthropic.PermissionDeniedError),
        ("ended", openai.APIStatusError, anthropic.APIStatusError),
    ],
)
def test_refusals_are_not_retried(kind: Any, openai_error: type[Exception], anthropic_error: type[Exception]) -> None:
    async def main() -> None:
        async with serving(*[CallRefusedError(kind, "why")] * 2) as served:
            with pytest.raises(openai_error, match="why"):
                await served.openai.chat.completions.create(model="gpt", messages=[USER])
            with pytest.raises(anthropic_error, match="why"):
                await served.anthropic.messages.create(model="claude", max_tokens=9, messages=[USER])
            assert len(served.episode.calls) == 2

    played(main)


def test_a_refusal_within_a_stream_is_raised() -> None:
    async def main() -> None:
        async with serving(keep_alive_s=0.005) as served, clock.background_tasks() as tasks:

            async def refuse() -> None:
                call = await served.episode.next_call()
                await anyio.sleep(0.05)
                call.fail(CallRefusedError("budget", "why"))

            tasks.start_soon(refuse)
            with pytest.raises(openai.APIError, match="why"):
                async for _ in await served.openai.chat.completions.create(model="gpt", messages=[USER], stream=True):
                    pass
            tasks.start_soon(refuse)
            with pytest.raises(anthropic.APIError, match="why"):
                async with served.anthropic.messages.stream(model="claude", max_tokens=9, messages=[USER]) as stream:
                    await stream.get_final_message()

    played(main)


@pytest.mark.parametrize("name", ["openai", "anthropic"])
def test_a_client_that_retries_after_a_timeout_gets_the_running_call(name: str) -> None:
    async def main() -> None:
        async with serving() as served, clock.background_tasks() as tasks:

            async def answer() -> None:
                call = await served.episode.next_call()
                await anyio.sleep(0.3)
                call.answer("yes")

            tasks.start_soon(answer)
            if name == "openai":
                chat = served.openai.with_options(timeout=0.2, max_retries=5).chat.completions
                assert (await chat.create(model="gpt", messages=[USER])).choices[0].message.content == "yes"
            else:
                messages = served.anthropic.with_options(timeout=0.2, max_retries=5).messages
                answered: Any = await messages.create(model="claude", max_tokens=9, messages=[USER])
                assert answered.content[0].text == "yes"
            assert len(served.episode.calls) == 1
            assert not served.episode.calls[0].is_aborted

    played(main)


def test_a_client_that_closes_a_long_stream_has_received_a_part() -> None:
    async def main() -> None:
        length = 64 << 20  # more than the buffers of the sockets
        async with serving(["x" * length]) as served:
            stream = await served.openai.chat.completions.create(model="gpt", messages=[USER], stream=True)
            await stream.__anext__()
            await stream.close()
            call = await served.episode.next_call()
            with anyio.fail_after(20):
                while not call.deliveries:  # noqa: ASYNC110 - the proxy reports it once the connection is closed
                    await anyio.sleep(0.01)
            ((index, characters),) = call.deliveries
            assert index == 0
            assert characters is not None
            assert 0 < characters < length

    played(main)


def test_the_connection_survives_an_error() -> None:
    async def main() -> None:
        async with serving("yes") as served, httpx.AsyncClient() as client:
            connections = set()
            for path, status in (("/v1/unknown", 404), ("/v1/chat/completions", 400), ("/v1/chat/completions", 200)):
                body = {"messages": [USER]} if status != 400 else {}
                answer = await client.post(f"{served.url}{path}", json=body)
                connections.add(answer.extensions["network_stream"].get_extra_info("client_addr"))
                assert answer.status_code == status
            assert len(connections) == 1

    played(main)


def test_a_body_in_chunks_is_read() -> None:
    async def chunks() -> AsyncIterator[bytes]:
        content = json.dumps({"messages": [USER]}).encode()
        yield content[:9]
        yield content[9:]

    async def main() -> None:
        async with serving("yes") as served, httpx.AsyncClient() as client:
            answer = await client.post(f"{served.url}/v1/chat/completions", content=chunks())
            assert answer.json()["choices"][0]["message"]["content"] == "yes"

    played(main)
