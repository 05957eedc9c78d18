"""An OpenAI-compatible endpoint as a player: a real HTTP server on this machine stands in for the model."""

from __future__ import annotations

import sys
from contextlib import AbstractAsyncContextManager
from typing import Any

import anyio
import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from envkit import clock
from envkit.config import evaluation
from envkit.config.parts import AutoRendererSection
from envkit.errors import EnvkitError, UnreachableError, UsageError
from envkit.http.client.chat import Address
from envkit.runs.display import SilentDisplay
from envkit.runs.episodes import episode_of
from envkit.trainer_bridge.evaluation.advice import advice
from envkit.trainer_bridge.evaluation.outcomes import EvaluatedEpisode, measure
from envkit.trainer_bridge.evaluation.result import Evaluation
from envkit.trainer_bridge.rollout import Rollout, RolloutLimits, RolloutResult
from envkit.types import (
    Action,
    EpisodeRecord,
    FinishReason,
    Observation,
    Options,
    Reset,
    RolloutRequest,
    StopReason,
    Task,
    ToolSchema,
)
from envkit.wiring.environments import slots
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
    assert {name: first[name] for name in ("model", "max_tokens", "temperature", "n")} == {
        "model": "some/model",
        "max_tokens": 20,
        "temperature": 0.5,
        "n": 1,
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
        (completion("up?</think><answer>down</answer>"), "<answer>down</answer>"),
        (completion("<answer>down</answer>", reasoning_content="<answer>up</answer>"), "<answer>down</answer>"),
        (completion("<think>it goes on and", finish="length"), ""),
        (completion("<answer>left</answer> <think>or up", finish="length"), ""),
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


def test_an_answer_that_reached_its_limit_is_counted_as_cut_off() -> None:
    served = Served(lambda body: completion("<answer>up</answer>", finish="length"), [on_the_way, on_the_way])
    (episode,) = played(served)
    finishes = [turn.generation.finish for turn in episode.turns if turn.generation is not None]
    assert finishes == [FinishReason.STOP] * 2 + [FinishReason.LENGTH] * 4
    outcome = EvaluatedEpisode.of(episode)
    assert outcome.values["answers_cut_off"] == 4 / 6
    assert (outcome.usage.prompt_tokens, outcome.usage.completion_tokens) == (180, 30)


@pytest.mark.parametrize(
    "passing",
    [
        lambda body: failure(429, "slow down", **{"Retry-After": "0"}),
        lambda body: failure(500, "oops"),
        lambda body: Response("<html>bad gateway</html>", status_code=502),
        lambda body: Response("{ not json"),
        lambda body: JSONResponse({"choices": []}),
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


def test_a_chat_that_is_too_long_for_the_model_cuts_the_episode_off() -> None:
    too_long = failure(400, "This model's maximum context length is 64 tokens")
    (episode,) = played(Served(lambda body: too_long, [on_the_way, on_the_way]))
    assert (episode.outcome.stop, len(episode.turns)) == (StopReason.CONTEXT_OVERFLOW, 2)


def test_an_episode_whose_first_prompt_is_too_long_counts_as_a_failure() -> None:
    too_long = failure(400, "This model's maximum context length is 64 tokens")
    episodes = [[EvaluatedEpisode.of(one)] for one in played(Served(lambda body: too_long), episodes=2)]
    assert measure(episodes, 1)["success"].mean == 0.0
    assert advice(episodes, RolloutLimits(max_turns=6, max_tokens=sys.maxsize, turn_tokens=7)) == [
        "cut off: 2 of 2 episodes reached the end of the model's context",
        "no prompt left room for an answer: shorten the prompt",
    ]


@pytest.mark.parametrize(
    ("status", "message", "remedy"),
    [
        (401, "bad key", "set OPENAI_API_KEY to a key that this server accepts"),
        (
            404,
            "The model `some/model` does not exist.",
            "check the URL (is /v1 missing?) and the name of the model",
        ),
        (400, "temperature must be 1", "the server rejects this request"),
    ],
)
def test_a_permanent_failure_ends_the_evaluation_with_request_and_reason(
    status: int, message: str, remedy: str
) -> None:
    served = Served(lambda body: failure(status, message))
    error = refused(served)
    assert isinstance(error, UsageError)
    assert f"POST {served.url}/v1/chat/completions for model some/model: {status} " in str(error)
    assert message in str(error)
    assert str(error).endswith(remedy)
    assert len(served.asked) == 1


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


def test_a_model_without_the_answer_format_gets_a_warning() -> None:
    served = Served(lambda body: completion("I would rather talk.", finish="length"))
    notes_shown: list[str] = []

    class Display(SilentDisplay):
        def announce(self, line: str) -> None:
            notes_shown.append(line)

    async def main() -> Evaluation:
        async with served.run():
            settings: dict[str, Any] = {
                "episodes": 4,
                "seed": 0,
                "options": LAKE,
                "split": "any",
                "max_turns": 3,
                "turn_tokens": 7,
            }
            described = evaluation.read("FrozenLake-v0", policy=f"openai:m@{served.url}", **settings)
            return await evaluate(described, display=Display())

    found = clock.run(main)
    assert (found.metrics["action_is_valid"].mean, found.metrics["answers_cut_off"].mean) == (0.0, 1.0)
    assert (found.usage.completions, found.usage.prompt_tokens, found.usage.completion_tokens) == (12, 360, 60)
    cut, many, form = found.notes
    assert cut == (
        "cut off: 4 of 4 episodes reached rollout.max_turns (3), 100.0% of the answers reached rollout.turn_tokens (7)"
    )
    assert many.startswith("most answers were cut off: raise --turn-tokens")
    assert form.startswith("no answer was valid: the model does not use the answer format of the environment")
    assert notes_shown == found.notes == found.as_json()["notes"]


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


def test_tools_and_both_system_prompts_are_sent_and_a_tool_call_is_the_action() -> None:
    call = calling("bash", '{"command":"ls\\n"}')
    served = Served(lambda body: completion(None, tool_calls=[call, calling("bash", "{}", id="call_8")]))
    assert acted(served, SEEN[:2]) == ['{"name": "bash", "arguments": {"command": "ls\\n"}}'] * 2
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


def test_a_server_that_rejects_tools_gives_its_own_error() -> None:
    with pytest.raises(UsageError, match="400 Bad Request: tools are not supported; the server rejects this request"):
        acted(Served(lambda body: failure(400, "tools are not supported")), SEEN[:1])
