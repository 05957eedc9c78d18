"""An OpenAI-compatible endpoint as a player: a real HTTP server on this machine stands in for the model."""

from __future__ import annotations

import gzip
import traceback
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from envkit import clock
from envkit.config import evaluation
from envkit.config.parts import AutoRendererSection
from envkit.errors import ConfigError, EnvkitError, UnreachableError, UsageError
from envkit.http.client.chat import MAX_BYTES, Address
from envkit.runs.display import SilentDisplay
from envkit.runs.episodes import episode_of
from envkit.trainer_bridge.evaluation.advice import advice
from envkit.trainer_bridge.evaluation.outcomes import EvaluatedEpisode, measure
from envkit.trainer_bridge.evaluation.result import Evaluation
from envkit.trainer_bridge.evaluation.table import lines
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import (
    Action,
    EpisodeRecord,
    Observation,
    Options,
    Reset,
    RolloutRequest,
    StopReason,
    Task,
    ToolSchema,
)
from envkit.wiring.environments import slots
from envkit.wiring.evaluation import policies
from envkit.wiring.evaluation.endpoint import Endpoint, open_endpoint
from envkit.wiring.evaluation.evaluate import evaluate
from tests.wiring.evaluation.chat_servers import Answer, Served, completion, failure

LAKE: Options = {"map": "4x4", "instructions": False}
WAY = ("down", "down", "right", "down", "right", "right")


def on_the_way(body: dict[str, Any]) -> Response:
    """The next move of the way to the goal, from the number of answers that the chat holds."""
    turn = sum(message["role"] == "assistant" for message in body["messages"])
    return completion(f"<answer>{WAY[turn]}</answer>")


def played(
    served: Served,
    *,
    episodes: int = 1,
    timeout_s: float = 10.0,
    tries: int = 5,
    turn_tokens: int = 128,
    temperature: float = 1.0,
    **renderer: Any,
) -> list[EpisodeRecord]:
    """Play the same lake with short delays between tries, one episode after another, and return the episodes."""
    limits = RolloutLimits(max_turns=6, turn_tokens=turn_tokens)

    async def main() -> RolloutResult:
        async with served.run(), slots(8, LAKE) as host:
            address, section = Address.of(f"some/model@{served.url}"), AutoRendererSection(**renderer)
            async with open_endpoint(address, limits, section, at_once=1, timeout_s=timeout_s) as endpoint:
                endpoint.client.delay_s, endpoint.client.tries = 0.01, tries
                tasks = [Task("FrozenLake-v0", seed, LAKE) for seed in range(episodes)]
                rollout = Rollout(host, endpoint, limits, 1)
                return await rollout.groups(tasks, phase="eval", seed=0, temperature=temperature)

    return [episode_of(one, index=index, decode=str) for index, one in enumerate(clock.run(main).trajectories)]


def request(temperature: float = 1.0) -> RolloutRequest:
    return RolloutRequest("eval/0/0", Task("Code-v0", 0), 0, temperature=temperature)


LIMITS = RolloutLimits(max_turns=6)


def opened(url: str, limits: RolloutLimits = LIMITS, **renderer: Any) -> AbstractAsyncContextManager[Endpoint]:
    return open_endpoint(Address.of(f"m@{url}"), limits, AutoRendererSection(**renderer), at_once=1)


@pytest.fixture(autouse=True)
def key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")


def refused(served: Served, *, tries: int = 5, episodes: int = 1) -> EnvkitError:
    with pytest.raises((EnvkitError, BaseExceptionGroup)) as raised:
        played(served, tries=tries, episodes=episodes)
    error: BaseException = raised.value
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, EnvkitError)
    return error


def test_an_episode_is_a_chat_in_which_observations_are_the_user_and_answers_the_assistant() -> None:
    served = Served(on_the_way)
    (episode,) = played(served, system="Be brief.", turn_tokens=20, temperature=0.5)
    assert (episode.outcome.success, [turn.action for turn in episode.turns]) == (
        True,
        [f"<answer>{move}</answer>" for move in WAY],
    )
    first, second = served.asked[:2]
    assert {name: first[name] for name in ("model", "max_tokens", "temperature")} == {
        "model": "some/model",
        "max_tokens": 20,
        "temperature": 0.5,
    }
    assert episode.start is not None
    after = episode.turns[0].observation
    assert after is not None
    assert second["messages"] == [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": episode.start.text},
        {"role": "assistant", "content": "<answer>down</answer>"},
        {"role": "user", "content": after.text},
    ]
    assert {headers["authorization"] for headers in served.headers} == {"Bearer sk-secret"}


