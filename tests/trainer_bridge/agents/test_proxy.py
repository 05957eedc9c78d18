"""The proxy: who gets an answer, which bodies it reads, what it reports as delivered, and what is a retry."""

from __future__ import annotations

import gzip
import json
from collections.abc import Awaitable, Callable
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.trainer_bridge.agents.connection import MAX_BODY_BYTES
from envkit.trainer_bridge.agents.dialect import PIECE_CHARACTERS
from envkit.trainer_bridge.agents.messages import CallRefusedError, RefusalKind, Reply
from envkit.trainer_bridge.agents.open_calls import MAX_STORED
from envkit.trainer_bridge.agents.proxy import AgentProxy
from tests.trainer_bridge.agents.asgi_exchange import Exchange, ask, exchange, waiting
from tests.trainer_bridge.agents.scripted_calls import ScriptedCalls

HI = {"model": "gpt", "messages": [{"role": "user", "content": "hi"}]}
OTHER = {"model": "gpt", "messages": [{"role": "user", "content": "another"}]}
CHAT, RESPONSES, MESSAGES = "chat/completions", "responses", "messages"


class Served:
    """A proxy with one episode."""

    def __init__(self, *script: Any, keep_alive_s: float = 5.0) -> None:
        self.proxy = AgentProxy(keep_alive_s=keep_alive_s)
        self.episode = ScriptedCalls(list(script))
        self.secret = self.proxy.add(self.episode)

    def path(self, route: str = CHAT) -> str:
        return f"/e/{self.secret}/v1/{route}"

    async def ask(self, body: object = HI, route: str = CHAT, **options: Any) -> Exchange:
        return await ask(self.proxy, self.path(route), body, **options)

    def waiting(self, body: object = HI, route: str = CHAT, **options: Any) -> Any:
        return waiting(self.proxy, self.path(route), body, **options)

    @property
    def started(self) -> int:
        return len(self.episode.calls)

    def deliveries(self, number: int = 0) -> list[tuple[int, int | None]]:
        return self.episode.calls[number].deliveries


def played(test: Callable[[], Awaitable[None]]) -> None:
    clock.run(test, virtual=True)


def content(answer: Exchange) -> Any:
    return answer.json["choices"][0]["message"]["content"]


# Who is answered, and where


@pytest.mark.parametrize(
    "path", ["/e/{}/v1/chat/completions", "/e/{}/chat/completions", "/e/{}/v1/v1/chat/completions"]
)
def test_the_secret_can_be_in_the_url(path: str) -> None:
    async def main() -> None:
        served = Served("yes")
        answer = await ask(served.proxy, path.format(served.secret), HI)
        assert (answer.status, content(answer)) == (200, "yes")

    played(main)


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "authorization: bearer {}", "X-Api-Key: {}"])
def test_the_secret_can_be_the_api_key(header: str) -> None:
    async def main() -> None:
        served = Served("yes")
        name, _, value = header.format(served.secret).partition(": ")
        answer = await ask(served.proxy, "/v1/chat/completions", HI, headers={name: value})
        assert (answer.status, content(answer)) == (200, "yes")

    played(main)


def test_an_episode_is_only_reached_by_its_own_secret() -> None:
    async def main() -> None:
        served = Served()
        other = ScriptedCalls(["other"])
        secret = served.proxy.add(other)
        assert secret != served.secret
        answer = await ask(served.proxy, f"/e/{secret}/v1/{CHAT}", HI, headers={"x-api-key": served.secret})
        assert (content(answer), served.started, len(other.calls)) == ("other", 0, 1)

    played(main)


@pytest.mark.parametrize("path", ["/e/sk-unknown/v1/{}", "/v1/{}"])
def test_an_unknown_secret_gets_401_in_the_shape_of_the_dialect(path: str) -> None:
    async def main() -> None:
        served = Served()
        openai = await ask(served.proxy, path.format(CHAT), HI)
        anthropic = await ask(served.proxy, path.format(MESSAGES), HI)
        assert (openai.status, openai.json["error"]["code"]) == (401, "invalid_api_key")
        assert (anthropic.status, anthropic.json["error"]["type"]) == (401, "authentication_error")

    played(main)


