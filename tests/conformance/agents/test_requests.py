"""Requests: whose they are, which of them are read, and how the others are refused."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator

import pytest

from envkit.trainer_bridge.agents.connection import MAX_BODY_BYTES
from envkit.trainer_bridge.rollout import RolloutLimits
from tests.conformance.agents.client import CHAT, MAX_TOKENS, MESSAGES, RESPONSES, ROUTES, assistant, system, user
from tests.conformance.agents.served import Agent, AnyProxy, OwnProxy
from tests.trainer_bridge.agents.agents import TOOL

HI = user("hi")
BODY = json.dumps({"model": "gpt", "messages": [HI]}).encode()
ROW = "U:hi| A:[yes|]"


def body_of(agent: Agent) -> bytes:
    return json.dumps({"model": agent.model, "max_tokens": MAX_TOKENS, "messages": [HI]}).encode()


# --- Who is answered -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("version", ["", "/v1", "/v1/v1"])
def test_v1_may_be_missing_from_the_url_or_repeated(own: OwnProxy, version: str) -> None:
    with own.episode("yes") as agent:
        base = agent.url.removesuffix("/v1") + version
        assert agent.send(CHAT, BODY, url=base).text == "yes"
    agent.trains(ROW)


@pytest.mark.parametrize("header", ["Authorization: Bearer {}", "authorization: bearer {}", "X-Api-Key: {}"])
def test_the_secret_can_be_the_api_key(own: OwnProxy, header: str) -> None:
    with own.episode("yes") as agent:
        name, _, value = header.format(agent.key).partition(": ")
        assert agent.send(CHAT, BODY, url=f"{own.address}/v1", headers={name: value}).text == "yes"
    agent.trains(ROW)


def test_an_episode_is_only_reached_by_its_own_secret(own: OwnProxy) -> None:
    with own.episode("one") as agent, own.episode("other") as other:
        assert agent.ask(HI, headers={"x-api-key": other.key}).text == "one"
        assert other.ask(HI, headers={"authorization": f"Bearer {agent.key}"}).text == "other"
    agent.trains("U:hi| A:[one|]")
    other.trains("U:hi| A:[other|]")


@pytest.mark.parametrize(
    ("route", "kind"), [(CHAT, "invalid_request_error"), (MESSAGES, "authentication_error"), ("step", None)]
)
@pytest.mark.parametrize("path", ["/e/sk-unknown/v1", "/v1"])
def test_an_unknown_secret_gets_401(own: OwnProxy, path: str, route: str, kind: str | None) -> None:
    with own.episode() as agent:
        refused = agent.send(route, BODY, url=own.address + path)
        assert refused.status == 401
        assert refused.error["type"] == (kind or "invalid_request_error")
        assert "no episode has this secret" in refused.error["message"]


def test_after_the_end_of_the_episode_each_request_gets_410(own: OwnProxy) -> None:
    with own.episode("yes") as agent:
        agent.ask(HI)
    for route in (*ROUTES, "step", "models"):
        late = agent.begin(HI, route=route) if route in ROUTES else agent.send(route, {"action": "up"})
        assert (late.status, late.error["message"]) == (410, "the episode has ended"), route
    agent.trains(ROW)


# --- What is read ----------------------------------------------------------------------------------------------------


def test_any_model_name_is_accepted(proxy: AnyProxy) -> None:
    with proxy.episode("yes") as agent:
        assert agent.begin(HI, model="no-such-model-7b").json["model"] == "no-such-model-7b"
    agent.trains(ROW)


def test_a_body_may_be_chunked_and_compressed_with_gzip(proxy: AnyProxy) -> None:
    def chunks(content: bytes) -> Iterator[bytes]:
        yield content[:9]
        yield content[9:]

    with proxy.episode("yes", "no") as agent:
        body = body_of(agent)
        for content, encoding in ((body, "identity"), (gzip.compress(body), "gzip")):
            assert agent.send(CHAT, chunks(content), headers={"content-encoding": encoding}).text
    agent.trains(ROW, "U:hi| A:[no|]")


def test_expect_100_continue_is_answered_before_the_body_is_sent(proxy: AnyProxy) -> None:
    with proxy.episode("yes") as agent:
        body = body_of(agent)
        asked = agent.send(CHAT, headers={"expect": "100-continue", "content-length": str(len(body))})  # without a body
        socket = asked.connection.sock
        with socket.makefile("rb", buffering=0) as head:
            status, *_ = [*iter(head.readline, b"\r\n")]
        assert status.split()[1] == b"100"
        socket.sendall(body)
        assert isinstance(asked.text, str)
    agent.trains(ROW)


def test_settings_without_an_effect_are_accepted_and_counted(proxy: AnyProxy) -> None:
    settings = {"temperature": 0, "top_p": 0.5, "seed": 1, "logit_bias": {"1": 5}, "presence_penalty": 1}
    enforced = {"tool_choice": "required", "response_format": {"type": "json_object"}}
    with proxy.episode("yes", "no") as agent:
        agent.ask(HI, **settings, **enforced, tools=[TOOL, {"type": "web_search"}])
        agent.ask(HI, route=MESSAGES, temperature=1, metadata={"user_id": "u"})
    names = [*settings, *enforced, "metadata", "temperature", "tools.web_search"]
    if agent.played is not None:
        assert agent.played.player.unused == {name: names.count(name) for name in names}


def test_prompt_cache_markers_do_not_change_messages(proxy: AnyProxy) -> None:
    def marked(text: str) -> list[object]:
        return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]

    with proxy.episode("yes", "no") as agent:
        first = agent.ask(HI, route=MESSAGES, system=marked("Be kind."))
        history = [user(marked("hi")), assistant(marked(first.text)), user(marked("sure?"))]
        agent.ask(*history, route=MESSAGES, system="Be kind.")
    agent.trains("S:Be kind.| U:hi| A:[yes|] U:sure?| A:[no|]")


# --- What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("method", "route"), [("POST", "embeddings"), ("GET", CHAT), ("POST", "")])
def test_other_routes_get_404_in_json(own: OwnProxy, method: str, route: str) -> None:
    with own.episode() as agent:
        refused = agent.send(route, method=method)
        assert (refused.status, refused.error["code"]) == (404, "not_found")


@pytest.mark.parametrize("path", ["/api/hello", "/e/sk-1/"])
@pytest.mark.parametrize("method", ["GET", "HEAD"])
def test_get_and_head_probes_are_answered(own: OwnProxy, path: str, method: str) -> None:
    with own.episode() as agent:
        answer = agent.send("", method=method, url=own.address + path.rstrip("/"))
        assert (answer.status, answer.content) == (200, b"{}" if method == "GET" else b"")


def test_models_are_listed(proxy: AnyProxy) -> None:
    with proxy.episode() as agent:
        listed, head = (agent.send("models", method=method) for method in ("GET", "HEAD"))
        assert (listed.status, head.status, head.content) == (200, 200, b"")
        assert {type(model["id"]) for model in listed.json["data"]} == {str}


def test_a_body_compressed_with_zstd_gets_415(proxy: AnyProxy) -> None:
    with proxy.episode() as agent:
        refused = agent.send(CHAT, b"\x28\xb5\x2f\xfd", headers={"content-encoding": "zstd"})
        assert (refused.status, bool(refused.error["message"])) == (415, True)


@pytest.mark.parametrize(
    ("body", "encoding", "status", "why"),
    [
        (b"{}", "gzip", 400, "the body is not compressed with gzip"),
        (gzip.compress(b"{}")[:-9], "gzip", 400, "the compressed body is cut off"),
        (gzip.compress(bytes(MAX_BODY_BYTES + 1)), "gzip", 413, "the body is larger than 33554432 bytes"),
        (bytes(MAX_BODY_BYTES + 1), "identity", 413, "the body is larger than 33554432 bytes"),
    ],
    ids=range(4),
)
def test_a_body_that_is_too_large_or_damaged_is_refused(
    own: OwnProxy, body: bytes, encoding: str, status: int, why: str
) -> None:
    with own.episode() as agent:
        refused = agent.send(CHAT, body, headers={"content-encoding": encoding})
        assert (refused.status, refused.error["message"][: len(why)]) == (status, why)


def test_nothing_is_asked_for_a_client_that_goes_while_it_sends(own: OwnProxy) -> None:
    with own.episode() as agent:
        asked = agent.send("models", method="GET")
        assert asked.content
        asked.connection.putrequest("POST", asked.path.replace("models", CHAT))
        asked.connection.putheader("content-length", str(len(BODY)))
        asked.connection.endheaders(BODY[:9])
        agent.settle(1)
        asked.close()
        agent.settle()
    agent.trains()


def test_websockets_are_rejected(own: OwnProxy) -> None:
    upgrade = {
        "connection": "upgrade",
        "upgrade": "websocket",
        "sec-websocket-version": "13",
        "sec-websocket-key": "A" * 22 + "==",
    }
    with own.episode() as agent:
        assert agent.send("responses", method="GET", headers=upgrade).status == 403


@pytest.mark.parametrize(
    ("route", "body"),
    [*((CHAT, body) for body in (b"{", b'"\xff"', b"[]", b"{}", b"[" * 100_000)), (RESPONSES, b"{}"), (MESSAGES, b"{")],
)
def test_an_invalid_body_gets_400_in_the_error_format_of_the_api(proxy: AnyProxy, body: bytes, route: str) -> None:
    with proxy.episode() as agent:
        refused = agent.send(route, body)
        assert refused.status == 400
        assert refused.error["message"]
        assert refused.error["type"] == "invalid_request_error"
        assert (refused.json.get("type") == "error") is (route == MESSAGES)


@pytest.mark.parametrize(
    ("route", "image"),
    [
        (CHAT, {"type": "image_url", "image_url": {"url": "data:image/png;base64,AA=="}}),
        (RESPONSES, {"type": "input_image", "image_url": "data:image/png;base64,AA=="}),
        (MESSAGES, {"type": "image", "source": {"type": "base64", "media_type": "image/png", "data": "AA=="}}),
    ],
)
def test_images_are_refused_with_an_error_that_names_the_type(
    own: OwnProxy, route: str, image: dict[str, object]
) -> None:
    with own.episode("yes") as agent:
        refused = agent.ask(user([{"type": "text", "text": "hi"}, image]), route=route)
        assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
        assert f"content of the type {image['type']!r} is not supported" in refused.error["message"]
        agent.ask(HI)
    agent.trains(ROW)


def test_the_connection_is_kept_alive_after_errors(proxy: AnyProxy) -> None:
    with proxy.episode("yes") as agent:
        first = agent.send("unknown")
        socket, read = first.connection.sock, first.content
        assert read
        for body, status in ((b"{}", 400), (body_of(agent), 200)):
            first.connection.request("POST", f"{first.path.rpartition('/')[0]}/{CHAT}", body, agent.headers)
            response = first.connection.getresponse()
            assert (response.status, bool(response.read())) == (status, True)
        assert first.connection.sock is socket
    agent.trains(ROW)


@pytest.mark.parametrize(
    ("route", "words"),
    [(CHAT, "maximum context length"), (RESPONSES, "maximum context length"), (MESSAGES, "prompt is too long")],
)
def test_context_overflow_gets_the_error_that_clients_recognise(proxy: AnyProxy, route: str, words: str) -> None:
    with proxy.episode("yes", limits=RolloutLimits(max_turns=9, max_tokens=100, turn_tokens=20)) as agent:
        refused = agent.begin(user("long " * agent.num_words), route=route)
        assert refused.status == 400
        assert words in refused.error["message"]
        if route != MESSAGES:
            assert refused.error["code"] == "context_length_exceeded"
            agent.scripted(refused.error["type"], "context_length_exceeded")
        agent.ask(HI)  # the agent shortens its history, and goes on
    agent.trains(ROW)


def test_a_call_above_the_limit_of_calls_gets_403(own: OwnProxy) -> None:
    with own.episode("yes", limits=RolloutLimits(max_turns=1, max_tokens=100, turn_tokens=20)) as agent:
        agent.ask(HI)
        refused = agent.ask(HI)
        assert (refused.status, refused.error["code"]) == (403, "budget_exceeded")
        assert agent.ask(HI, max_tokens=0).status == 400
        assert agent.ask(system("x"), n=0).status == 400
    agent.trains(ROW)
