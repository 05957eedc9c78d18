"""The judge: one greedy request to a chat endpoint per question."""

from __future__ import annotations

import pytest

from envkit import clock
from envkit.errors import TooLargeError, UnreachableError, UsageError
from envkit.wiring.judge import EndpointJudge, open_judge
from tests.wiring.evaluation.chat_servers import Served, completion, failure

QUESTION = [{"role": "system", "content": "Grade."}, {"role": "user", "content": "2 + 2 = 4"}]


def asked(served: Served, *, tries: int = 5, times: int = 1) -> str:
    async def main() -> str:
        async with served.run(), open_judge(f"some/judge@{served.url}") as judge:
            assert isinstance(judge, EndpointJudge)
            judge.client.tries, judge.client.delay_s = tries, 0.01
            return [await judge.ask(QUESTION, max_tokens=9) for _ in range(times)][-1]

    return clock.run(main)


def test_a_judge_asks_greedily_and_returns_the_answer_without_thoughts() -> None:
    served = Served(lambda body: completion("<think>4 is right</think>yes"))
    assert asked(served) == "yes"
    assert served.asked == [
        {
            "model": "some/judge",
            "messages": QUESTION,
            "max_tokens": 9,
            "temperature": 0.0,
            "seed": 0,
        }
    ]


def test_a_temporary_failure_is_retried_and_a_lasting_one_means_that_the_judge_is_unreachable() -> None:
    assert asked(Served(lambda body: completion("yes"), [lambda body: failure(503, "busy")])) == "yes"
    with pytest.raises(UnreachableError, match=r"no completion from .* in 2 tries: 503 Service Unavailable: busy"):
        asked(Served(lambda body: failure(503, "busy")), tries=2)


def test_a_chat_that_the_judge_refuses_and_a_first_request_that_the_server_rejects_are_different_errors() -> None:
    served = Served(lambda body: failure(400, "too long"), [lambda body: completion("yes")])
    with pytest.raises(TooLargeError, match=r"^the judge some/judge refuses the chat: 400 Bad Request: too long"):
        asked(served, times=2)
    error = "400 Bad Request: no such field; the server rejects this request"
    with pytest.raises(UsageError, match=error):
        asked(Served(lambda body: failure(400, "no such field")))


@pytest.mark.parametrize(
    ("address", "error"),
    [
        ("gpt", "env.judge: gpt: lacks the model or the URL of a server; write MODEL@URL, such as qwen2.5-7b@http"),
        ("m@http://a:b@h", "env.judge: the URL of m holds a password; set OPENAI_API_KEY instead"),
    ],
)
def test_the_address_of_a_judge_is_checked_and_the_error_names_its_setting(address: str, error: str) -> None:
    async def main() -> None:
        async with open_judge(address):
            pass

    with pytest.raises(UsageError, match=f"^{error}"):
        clock.run(main)