def test_each_turn_has_a_seed_of_its_own_and_the_same_one_in_another_run() -> None:
    first, again = Served(on_the_way), Served(on_the_way)
    played(first, episodes=2)
    played(again, episodes=2)
    seeds = [body["seed"] for body in first.asked]
    assert (len(seeds), len(set(seeds))) == (12, 12)
    assert [body["seed"] for body in again.asked] == seeds


def test_a_prompt_holds_as_many_turns_as_the_history_allows() -> None:
    served = Served(lambda body: completion("<answer>up</answer>"))
    played(served, history=2)
    assert [len(body["messages"]) for body in served.asked] == [1, 3, 3, 3, 3, 3]


@pytest.mark.parametrize(
    ("answer", "action"),
    [
        (completion("<think>up or <answer>up</answer>?</think>\n<answer>down</answer>"), "<answer>down</answer>"),
        (completion("<answer>down</answer>", reasoning_content="<answer>up</answer>"), "<answer>down</answer>"),
        (completion("<think>it goes on and", finish="length"), ""),
        (completion(None), ""),
    ],
)
def test_thoughts_are_no_part_of_the_action_and_are_kept_in_the_record(answer: Response, action: str) -> None:
    served = Served(lambda body: answer)
    (episode,) = played(served)
    assert {turn.action for turn in episode.turns} == {action}
    generation = episode.turns[0].generation
    assert generation is not None
    assert ("up" in generation.completion) == (b"up" in bytes(answer.body))
    assert [message["content"] for message in served.asked[1]["messages"] if message["role"] == "assistant"] == [action]


def test_thoughts_stay_in_the_prompt_where_they_are_kept() -> None:
    served = Served(lambda body: completion("<think>hm</think><answer>up</answer>"))
    played(served, thinking="keep")
    assert served.asked[1]["messages"][1]["content"] == "<think>hm</think><answer>up</answer>"


@pytest.mark.parametrize(
    "passing",
    [
        lambda body: failure(429, "slow down", **{"Retry-After": "0"}),
        lambda body: Response("<html>bad gateway</html>", status_code=502),
        lambda body: Response("{ not json"),
    ],
)
def test_a_temporary_failure_is_retried_and_changes_nothing(passing: Answer) -> None:
    served = Served(on_the_way, [passing, on_the_way, passing, passing])
    (episode,) = played(served)
    assert (episode.outcome.success, len(served.asked)) == (True, 9)
    assert served.asked[0] == served.asked[1]


def test_a_retry_waits_as_long_as_retry_after_asks() -> None:
    served = Served(on_the_way, [lambda body: failure(429, "slow down", **{"Retry-After": "1"})])

    async def main() -> float:
        async with served.run(), opened(served.url) as endpoint:
            endpoint.client.delay_s = 30.0
            began = clock.now()
            await endpoint.complete([{"role": "user", "content": "?"}], seed=0, temperature=1.0)
            return clock.now() - began

    assert 1.0 <= clock.run(main) < 25.0


def test_a_request_to_a_hanging_server_is_retried_after_the_timeout() -> None:
    class Hangs(Served):
        async def chat(self, request: Request) -> Response:
            if not self.asked:
                self.asked.append({})
                await anyio.sleep(2.0)
            return await super().chat(request)

    (episode,) = played(Hangs(on_the_way), timeout_s=0.5)
    assert episode.outcome.success


