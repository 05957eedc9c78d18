"""What is trained on: which calls and tokens, with which policy version, and what becomes of the episode."""

from __future__ import annotations

import pytest

from envkit.errors import DeadlineError
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.scheduler.accounting import Fate, fate_before_training
from envkit.types import StopReason
from tests.conformance.agents.client import CHAT, MESSAGES, RESPONSES, ROUTES, user
from tests.conformance.agents.served import AnyProxy, OwnAgent, OwnProxy
from tests.trainer_bridge.fakes import Answer, ScriptedHost

A, B = user("a?"), user("b?")

each_route = pytest.mark.parametrize("route", ROUTES)


def versions(agent: OwnAgent) -> list[list[int]]:
    """The policy versions of the trained tokens of each sample."""
    assert agent.played is not None
    return [one.versions[one.mask].tolist() for one in agent.played.samples]


# --- Which calls -----------------------------------------------------------------------------------------------------


def test_probes_of_one_token_and_token_counts_train_nothing_and_cost_no_budget(proxy: AnyProxy) -> None:
    limits = RolloutLimits(max_turns=1, max_tokens=500, turn_tokens=50)
    with proxy.episode("...", "...", "one", limits=limits) as agent:
        for route in (CHAT, MESSAGES):
            agent.ask(user("quota"), route=route, max_tokens=1)
        counted = agent.ask(A, route="messages/count_tokens").json["input_tokens"]
        assert counted == agent.ask(A, route=MESSAGES).json["usage"]["input_tokens"]
    agent.trains("U:a?| A:[one|]", probe=6)


def test_calls_that_are_not_selected_are_context_of_those_that_are(own: OwnProxy) -> None:
    with own.episode("one", "two", "three", selects=lambda request: request.model == "large") as agent:
        agent.ask(A, agent.ask(A, model="small").message, B, model="large")
        agent.ask(user("title"), model="small")
    agent.trains("U:a?| A:one| U:b?| A:[two|]", not_selected=4 + 6)


# --- Which tokens ----------------------------------------------------------------------------------------------------


@each_route
def test_an_answer_is_cut_at_the_smaller_limit_of_tokens_and_says_so(proxy: AnyProxy, route: str) -> None:
    field = {CHAT: "max_completion_tokens", RESPONSES: "max_output_tokens"}.get(route, "max_tokens")
    limit = {**({"max_tokens": None} if route == CHAT else {}), field: 16}
    with proxy.episode("one...", limits=RolloutLimits(max_turns=1, max_tokens=47, turn_tokens=20)) as agent:
        cut = agent.ask(user("long " * 4), route=route, **limit).json
        reason = cut["choices"][0]["finish_reason"] if route == CHAT else cut.get("stop_reason") or cut["status"]
        agent.scripted(reason, {CHAT: "length", MESSAGES: "max_tokens"}.get(route, "incomplete"))
        usage = cut["usage"]
        assert 0 < usage["completion_tokens" if route == CHAT else "output_tokens"] <= 16
    agent.trains("U:long long long long | A:[one...]")


@pytest.mark.parametrize(("route", "field"), [(CHAT, "stop"), (MESSAGES, "stop_sequences")])
def test_an_answer_ends_before_a_stop_sequence_and_tokens_after_it_do_not_train(
    proxy: AnyProxy, route: str, field: str
) -> None:
    with proxy.episode("one END two") as agent:
        answer = agent.ask(A, route=route, **{field: ["never", "END"]})
        assert "END" not in answer.text
        agent.scripted(answer.text, "one ")
        if route == MESSAGES:
            agent.scripted((answer.json["stop_reason"], answer.json["stop_sequence"]), ("stop_sequence", "END"))
    agent.trains("U:a?| A:[one END]", stop=5)


def test_log_probabilities_are_those_of_the_sampler(own: OwnProxy) -> None:
    with own.episode("one") as agent:
        tokens = agent.ask(A, logprobs=True).json["choices"][0]["logprobs"]["content"]
        assert [one["token"] for one in tokens] == ["o", "n", "e", "<|im_end|>"]
    assert agent.played is not None
    (sample,) = agent.played.samples
    assert [one["logprob"] for one in tokens] == pytest.approx(sample.logprobs[sample.mask].tolist())


# --- Which policy version --------------------------------------------------------------------------------------------


def test_new_weights_within_a_call_change_the_version_from_the_next_token_on(own: OwnProxy) -> None:
    with own.episode("on^e t^wo END x", "three") as agent:
        agent.ask(A, agent.ask(A, stop=["END"]).message, B)
    agent.trains("U:a?| A:[one two ]| U:b?| A:[three|]", stop=3, rewritten=3)
    assert versions(agent) == [[0] * 2 + [1] * 3 + [2] * 9]


@each_route
def test_a_call_that_waits_while_the_weights_change_is_sampled_by_the_new_ones(own: OwnProxy, route: str) -> None:
    with own.episode("~^one") as agent:
        asked = agent.begun(A, route=route)
        agent.release()
        assert asked.text == "one"
    agent.trains("U:a?| A:[one|]")
    assert versions(agent) == [[1] * 4]


# --- What becomes of the episode -------------------------------------------------------------------------------------


def test_calls_in_progress_at_the_end_are_stopped_and_never_train(own: OwnProxy) -> None:
    with own.episode("one", "~two") as agent:
        agent.ask(A)
        late = agent.begun(B)
    assert (late.status, late.error["code"]) == (410, "episode_ended")
    agent.trains("U:a?| A:[one|]", aborted=4)


def test_an_engine_that_does_not_answer_in_time_makes_the_episode_void(own: OwnProxy) -> None:
    with own.episode("one", DeadlineError("no token within 9 s")) as agent:
        agent.ask(A)
        assert agent.ask(B).status in (410, 503)
    agent.trains("U:a?| A:[one|]", ends=StopReason.NO_COMPLETION)
    assert agent.played is not None
    assert fate_before_training(agent.played.trajectory) is Fate.VOIDED


def test_the_actions_of_an_agent_belong_to_its_last_call_and_so_do_their_rewards(own: OwnProxy) -> None:
    host = ScriptedHost(lambda task, lease: [Answer("start"), Answer("x", 0.25), Answer("y", 0.5), Answer("z", 1.0)])
    with own.episode("one", "side", "two", host=host) as agent:
        first = agent.ask(A).message
        agent.ask(user("side call"))
        seen = [agent.send("step", {"action": action}).json for action in ("go", "on")]
        agent.ask(A, first, B)
        assert [*seen, agent.send("step", {"action": "end"}).json] == [{"observation": text} for text in "xyz"]
        assert agent.send("step", {"action": 1}).status == 400
    agent.trains("U:a?| A:[one|] U:b?| A:[two|]", "U:side call| A:[side|]")
    assert agent.played is not None
    assert host.episodes[0].actions == ["go", "on", "end"]
    assert [one.rewards.tolist() for one in agent.played.samples] == [[0.0, 0.75, 1.0]] * 2
    assert [[*dict.fromkeys(one.turn_ids.tolist())] for one in agent.played.samples] == [[0, 2], [1]]


def test_the_end_of_the_environment_ends_the_agent(own: OwnProxy) -> None:
    host = ScriptedHost(lambda task, lease: [Answer("start"), Answer("won", 1.0, "terminated")])
    with own.episode("one", host=host) as agent:
        agent.ask(A)
        late = agent.send("step", {"action": "go"})
        assert (late.status, late.error["code"]) == (410, "episode_ended")
    agent.trains("U:a?| A:[one|]")
    assert agent.played is not None
    assert agent.played.trajectory.outcome.reward == 1.0