def test_after_the_end_of_the_episode_requests_get_410() -> None:
    async def main() -> None:
        served = Served("yes")
        served.proxy.end(served.secret)
        openai, anthropic = await served.ask(), await served.ask(route=MESSAGES)
        assert (openai.status, openai.json["error"]["code"]) == (410, "episode_ended")
        assert (anthropic.status, anthropic.json["type"]) == (410, "error")
        assert served.started == 0

    played(main)


def test_the_end_of_the_episode_aborts_its_calls() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as answer:
            served.proxy.end(served.secret)
            await answer.is_over.wait()
        assert served.episode.calls[0].is_aborted
        assert (answer.status, answer.json["error"]["code"]) == (410, "episode_ended")

    played(main)


@pytest.mark.parametrize(("method", "route"), [("POST", "embeddings"), ("GET", CHAT), ("POST", "")])
def test_other_routes_get_404_in_json(method: str, route: str) -> None:
    async def main() -> None:
        answer = await Served().ask(route=route, method=method)
        assert (answer.status, answer.json["error"]["code"]) == (404, "not_found")

    played(main)


@pytest.mark.parametrize("path", ["/", "/api/hello", "/e/sk-1/", "/e/sk-1/api/hello"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_probes_of_the_server_are_answered(path: str, method: str) -> None:
    async def main() -> None:
        answer = await ask(AgentProxy(), path, method=method)
        assert (answer.status, answer.content) == (200, b"{}" if method == "GET" else b"")

    played(main)


def test_one_model_is_listed() -> None:
    async def main() -> None:
        answer = await Served().ask(route="models", method="GET")
        assert [model["id"] for model in answer.json["data"]] == ["policy"]

    played(main)


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


def test_tokens_are_counted_without_a_call() -> None:
    async def main() -> None:
        served = Served()
        answer = await served.ask(route="messages/count_tokens")
        assert (answer.json, served.started) == ({"input_tokens": 2}, 0)

    played(main)


def test_an_action_is_played() -> None:
    async def main() -> None:
        served = Served()
        answer = await served.ask({"action": "up"}, "step")
        assert (served.episode.actions, answer.json["observation"], answer.json["reward"]) == (["up"], "moved", 1.0)
        wrong = await served.ask({"action": 1}, "step")
        assert (wrong.status, served.episode.actions) == (400, ["up"])

    played(main)


# Bodies


def test_a_body_can_be_sent_in_parts_and_compressed() -> None:
    async def main() -> None:
        served = Served("yes")
        packed = gzip.compress(json.dumps(HI).encode())
        asked = exchange(served.proxy, served.path(), headers={"Content-Encoding": "gzip"})
        parts = [packed[:9], packed[9:]]

        async def receive() -> dict[str, Any]:
            if not parts:
                await anyio.sleep_forever()
            return {"type": "http.request", "body": parts.pop(0), "more_body": bool(parts)}

        asked._receive = receive  # type: ignore[method-assign]
        assert content(await asked.play()) == "yes"

    played(main)


@pytest.mark.parametrize(
    ("body", "encoding", "status", "why"),
    [
        (b"{}", "zstd", 415, "the content encoding zstd is not supported; use gzip or none"),
        (b"{}", "gzip", 400, "the body is not compressed with gzip"),
        (gzip.compress(b"{}")[:-9], "gzip", 400, "the compressed body is cut off"),
        (gzip.compress(bytes(MAX_BODY_BYTES + 1)), "gzip", 413, "the body is larger than 33554432 bytes"),
        (bytes(MAX_BODY_BYTES + 1), "identity", 413, "the body is larger than 33554432 bytes"),
        (b"{", "identity", 400, "the body is not JSON"),
        (b'"\xff"', "identity", 400, "the body is not JSON"),
        (b"[" * 100_000, "identity", 400, "the body is not JSON"),
        (b"[]", "identity", 400, "the body is not an object in JSON"),
        (b"{}", "identity", 400, "invalid request: Object missing required field `messages`"),
    ],
    ids=range(10),
)
def test_a_body_that_cannot_be_read_is_refused(body: bytes, encoding: str, status: int, why: str) -> None:
    async def main() -> None:
        answer = await Served().ask(body, MESSAGES, headers={"Content-Encoding": encoding})
        error = answer.json["error"]
        assert (answer.status, error["message"][: len(why)]) == (status, why)
        assert error["type"] == ("request_too_large" if status == 413 else "invalid_request_error")

    played(main)


def test_nothing_is_asked_for_a_client_that_goes_while_it_sends() -> None:
    async def main() -> None:
        served = Served()
        asked = exchange(served.proxy, served.path(), HI)

        async def receive() -> dict[str, Any]:
            return {"type": "http.disconnect"}

        asked._receive = receive  # type: ignore[method-assign]
        await asked.play()
        assert (asked.status, served.started) == (0, 0)

    played(main)


# Refusals


@pytest.mark.parametrize(
    ("kind", "status", "code", "words"),
    [
        ("context", 400, "context_length_exceeded", "this model's maximum context length is exceeded: why"),
        ("budget", 403, "budget_exceeded", "why"),
        ("ended", 410, "episode_ended", "why"),
        ("aborted", 503, "aborted", "why"),
        ("request", 400, "invalid_request", "why"),
    ],
)
def test_refusals_are_errors_that_clients_know(kind: RefusalKind, status: int, code: str, words: str) -> None:
    async def main() -> None:
        served = Served()
        served.episode.refusal = CallRefusedError(kind, "why")
        for route, body in ((CHAT, HI), (RESPONSES, {"input": "hi"})):
            answer = await served.ask(body, route)
            error = answer.json["error"]
            assert (answer.status, error["code"], error["message"]) == (status, code, words)
            assert error["type"] == (code if kind == "context" else "invalid_request_error")

    played(main)


def test_anthropic_has_its_own_words_for_a_long_prompt() -> None:
    async def main() -> None:
        served = Served()
        served.episode.refusal = CallRefusedError("context", "9 tokens")
        answer = await served.ask(route=MESSAGES)
        error = {"type": "invalid_request_error", "message": "prompt is too long: 9 tokens"}
        assert (answer.status, answer.json) == (400, {"type": "error", "error": error})

    played(main)


@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_a_refusal_within_a_stream_is_an_event(route: str) -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting({**HI, "input": "hi", "stream": True}, route) as answer:
            await anyio.sleep(7)
            served.episode.calls[0].fail(CallRefusedError("budget", "why"))
            await answer.is_over.wait()
        assert answer.status == 200
        event, _, data = answer.parts[-1].decode().partition("\n")
        assert (event, json.loads(data.removeprefix("data: "))["error"]["message"]) == ("event: error", "why")

    played(main)


# Streams, and what is reported as delivered


@pytest.mark.parametrize(
    ("route", "keep_alive"),
    [
        (CHAT, b": keep-alive\n\n"),
        (RESPONSES, b": keep-alive\n\n"),
        (MESSAGES, b'event: ping\ndata: {"type":"ping"}\n\n'),
    ],
)
def test_a_stream_is_kept_alive_while_the_client_waits(route: str, keep_alive: bytes) -> None:
    async def main() -> None:
        served = Served(keep_alive_s=3.0)
        async with served.waiting({**HI, "input": "hi", "stream": True}, route) as answer:
            await anyio.sleep(2.9)
            assert answer.parts == []
            await anyio.sleep(3.2)
            assert answer.parts == [keep_alive, keep_alive]
            served.episode.calls[0].answer("yes")
            await answer.is_over.wait()
        assert b"yes" in answer.content

    played(main)


def test_an_answer_in_one_piece_is_not_kept_alive() -> None:
    async def main() -> None:
        served = Served(keep_alive_s=3.0)
        async with served.waiting() as answer:
            await anyio.sleep(100)
            assert (answer.status, answer.parts) == (0, [])
            served.episode.calls[0].answer("yes")
            await answer.is_over.wait()
        assert content(answer) == "yes"

    played(main)


@pytest.mark.parametrize("stream", [False, True])
def test_whole_answers_are_reported(stream: bool) -> None:
    async def main() -> None:
        served = Served("yes")
        await served.ask({**HI, "stream": stream, "n": 2})
        assert served.deliveries() == [(0, None), (1, None)]

    played(main)


def test_nothing_is_reported_before_the_last_byte() -> None:
    async def main() -> None:
        served = Served("yes")
        asked = exchange(served.proxy, served.path(), {**HI, "stream": True})
        reported = []
        send = asked._send

        async def spy(message: Any) -> None:
            reported.append((b"[DONE]" in message.get("body", b""), bool(served.deliveries())))
            await send(message)

        asked._send = spy  # type: ignore[method-assign]
        await asked.play()
        last = reported.index((True, False))
        assert all(not is_reported for _, is_reported in reported[: last + 1])
        assert served.deliveries() == [(0, None)]

    played(main)


@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("route", [CHAT, RESPONSES, MESSAGES])
def test_a_client_that_goes_within_a_stream_has_received_what_was_sent(route: str, raises: bool) -> None:
    async def main() -> None:
        served = Served("x" * 3 * PIECE_CHARACTERS)
        sent = 0
        asked = exchange(served.proxy, served.path(route), {**HI, "input": "hi", "stream": True}, raises=raises)
        send = asked._send

        async def go_at_the_third(message: Any) -> None:
            nonlocal sent
            sent += b"x" * PIECE_CHARACTERS in message.get("body", b"")
            if sent == 3:
                asked.drop()
            await send(message)

        asked._send = go_at_the_third  # type: ignore[method-assign]
        await asked.play()
        assert served.deliveries() == [(0, 2 * PIECE_CHARACTERS)]

    played(main)


def test_each_reply_of_a_cut_stream_is_reported_by_itself() -> None:
    async def main() -> None:
        served = Served(["abc", "de", "f"])
        asked = await served.ask({**HI, "stream": True, "n": 3}, most_parts=6)
        assert b'"de"' in asked.parts[4]
        assert served.deliveries() == [(0, 3), (1, 2)]

    played(main)


@pytest.mark.parametrize("raises", [False, True])
def test_an_answer_to_a_client_that_has_gone_is_not_reported(raises: bool) -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting(raises=raises) as answer:
            served.episode.calls[0].answer("yes")
            answer.drop()
            await answer.is_over.wait()
        assert served.deliveries() == []

    played(main)


# Retries


def test_equal_bodies_are_fresh_samples() -> None:
    async def main() -> None:
        served = Served("one", "two")
        assert [content(await served.ask()), content(await served.ask())] == ["one", "two"]

    played(main)


def test_equal_bodies_at_the_same_time_are_fresh_samples() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as one, served.waiting() as other:
            assert served.started == 2
            served.episode.calls[1].answer("two")
            served.episode.calls[0].answer("one")
            await one.is_over.wait()
            await other.is_over.wait()
        assert [content(one), content(other)] == ["one", "two"]
        assert not any(call.is_aborted for call in served.episode.calls)

    played(main)


def test_a_raised_retry_counter_gets_the_stored_answer() -> None:
    async def main() -> None:
        served = Served("one", "two")
        counted = [{"x-stainless-retry-count": str(count)} for count in (0, 1, 1)]
        one, again, fresh = [await served.ask(headers=headers) for headers in counted]
        assert again.content == one.content
        assert content(fresh) == "two"

    played(main)


def test_the_same_key_gets_the_stored_answer() -> None:
    async def main() -> None:
        served = Served("one", "two")
        keyed = [{"Idempotency-Key": key} for key in ("a", "a", "b")]
        one, again, fresh = [await served.ask(headers=headers) for headers in keyed]
        assert again.content == one.content
        assert content(fresh) == "two"

    played(main)


def test_another_key_is_not_a_retry_even_if_the_counter_is_raised() -> None:
    async def main() -> None:
        served = Served("one", "two")
        await served.ask(headers={"Idempotency-Key": "a"})
        other = await served.ask(headers={"Idempotency-Key": "b", "x-stainless-retry-count": "1"})
        assert content(other) == "two"

    played(main)


def test_the_same_key_with_another_body_is_refused() -> None:
    async def main() -> None:
        served = Served("one", "two")
        await served.ask(headers={"Idempotency-Key": "a"})
        refused = await served.ask(OTHER, headers={"Idempotency-Key": "a"})
        assert (refused.status, refused.json["error"]["code"]) == (422, "idempotency_key_reused")

    played(main)


def test_another_body_with_a_raised_counter_is_a_fresh_sample() -> None:
    async def main() -> None:
        served = Served("one", "two")
        await served.ask()
        assert content(await served.ask(OTHER, headers={"x-stainless-retry-count": "1"})) == "two"

    played(main)


def test_the_same_body_on_another_route_is_a_fresh_sample() -> None:
    async def main() -> None:
        served = Served("one", "two")
        await served.ask()
        other = await served.ask(route=MESSAGES, headers={"x-stainless-retry-count": "1"})
        assert other.json["content"][0]["text"] == "two"

    played(main)


def test_a_client_that_comes_back_gets_the_running_call() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as first:
            first.drop()
            await first.is_over.wait()
        async with served.waiting() as second:
            assert (served.started, served.episode.calls[0].is_aborted) == (1, False)
            served.episode.calls[0].answer("yes")
            await second.is_over.wait()
        assert (content(second), served.deliveries()) == ("yes", [(0, None)])

    played(main)


def test_a_retry_gets_the_running_call_before_the_drop_is_seen() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as first, served.waiting(headers={"x-stainless-retry-count": "1"}) as second:
            first.drop()
            await first.is_over.wait()
            served.episode.calls[0].answer("yes")
            await second.is_over.wait()
        assert (served.started, content(second)) == (1, "yes")

    played(main)


def test_an_answer_that_was_not_delivered_whole_is_given_again_once() -> None:
    async def main() -> None:
        served = Served("x" * 2 * PIECE_CHARACTERS, "two")
        body = {**HI, "stream": True}
        cut = await served.ask(body, most_parts=2)
        whole = await served.ask(body)
        fresh = await served.ask(body)
        assert whole.content.startswith(cut.content)
        assert served.deliveries() == [(0, None)]
        assert (served.started, b"two" in fresh.content) == (2, True)

    played(main)


def test_errors_are_not_stored() -> None:
    async def main() -> None:
        served = Served(CallRefusedError("aborted", "why"), "two")
        keyed = {"Idempotency-Key": "a"}
        assert (await served.ask(headers=keyed)).status == 503
        assert content(await served.ask(headers={**keyed, "x-stainless-retry-count": "1"})) == "two"

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


def test_a_fresh_attempt_that_fails_ends_the_stored_answer() -> None:
    async def main() -> None:
        served = Served("one", "three")
        await served.ask()
        served.episode.refusal = CallRefusedError("budget", "why")
        assert (await served.ask()).status == 403
        served.episode.refusal = None
        assert content(await served.ask(headers={"x-stainless-retry-count": "1"})) == "three"

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


@pytest.mark.parametrize(("body", "route"), [(OTHER, CHAT), ({"action": "up"}, "step")])
def test_a_call_without_a_client_is_aborted_when_another_request_arrives(body: object, route: str) -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as first:
            first.drop()
            await first.is_over.wait()
        assert not served.episode.calls[0].is_aborted
        served.episode.script.append("two")
        assert (await served.ask(body, route)).status == 200
        assert served.episode.calls[0].is_aborted

    played(main)


def test_a_call_whose_client_waits_is_not_aborted_by_another_request() -> None:
    async def main() -> None:
        served = Served()
        async with served.waiting() as first:
            served.episode.script.append("two")
            await served.ask(OTHER)
            served.episode.calls[0].answer("one")
            await first.is_over.wait()
        assert (content(first), served.episode.calls[0].is_aborted) == ("one", False)

    played(main)


def test_a_stored_answer_is_not_aborted() -> None:
    async def main() -> None:
        served = Served(Reply(content="one"), "two")
        await served.ask()
        await served.ask(OTHER)
        served.proxy.end(served.secret)
        assert not any(call.is_aborted for call in served.episode.calls)

    played(main)