def test_an_episode_without_a_completion_is_void_and_the_others_count() -> None:
    served = Served(on_the_way, [*[lambda body: failure(503, "overloaded")] * 3])
    lost, fine = played(served, episodes=2, tries=3)
    assert (lost.outcome.stop, fine.outcome.success) == (StopReason.NO_COMPLETION, True)
    assert lost.outcome.error == f"no completion from {served.url}/v1 in 3 tries: 503 Service Unavailable: overloaded"


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (400, "This model's maximum context length is 64 tokens"),
        (413, "payload too large"),
        (451, "unavailable for legal reasons"),
    ],
)
def test_a_refused_request_after_a_completion_ends_its_own_episode_whatever_its_words(
    status: int, message: str
) -> None:
    served = Served(lambda body: on_the_way(body) if len(body["messages"]) != 5 else failure(status, message))
    first, second = played(served, episodes=2)
    assert [(one.outcome.stop, len(one.turns)) for one in (first, second)] == [(StopReason.REFUSED, 2)] * 2
    episodes = [[EvaluatedEpisode.of(first)], [EvaluatedEpisode.of(second)]]
    assert (episodes[0][0].ending, measure(episodes, 1)["success"].mean) == ("refused", 0.0)
    assert advice(episodes, RolloutLimits(max_turns=6, turn_tokens=7))[0].startswith(
        "the endpoint refused a request in 2 of 2 episodes, which count as failures"
    )


def test_an_answer_that_a_content_filter_cut_off_is_a_refused_request() -> None:
    served = Served(on_the_way, [on_the_way, lambda body: completion(None, finish="content_filter")])
    cut, fine = played(served, episodes=2)
    assert (cut.outcome.stop, len(cut.turns), fine.outcome.success) == (StopReason.REFUSED, 1, True)


def test_five_refused_requests_in_a_row_end_the_evaluation_and_a_completion_between_them_does_not() -> None:
    def no(body: dict[str, Any]) -> Response:
        return failure(400, "no")

    mixed = Served(on_the_way, [on_the_way, *[no] * 4, on_the_way, *[no] * 4])
    assert [one.outcome.stop for one in played(mixed, episodes=9)].count(StopReason.REFUSED) == 8
    error = refused(Served(no, [on_the_way]), episodes=9)
    assert str(error).endswith("400 Bad Request: no; the server has rejected 5 requests in a row")


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (401, "bad key", "set OPENAI_API_KEY to a key that this server accepts"),
        (
            404,
            "The model `some/model` does not exist.",
            "check the URL (is /v1 missing?) and the name of the model",
        ),
        (402, "no credits", "the server rejects this request"),
        (400, "no such field", "the server rejects this request"),
    ],
)
def test_a_permanent_failure_ends_the_evaluation_with_request_and_reason(
    status: int, message: str, remedy: str
) -> None:
    before = [] if status == 400 else [on_the_way]  # 400 after a completion is about one request
    served = Served(lambda body: failure(status, message), before)
    error = refused(served)
    assert isinstance(error, UsageError)
    assert f"POST {served.url}/v1/chat/completions for model some/model: {status} " in str(error)
    assert message in str(error)
    assert str(error).endswith(remedy)
    assert len(served.asked) == len(before) + 1


# --- Parameters ------------------------------------------------------------------------------------------------------


def refusing(name: str, error: dict[str, Any]) -> Answer:
    return lambda body: JSONResponse(error, status_code=400) if name in body else on_the_way(body)


