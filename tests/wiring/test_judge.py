"""The judge: one greedy request to a chat endpoint per question."""

from __future__ import annotations

import os
import signal
import socket
import sys
import tempfile
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.config.parts import VllmEngineSection
from envkit.errors import EnvkitError, TooLargeError, UnreachableError, UsageError
from envkit.http.client.chat import Address
from envkit.types import Place
from envkit.wiring.judge import EndpointJudge, open_judge
from envkit.wiring.launch.local import LocalLauncher
from envkit.wiring.training.kinds.vllm import judge_server
from tests.trainer_bridge.engines.vllm import fake_vllm
from tests.wiring.evaluation.chat_servers import Served, completion, failure

QUESTION = [{"role": "system", "content": "Grade."}, {"role": "user", "content": "2 + 2 = 4"}]


def served_address(served: Served, *, is_own: bool) -> str | Address:
    return Address("some/judge", f"{served.url}/v1", is_own=True) if is_own else f"some/judge@{served.url}"


def asked(served: Served, *, tries: int = 5, times: int = 1, is_own: bool = False) -> str:
    async def main() -> str:
        async with served.run(), open_judge(served_address(served, is_own=is_own)) as judge:
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


@pytest.mark.parametrize(("is_own", "sent"), [(False, "Bearer sk-judge"), (True, None)])
def test_a_judge_sends_the_key_of_the_variable_but_not_to_a_server_of_the_run(
    is_own: bool, sent: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "sk-judge")
    served = Served(lambda body: completion("yes"))
    asked(served, is_own=is_own)
    assert served.headers[0].get("authorization") == sent


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


async def taken(port: int) -> socket.socket:
    """Listen on a port as soon as it is free."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            await anyio.sleep(0.01)


@pytest.mark.skipif(sys.platform != "linux", reason="launchers run on Linux")
def test_a_judge_that_the_run_serves_is_started_again_at_another_port_and_ends_the_run_if_it_cannot_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    (tmp_path / "grader").mkdir()
    (tmp_path / "grader" / "config.json").write_text('{"max_position_embeddings": 512}')
    python = str(fake_vllm.scripted(tmp_path, Path(__file__).parents[2]))
    engine = VllmEngineSection(model="another", python=python, dtype="float32")
    lines: list[str] = []

    def kill() -> None:
        os.kill(int((tmp_path / "pids").read_text().split()[-1]), signal.SIGKILL)

    async def main() -> None:
        model, launcher = str(tmp_path / "grader"), LocalLauncher()
        serving = judge_server(model, engine, launcher, Place(), lines.append)
        with anyio.fail_after(60):
            async with serving as address, open_judge(address) as judge:
                assert await judge.ask(QUESTION) == "policy-base says 1"
                kill()
                with await taken(int(address.url.removesuffix("/v1").rpartition(":")[2])):
                    while not lines[-1].startswith("the vLLM server 0 is back"):  # noqa: ASYNC110 - no event
                        await anyio.sleep(0.05)
                    assert await judge.ask(QUESTION) == "policy-base says 1"
                Path(python).write_text("#!/bin/sh\nexit 1\n")  # noqa: ASYNC240 - a small file
                kill()
                await anyio.sleep_forever()

    with pytest.RaisesGroup(pytest.RaisesExc(EnvkitError, match="^the judge is lost: ")):
        clock.run(main)
    assert any("killed by signal 9; starting it again" in line for line in lines)
    assert any("starting vLLM with" in line and "grader" in line for line in lines)
