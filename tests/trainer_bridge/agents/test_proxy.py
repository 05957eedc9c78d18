"""The proxy, as far as its clients do not see it: limits of bodies, what it reports as delivered, what it keeps.

What clients see is in ``tests/conformance/agents``.
"""

from __future__ import annotations

import gzip
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.trainer_bridge.agents.connection import MAX_BODY_BYTES
from envkit.trainer_bridge.agents.dialect import PIECE_CHARACTERS
from envkit.trainer_bridge.agents.messages import CallRefusedError
from envkit.trainer_bridge.agents.open_calls import MAX_STORED
from envkit.trainer_bridge.agents.proxy import AgentProxy
from tests.trainer_bridge.agents.asgi_exchange import Exchange, ask, exchange, waiting
from tests.trainer_bridge.agents.scripted_calls import ScriptedCalls

HI = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
OTHER = {"model": "gpt", "messages": [{"role": "user", "content": "another"}]}


class Served:
    """A proxy with one episode."""

    def __init__(self, *script: Any, keep_alive_s: float = 5.0) -> None:
        self.proxy = AgentProxy(keep_alive_s=keep_alive_s)
        self.episode = ScriptedCalls(list(script))
        self.path = f"/e/{self.proxy.add(self.episode)}/v1/chat/completions"

    async def ask(self, body: object = HI, **options: Any) -> Exchange:
        return await ask(self.proxy, self.path, body, **options)

    def waiting(self, body: object = HI, **options: Any) -> Any:
        return waiting(self.proxy, self.path, body, **options)

    @property
    def deliveries(self) -> list[tuple[int, int | None]]:
        return self.episode.calls[0].deliveries


def played(test: Callable[[], Awaitable[None]]) -> None:
    clock.run(test, virtual=True)


def content(answer: Exchange) -> Any:
    return answer.json["choices"][0]["message"]["content"]


def test_websockets_are_rejected() -> None:
    async def main() -> None:
        sent: list[Any] = []

        async def send(message: Any) -> None:
            sent.append(message)

        async def receive() -> Any:
            raise AssertionError

        await AgentProxy()({"type": "websocket", "path": "/v1/responses"}, receive, send)
        assert sent == [{"type": "websocket.close"}]

    played(main)


@pytest.mark.parametrize(
    ("body", "encoding", "status", "why"),
    [
        (b"{}", "zstd", 415, "the content encoding zstd is not supported; use gzip or none"),
        (b"{}", "gzip", 400, "the body is not compressed with gzip"),
        (gzip.compress(b"{}")[:-9], "gzip", 400, "the compressed body is cut off"),
        (gzip.compress(bytes(MAX_BODY_BYTES + 1)), "gzip", 413, "the body is larger than 33554432 bytes"),
        (bytes(MAX_BODY_BYTES + 1), "identity", 413, "the body is larger than 33554432 bytes"),
        (b"[]", "identity", 400, "the body is not an object in JSON"),
        (b"{}", "identity", 400, "invalid request: Object missing required field `messages`"),
    ],
    ids=range(7),
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, encoding: str, status: int, why: str) -> None:
    async def main() -> None:
        answer = await Served().ask(body, headers={"Content-Encoding": encoding})
        assert (answer.status, answer.json["error"]["message"][: len(why)]) == (status, why)

    played(main)


def test_nothing_is_asked_for_a_client_that_goes_while_it_sends() -> None:
    async def main() -> None:
        served = Served()
        asked = exchange(served.proxy, served.path, HI)

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        asked._receive = receive  # type: ignore[method-assign]
        await asked.play()
        assert (asked.status, served.episode.calls) == (0, [])

    played(main)


@pytest.mark.parametrize("stream", [False, True])
def test_a_stream_gets_a_keep_alive_after_each_interval_and_an_answer_in_one_piece_none(stream: bool) -> None:
    async def main() -> None:
        served = Served(keep_alive_s=3.0)
        async with served.waiting({**HI, "stream": stream}) as answer:
            await anyio.sleep(2.9)
            assert answer.parts == []
            await anyio.sleep(3.2)
            assert answer.parts == [b": keep-alive\n\n"] * 2 * stream
            served.episode.calls[0].answer("yes")
            await answer.is_over.wait()
        assert b"yes" in answer.content

    played(main)


def test_nothing_is_reported_before_the_last_byte() -> None:
    async def main() -> None:
        served = Served("yes")
        asked = exchange(served.proxy, served.path, {**HI, "stream": True})
        reported = []
        send = asked._send

        async def spy(message: Any) -> None:
            reported.append((b"[DONE]" in message.get("body", b""), bool(served.deliveries)))
            await send(message)

        asked._send = spy  # type: ignore[method-assign]
        await asked.play()
        last = reported.index((True, False))
        assert all(not is_reported for _, is_reported in reported[: last + 1])
        assert served.deliveries == [(0, None)]

    played(main)


def test_a_client_that_goes_within_a_stream_has_received_what_was_sent() -> None:
    async def main() -> None:
        served = Served("x" * 3 * PIECE_CHARACTERS)
        sent = 0
        asked = exchange(served.proxy, served.path, {**HI, "stream": True}, raises=True)
        send = asked._send

        async def go_at_the_third(message: Any) -> None:
            nonlocal sent
            sent += b"x" * PIECE_CHARACTERS in message.get("body", b"")
            if sent == 3:
                asked.drop()
            await send(message)

        asked._send = go_at_the_third  # type: ignore[method-assign]
        await asked.play()
        assert served.deliveries == [(0, 2 * PIECE_CHARACTERS)]

    played(main)


def test_each_reply_of_a_cut_stream_is_reported_by_itself() -> None:
    async def main() -> None:
        served = Served(["abc", "de", "f"])
        asked = await served.ask({**HI, "stream": True, "n": 3}, most_parts=6)
        assert b'"de"' in asked.parts[4]
        assert served.deliveries == [(0, 3), (1, 2)]

    played(main)


def test_an_answer_to_a_client_that_has_gone_is_not_reported() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting(raises=True) as answer:
            served.episode.calls[0].answer("yes")
            answer.drop()
            await answer.is_over.wait()
        assert served.deliveries == []

    played(main)


def test_a_call_that_failed_after_its_client_went_is_started_anew() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as first:
            first.drop()
            await first.is_over.wait()
        served.episode.calls[0].fail(CallRefusedError("aborted", "why"))
        served.episode.script.append("two")
        assert content(await served.ask()) == "two"

    played(main)


def test_the_oldest_stored_answers_are_forgotten() -> None:
    async def main() -> None:
        served = Served(*["old"] * MAX_STORED, "new")
        retry = {"x-stainless-retry-count": "1"}
        for number in range(MAX_STORED):
            await served.ask({**HI, "user": str(number)})
        assert content(await served.ask({**HI, "user": "0"}, headers=retry)) == "old"
        await served.ask(OTHER)
        served.episode.script.append("again")
        assert content(await served.ask({**HI, "user": "0"}, headers={"x-stainless-retry-count": "2"})) == "again"

    played(main)