@pytest.mark.parametrize(
    ("name", "error", "sent"),
    [
        (
            "max_tokens",
            {
                "error": {
                    "message": "Unsupported parameter. Use 'max_completion_tokens' instead.",
                    "param": "max_tokens",
                }
            },
            "max_completion_tokens",
        ),
        ("temperature", {"error": {"message": "`temperature` does not support 0.2", "param": None}}, None),
        ("seed", {"detail": [{"loc": ["body", "seed"], "msg": "extra", "input": {"max_tokens": 3}}]}, None),
        ("seed", {"error": "seed: unknown"}, None),
    ],
)
def test_a_parameter_that_the_model_refuses_is_replaced_once_with_one_warning(
    name: str, error: dict[str, Any], sent: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    served = Served(refusing(name, error))
    assert [one.outcome.success for one in played(served, episodes=2)] == [True, True]
    assert [name in body for body in served.asked] == [True, *[False] * 12]
    assert {"max_tokens", "seed", "temperature", "max_completion_tokens"} & served.asked[-1].keys() == {
        *({"max_tokens", "seed", "temperature"} - {name}),
        *({sent} if sent else ()),
    }
    what = f"sent as {sent}" if sent else "left out"
    assert [one.getMessage() for one in caplog.records if one.name.endswith("chat")] == [
        f"some/model refuses the parameter {name}, which is {what}"
    ]


def test_a_parameter_whose_replacement_is_refused_too_is_not_replaced(caplog: pytest.LogCaptureFixture) -> None:
    too_large = failure(400, "'max_tokens' or 'max_completion_tokens' is too large")
    served = Served(on_the_way, [on_the_way, lambda body: too_large, lambda body: too_large])
    cut, fine = played(served, episodes=2)
    assert (cut.outcome.stop, fine.outcome.success) == (StopReason.REFUSED, True)
    assert "max_tokens" in served.asked[-1]
    assert not [one for one in caplog.records if one.name.endswith("chat")]


def test_parameters_of_the_user_are_sent_replace_others_and_null_leaves_one_out() -> None:
    async def main() -> None:
        async with served.run():
            described = evaluation.read(
                "FrozenLake-v0",
                [
                    f"rollout.parameters.{one}"
                    for one in ("reasoning_effort=low", "seed=null", 'extra={"a": [1]}', "p=1e-5")
                ],
                policy=f"openai:m@{served.url}",
                episodes=1,
                options=LAKE,
                split="any",
                parameters={"temperature": 0.25},
            )
            await evaluate(described, display=SilentDisplay())

    served = Served(on_the_way)
    clock.run(main)
    body = served.asked[0]
    assert "seed" not in body
    assert {name: body[name] for name in ("reasoning_effort", "extra", "p", "temperature")} == {
        "reasoning_effort": "low",
        "extra": {"a": [1]},
        "p": 1e-5,
        "temperature": 0.25,
    }
    with pytest.raises(ConfigError, match=r"rollout.parameters: needs the policy openai:\.\.\.; leave it out"):
        policies.find_policy(evaluation.read("FrozenLake-v0", policy="expert", parameters={"a": 1}), None)


# --- Hostile servers -------------------------------------------------------------------------------------------------

LARGE = b" " * (MAX_BYTES + 1)


@pytest.mark.parametrize(
    "answer",
    [
        Response(LARGE),
        Response(gzip.compress(LARGE), headers={"Content-Encoding": "gzip"}),
        Response(b"{}", headers={"Content-Encoding": "br"}),
        JSONResponse({"choices": [{"message": {"content": 3}}]}),
    ],
)
def test_an_answer_that_is_too_large_or_damaged_is_a_temporary_failure(answer: Response) -> None:
    lost, fine = played(Served(on_the_way, [lambda body: answer] * 2), episodes=2, tries=2)
    assert (lost.outcome.stop, fine.outcome.success) == (StopReason.NO_COMPLETION, True)


def test_an_answer_in_gzip_is_read() -> None:
    def zipped(body: dict[str, Any]) -> Response:
        return Response(gzip.compress(bytes(on_the_way(body).body)), headers={"Content-Encoding": "gzip"})

    assert played(Served(zipped))[0].outcome.success


def test_an_answer_that_arrives_byte_by_byte_has_one_deadline() -> None:
    async def drip() -> AsyncIterator[bytes]:
        while True:
            yield b" "
            await anyio.sleep(0.05)

    served = Served(on_the_way, [lambda body: StreamingResponse(drip())])
    lost, _ = played(served, episodes=2, tries=1, timeout_s=0.5)
    assert lost.outcome.error == f"no completion from {served.url}/v1 in 1 tries: no complete answer in 0.5 s"


@pytest.mark.parametrize(
    "wait", ["nan", "-5", "soon", "Mon, 99999999999999999999 Jan 2020 00:00:00 GMT", "Thu, 01 Jan 0001 00:00:00"]
)
def test_retry_after_of_any_shape_is_read_or_ignored(wait: str) -> None:
    served = Served(on_the_way, [lambda body: failure(503, "busy", **{"Retry-After": wait})])
    assert played(served)[0].outcome.success


@pytest.mark.parametrize(
    "variables",
    [
        {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"},
        {"all_proxy": "socks://127.0.0.1:9"},
    ],
)
def test_a_server_on_this_machine_is_never_asked_through_a_proxy(
    variables: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert played(Served(on_the_way))[0].outcome.success


@pytest.mark.parametrize(
    ("proxy", "message"),
    [
        ("http://127.0.0.1:9", "check the URL, or the proxy in the environment variables"),
        ("socks://127.0.0.1:9", "the proxy in the environment variables .* cannot be used: .*NO_PROXY=model.example"),
    ],
)
def test_a_proxy_that_fails_is_named(proxy: str, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALL_PROXY", proxy)

    async def main() -> None:
        async with opened("http://model.example") as endpoint:
            await endpoint.complete([], seed=0, temperature=1.0)

    with pytest.raises((UnreachableError, UsageError), match=message):
        clock.run(main)


@pytest.mark.parametrize(
    "answer",
    [
        lambda body: failure(401, "the key sk-secret is not valid"),
        lambda body: Response('{"error": {"message": "sk\\u002dsecret"}}', status_code=404),
        lambda body: JSONResponse({"detail": [{"loc": ["header", "sk-secret"]}]}, status_code=422),
    ],
)
def test_the_api_key_is_not_in_an_error(answer: Answer) -> None:
    try:
        (episode,) = played(Served(answer), tries=1)
        text = str(episode.outcome.error)
    except (EnvkitError, BaseExceptionGroup) as error:
        text = "".join(traceback.format_exception(error))
    assert "***" in text
    assert "sk-secret" not in text


@pytest.mark.parametrize("key", ["sk-secret\n", "sk-s\necret", "sk-s\u00e9cret"])
def test_a_key_that_cannot_be_sent_is_not_printed(key: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", key)
    served = Served(on_the_way)
    if key.strip().isascii() and "\n" not in key.strip():
        played(served)
        assert served.headers[0]["authorization"] == "Bearer sk-secret"
    else:
        assert str(refused(served)) == "OPENAI_API_KEY: contains characters that no API key has; set it again"


def test_an_unreachable_server_is_named_at_once() -> None:
    async def main() -> None:
        async with opened("http://127.0.0.1:9") as endpoint:
            await endpoint.complete([], seed=0, temperature=1.0)

    with pytest.raises(
        UnreachableError, match=r"^no server answers at http://127.0.0.1:9/v1 \(.*\); start one, or check the URL$"
    ):
        clock.run(main)


@pytest.mark.parametrize(
    ("text", "model", "url"),
    [
        ("a/b@http://h:8000", "a/b", "http://h:8000/v1"),
        ("a@http://h/v1/", "a", "http://h/v1"),
        ("a:7b@https://h/api/v1/chat/completions", "a:7b", "https://h/api/v1"),
        ("a@b@http://h/v2", "a@b", "http://h/v2"),
    ],
)
def test_an_address_may_be_written_in_several_ways(text: str, model: str, url: str) -> None:
    assert Address.of(text) == Address(model, url)


def measured(served: Served, *, at_once: int = 16, **changes: Any) -> Evaluation:
    """Evaluate an endpoint on four lakes, or the same lake four times."""

    async def main() -> Evaluation:
        async with served.run():
            settings = {"episodes": 4, "seed": 0, "options": LAKE, "split": "any", "max_turns": 3, **changes}
            policy, overrides = f"openai:m@{served.url}", [f"env.num_envs={at_once}"]
            described = evaluation.read("FrozenLake-v0", overrides, policy=policy, **settings)
            return await evaluate(described, display=SilentDisplay())

    return clock.run(main)


def test_a_model_without_the_answer_format_gets_a_warning() -> None:
    found = measured(Served(lambda body: completion("I would rather talk.")))
    assert (found.metrics["action_is_valid"].mean, found.metrics["answers_cut_off"].mean) == (0.0, 0.0)
    assert (found.usage.completions, found.usage.prompt_tokens, found.usage.completion_tokens) == (12, 360, 60)
    cut, form = found.notes
    assert cut == "cut off: 4 of 4 episodes reached rollout.max_turns (3)"
    assert form.startswith("no answer was valid: the model does not use the answer format of the environment")
    assert found.as_json()["notes"] == found.notes
    assert list(lines(found))[-3:] == ["notes", f"  {cut}", f"  {form}"]


def test_answers_that_were_cut_off_say_nothing_about_the_format() -> None:
    found = measured(Served(lambda body: completion("I would rather", finish="length")), turn_tokens=7)
    cut, many = found.notes
    assert cut == (
        "cut off: 4 of 4 episodes reached rollout.max_turns (3), 100.0% of the answers reached rollout.turn_tokens (7)"
    )
    assert many.startswith("most answers were cut off: raise --turn-tokens")


def test_an_endpoint_may_write_4096_tokens_by_default() -> None:
    served = Served(on_the_way)
    measured(served)
    assert {body["max_tokens"] for body in served.asked} == {4096}


def test_what_an_endpoint_refused_and_failed_stands_in_the_result() -> None:
    busy = refusing("temperature", {"error": "temperature: unknown"})
    found = measured(
        Served(busy, [busy, lambda body: failure(429, "slow down", **{"Retry-After": "0"})]), max_turns=6, at_once=1
    )
    assert (found.metrics["success"].mean, found.retries) == (1.0, 1)
    assert found.notes == [
        "m refuses the parameter temperature, which is left out",
        "repeated 1 request that had failed temporarily; the last failure: 429 Too Many Requests: slow down",
    ]
    assert found.as_json()["retries"] == 1


# --- Tools -----------------------------------------------------------------------------------------------------------

BASH: ToolSchema = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "Run a command.",
        "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
    },
}
SEEN = [
    Observation("Fix the bug."),
    Observation("app.py", role="tool"),
    Observation("Go on.", role="user"),
    Observation("nothing", role="tool"),
]


def text_of(action: Action | str) -> str:
    return action if isinstance(action, str) else action.text


def calling(name: str, arguments: str, **more: str) -> dict[str, Any]:
    return {"id": "call_7", "type": "function", "function": {"name": name, "arguments": arguments}, **more}


def acted(served: Served, observations: list[Observation], *, tools: tuple[ToolSchema, ...] = (BASH,)) -> list[str]:
    """Let the player answer the observations of one episode, and return its actions."""

    async def main() -> list[str]:
        async with served.run(), opened(served.url, system="Be brief.") as endpoint:
            start = Reset(observations[0], {}, system="You fix bugs.", tools=tools)
            player = endpoint.begin(request(), start)
            return [text_of(await player.act(observation)) for observation in observations]

    return clock.run(main)


def test_tools_and_both_system_prompts_are_sent_and_a_tool_call_is_the_action(caplog: pytest.LogCaptureFixture) -> None:
    call = calling("bash", '{"command":"ls\\n"}')
    served = Served(lambda body: completion(None, tool_calls=[call, calling("bash", "{}", id="call_8")]))
    assert acted(served, SEEN[:2]) == ['{"name": "bash", "arguments": {"command": "ls\\n"}}'] * 2
    assert caplog.text.count("calls several tools in one answer; only the first one runs") == 1
    first, second = served.asked
    assert first["tools"] == [BASH]
    assert first["messages"][0] == {"role": "system", "content": "Be brief.\n\nYou fix bugs."}
    assert second["messages"][2:] == [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_7", "content": "app.py"},
    ]


def test_an_observation_that_is_no_result_and_a_result_without_a_call_are_user_messages() -> None:
    answers = [
        lambda body: completion(None, tool_calls=[calling("bash", '{"command": "ls"}')]),
        lambda body: completion(None, tool_calls=[calling("bash", '{"command": "cat"}')]),
        lambda body: completion("I am done."),
    ]
    served = Served(lambda body: completion("?"), answers)
    acted(served, SEEN)
    messages = served.asked[-1]["messages"][2:]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in messages[2:]] == [
        '{"name": "bash", "arguments": {"command": "cat"}}',
        "Go on.",
        "I am done.",
        "nothing",
    ]


def test_a_call_with_invalid_arguments_reaches_the_environment_as_text() -> None:
    served = Served(lambda body: completion(None, tool_calls=[calling("bash", '{"command": ')]))
    assert acted(served, SEEN[:1]) == ['<tool_call>{"name": "bash", "arguments": {"command": }</tool_call>']


def test_a_call_in_the_text_of_a_server_without_a_tool_parser_is_read() -> None:
    text = '<tool_call>{"name": "bash", "arguments": {"command": "ls"}}</tool_call>'
    assert acted(Served(lambda body: completion(text)), SEEN[:1]) == [
        '{"name": "bash", "arguments": {"command": "ls"}}'
    ]
    served = Served(lambda body: completion(text))
    assert acted(served, SEEN[:1], tools=()) == [text]
    assert "tools" not in served.asked[0]
