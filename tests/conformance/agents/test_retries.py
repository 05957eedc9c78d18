"""Retries: which requests get an answer again, and which ones a fresh one."""

from __future__ import annotations

from collections.abc import Mapping
from uuid import uuid4

import pytest

from envkit.trainer_bridge.agents.open_calls import MAX_STORED
from envkit.trainer_bridge.rollout import RolloutLimits
from tests.conformance.agents.client import CHAT, MESSAGES, ROUTES, user
from tests.conformance.agents.served import STALLS_AFTER, AnyProxy, OwnProxy

Headers = Mapping[str, str]

HI, OTHER = user("hi"), user("other")
ONE, TWO = "U:hi| A:[one|]", "U:hi| A:[two|]"

RUN = uuid4()
"""Part of the keys, since a proxy of others may know those of an earlier run."""

each_route = pytest.mark.parametrize("route", ROUTES)


def count(number: int) -> Headers:
    """What the clients of OpenAI and Anthropic send with the retry `number`; 0 with the first attempt."""
    return {"x-stainless-retry-count": str(number)}


def key(name: str, number: int | None = None) -> Headers:
    return {"Idempotency-Key": f"{name}-{RUN}", **({} if number is None else count(number))}


@each_route
def test_an_equal_body_is_a_fresh_sample(proxy: AnyProxy, route: str) -> None:
    with proxy.episode("one", "two") as agent:
        assert agent.ask(HI, route=route, headers=count(0)).id != agent.ask(HI, route=route, headers=count(0)).id
    agent.trains(ONE, TWO)


@each_route
def test_a_raised_retry_counter_gets_the_same_answer_once(proxy: AnyProxy, route: str) -> None:
    with proxy.episode("one", "two") as agent:
        first, again, fresh = (agent.ask(HI, route=route, headers=count(number)) for number in (0, 1, 1))
        assert again.content == first.content
        assert fresh.id != first.id
    agent.trains(ONE, TWO)


