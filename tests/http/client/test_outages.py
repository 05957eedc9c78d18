"""Outages of a server: calls wait for it, up to a limit."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import anyio
import pytest

import envkit
from envkit import clock
from envkit.errors import (
    CapacityError,
    EnvkitError,
    RateLimitError,
    SessionNotFoundError,
    UnauthorizedError,
    UnreachableError,
)
from envkit.http.client.env_client import EnvClient
from envkit.http.client.outages import Outages
from envkit.types import Task
from envkit.wiring.blocking_env import BlockingEnv
from envkit.wiring.training.remote import outages_of_run
from tests.http.envs import Line, serving, slots

DOWN = UnreachableError("http://fleet does not answer: Connection refused")


@dataclass
class Server:
    """Answers calls, except between two times, when it raises the errors in `failing` one after another."""

    failing: Sequence[EnvkitError] = (DOWN,)
    from_s: float = 0.0
    until_s: float = 0.0
    failures: int = 0

    async def answer(self) -> float:
        if self.from_s <= clock.now() < self.until_s:
            self.failures += 1
            raise self.failing[min(self.failures, len(self.failing)) - 1]
        return clock.now()


def call(server: Server, outage_timeout_s: float = 120.0) -> list[str]:
    """Call `server` in a training run, and return the announced lines."""
    lines: list[str] = []
    clock.run(outages_of_run(outage_timeout_s, lines.append).call, server.answer, virtual=True)
    return lines


def test_a_call_waits_for_a_server_that_is_down_and_announces_it_once() -> None:
    server = Server(until_s=60)
    assert call(server) == [
        "env.url: http://fleet does not answer: Connection refused; waiting up to 120 s for the server"
    ]
    assert 30 < server.failures < 80


def test_after_the_limit_the_error_says_what_to_do() -> None:
    with pytest.raises(EnvkitError) as raised:
        call(Server(until_s=1000), outage_timeout_s=30)
    assert type(raised.value) is EnvkitError  # no class that only ends an episode
    assert str(raised.value) == (
        "env.url: lost the server for 30 s: http://fleet does not answer: Connection refused; once it plays "
        "episodes again, continue the run with --resume"
    )


def test_each_outage_has_the_whole_limit() -> None:
    async def main() -> list[str]:
        lines: list[str] = []
        server, outages = Server(until_s=20), outages_of_run(30, lines.append)
        await outages.call(server.answer)
        server.from_s, server.until_s = 40, 60
        await anyio.sleep_until(41)
        await outages.call(server.answer)
        return lines

    assert len(clock.run(main, virtual=True)) == 2


@pytest.mark.parametrize("error", [RateLimitError("slow down"), CapacityError("all 0 slots are in use")])
def test_refusals_that_may_pass_are_waited_for(error: EnvkitError) -> None:
    assert call(Server([error], until_s=5)) == [f"env.url: {error}; waiting up to 120 s for the server"]


def test_a_refused_token_is_not_retried() -> None:
    server = Server([DOWN, UnauthorizedError("unknown token")], until_s=10)
    with pytest.raises(UnauthorizedError, match="unknown token"):
        call(server)
    assert server.failures == 2


def test_an_outage_that_ended_with_a_lost_session_does_not_count_later() -> None:
    async def main() -> None:
        server, outages = (
            Server([DOWN, DOWN, SessionNotFoundError("no session")], until_s=20),
            outages_of_run(30, print),
        )
        with pytest.raises(SessionNotFoundError):
            await outages.call(server.answer)
        await anyio.sleep(100)  # a long update
        server.failing, server.from_s, server.until_s = (DOWN,), clock.now(), clock.now() + 5
        await outages.call(server.answer)

    clock.run(main, virtual=True)


def test_outside_of_training_only_outages_are_waited_for_and_the_error_is_that_of_the_last_call() -> None:
    lines: list[str] = []

    async def main(server: Server, timeout_s: float) -> float:
        began = clock.now()
        with pytest.raises(EnvkitError) as raised:
            await Outages(timeout_s, lines.append).call(server.answer)
        assert raised.value is server.failing[0]
        return clock.now() - began

    assert 30 <= clock.run(main, Server(until_s=1000), 30.0, virtual=True) < 33
    assert lines == ["http://fleet does not answer: Connection refused; waiting up to 30 s for the server"]
    assert clock.run(main, Server(until_s=1000), 0.0, virtual=True) == 0
    assert clock.run(main, Server([CapacityError("full")], until_s=1000), 30.0, virtual=True) == 0
    assert len(lines) == 1


def test_leases_that_wait_are_counted_and_other_calls_are_not() -> None:
    async def main() -> tuple[int, int]:
        server, outages = Server(until_s=20), outages_of_run(120, print)
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(outages.call, server.answer)
            for _ in range(2):
                tasks.start_soon(partial(outages.call, server.answer, is_lease=True))
            await anyio.sleep(1)
            during = outages.waiting_leases
        return during, outages.waiting_leases

    assert clock.run(main, virtual=True) == (2, 0)


def test_leases_steps_and_graders_wait_for_the_server(tmp_path: Path) -> None:
    lines: list[str] = []
    is_down = False

    async def main() -> None:
        nonlocal is_down

        async def connect() -> socket.socket:
            if is_down:
                raise ConnectionRefusedError
            return await line.connect()

        def announce(text: str) -> None:
            nonlocal is_down
            lines.append(text)
            is_down = False

        def go_down() -> None:
            nonlocal is_down
            is_down = True
            line.cut()

        async with serving(slots(), uds=str(tmp_path / "s")) as address:
            with Line(address) as line:
                async with EnvClient(connect=connect, outages=Outages(30, announce)) as client:
                    go_down()
                    async with client.lease(Task("Graded-v0", 0)) as episode:
                        await episode.reset()
                        go_down()
                        assert (await episode.step("on")).observation.text == "on"
                        go_down()
                        assert await episode.grade() == 1.0

    clock.run(main)
    assert len(lines) == 3


def test_make_goes_on_after_a_restart_of_its_server(tmp_path: Path) -> None:
    address = f"unix:{tmp_path}/envs.sock"

    async def serve_twice(step: Callable[[], object]) -> None:
        for _ in range(2):
            async with serving(slots(1), uds=f"{tmp_path}/envs.sock"):
                await clock.to_thread(step)
            await anyio.sleep(0.2)

    made: list[object] = []

    def reset() -> None:
        if not made:
            made.append(envkit.make("Count-v0", url=address))
        env = made[0]
        assert isinstance(env, BlockingEnv)
        assert env.reset(seed=1)[0]

    clock.run(serve_twice, reset)
    made[0].close()  # type: ignore[attr-defined]