def test_an_idempotency_key_gets_the_same_answer(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        first, again, fresh = (agent.ask(HI, headers=key(name)) for name in "aab")
        assert again.content == first.content
        assert fresh.id != first.id
    agent.trains(ONE, TWO)


def test_another_key_is_a_fresh_sample_even_if_the_counter_is_raised(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two") as agent:
        assert agent.ask(HI, headers=key("a")).id != agent.ask(HI, headers=key("b", 1)).id
    agent.trains(ONE, TWO)


def test_a_key_with_another_body_is_refused(proxy: AnyProxy) -> None:
    with proxy.episode("one") as agent:
        agent.ask(HI, headers=key("a"))
        assert 400 <= agent.begin(OTHER, headers=key("a")).status < 500
    agent.trains(ONE)


def test_another_body_or_route_with_a_raised_counter_is_a_fresh_sample(proxy: AnyProxy) -> None:
    with proxy.episode("one", "two", "other") as agent:
        body = {"model": agent.model, "max_tokens": 9, "messages": [HI]}
        asked = [
            agent.send(CHAT, body),
            agent.send(MESSAGES, body, headers=count(1)),
            agent.ask(OTHER, headers=count(1)),
        ]
        assert len({one.id for one in asked}) == 3
        agent.scripted([one.text for one in asked], ["one", "two", "other"])
    agent.trains(ONE, TWO, "U:other| A:[other|]")


@pytest.mark.parametrize(("route", "headers"), [(CHAT, count(1)), *((route, {}) for route in ROUTES)])
def test_a_client_that_reconnects_gets_the_running_call(own: OwnProxy, headers: Headers, route: str) -> None:
    with own.episode("~one", "two") as agent:
        agent.begun(HI, route=route).close()
        agent.settle()
        again = agent.begin(HI, route=route, headers=headers)
        agent.release()
        assert again.text == "one"
        assert agent.ask(HI, route=route).text == "two"
    agent.trains(ONE, TWO)


def test_a_retry_gets_the_running_call_before_the_proxy_knows_that_the_client_has_gone(own: OwnProxy) -> None:
    with own.episode("~one") as agent:
        first, again = agent.begun(HI), agent.begin(HI, headers=count(1))
        agent.settle(2)
        first.close()
        agent.settle(1)
        agent.release()
        assert again.text == "one"
    agent.trains(ONE)


@each_route
def test_an_answer_that_was_cut_off_is_sent_again_once(own: OwnProxy, route: str) -> None:
    long = "one " * 100
    with own.episode(long, "two") as agent:
        cut = agent.begin(HI, route=route, stream=True, headers={STALLS_AFTER: "one"})
        begun = next(cut.pieces())
        cut.close()
        agent.settle()
        again, fresh = ("".join(agent.ask(HI, route=route, stream=True).pieces()) for _ in range(2))
        assert (begun, again, fresh) == (long[: len(begun)], long, "two")
    agent.trains(f"U:hi| A:[{long}|]", TWO)


@pytest.mark.parametrize(("route", "body"), [(CHAT, {"messages": [OTHER]}), ("step", {"action": "up"})])
def test_another_request_aborts_a_call_whose_client_disconnected(
    own: OwnProxy, route: str, body: dict[str, object]
) -> None:
    with own.episode("~one", "two", "two") as agent:
        agent.begun(HI).close()
        agent.settle()
        assert agent.send(route, body).status == 200
        agent.until_stopped()
        assert agent.ask(HI).text == "two"  # what was aborted is not answered again
    agent.trains(*["U:other| A:[two|]"] * (route == CHAT), TWO, aborted=4)


def test_a_stored_answer_that_was_not_received_whole_is_given_again(own: OwnProxy) -> None:
    with own.episode("one") as agent:
        first = agent.ask(HI, stream=True)
        cut = agent.begin(HI, stream=True, headers={**count(1), STALLS_AFTER: "one"})
        assert next(cut.pieces()) == "one"
        cut.close()
        agent.settle()
        assert agent.ask(HI, stream=True).content == first.content
    agent.trains(ONE)


def test_another_request_does_not_abort_a_call_whose_client_waits(own: OwnProxy) -> None:
    with own.episode("~one", "other") as agent:
        first = agent.begun(HI)
        agent.ask(OTHER)
        agent.release()
        assert first.text == "one"
    agent.trains(ONE, "U:other| A:[other|]")


@pytest.mark.parametrize("headers", [count(1), key("a")])
def test_an_error_is_not_stored(own: OwnProxy, headers: Headers) -> None:
    with own.episode("one!!!", "two") as agent:
        assert [agent.ask(HI, headers=headers).status for _ in range(2)] == [503, 200]
    agent.trains(TWO, aborted=6)


def test_a_fresh_attempt_that_fails_ends_the_stored_answer(own: OwnProxy) -> None:
    with own.episode("one", limits=RolloutLimits(max_turns=1, max_tokens=200, turn_tokens=20)) as agent:
        assert [agent.ask(HI).status, agent.ask(HI).status] == [200, 403]
        assert agent.ask(HI, headers=count(1)).status == 403
    agent.trains(ONE)


def test_a_call_that_the_engine_stopped_after_its_client_went_is_started_anew(own: OwnProxy) -> None:
    with own.episode("~one!!!", "two") as agent:
        agent.begun(HI).close()
        agent.settle()
        agent.release()
        agent.until_stopped()
        assert agent.ask(HI).text == "two"
    agent.trains(TWO, aborted=6)


def test_the_oldest_stored_answers_are_forgotten(own: OwnProxy) -> None:
    limits = RolloutLimits(max_turns=100, max_tokens=400)
    with own.episode(*["x"] * (MAX_STORED + 2), limits=limits) as agent:
        first, *_ = [agent.ask(HI, user=str(number)).id for number in range(MAX_STORED)]
        assert agent.ask(HI, user="0", headers=count(1)).id == first
        agent.ask(OTHER)
        assert agent.ask(HI, user="0", headers=count(2)).id != first
