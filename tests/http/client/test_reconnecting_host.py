"""A host on a server that goes away: leases and steps wait for it, up to a limit."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
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
    SandboxStartError,
    SessionNotFoundError,
    UnauthorizedError,
    UnreachableError,
)
from envkit.http.client.outages import Outages
from envkit.http.client.reconnecting_host import ReconnectingHost
from envkit.protocols import Episode
from envkit.types import Observation, Reset, Step, Task
from envkit.wiring.blocking_env import BlockingEnv
from envkit.wiring.training.remote import outages_of_run
from tests.http.envs import serving, slots

TASK = Task("Count-v0", 7)
DOWN = UnreachableError("http://fleet does not answer: Connection refused")


@dataclass
class Server:
    """A client of a server that fails between two times, with the errors in `failing` one after another."""

    failing: Sequence[EnvkitError] = (DOWN,)
    from_s: float = 0.0
    until_s: float = 0.0
    keeps_sessions: bool = True
    capacity: int = 4
    queued: int = 0
    ids: list[str | None] = field(default_factory=list)
    actions: list[tuple[float, str]] = field(default_factory=list)
    failures: int = 0

    def answer(self) -> None:
        if self.from_s <= clock.now() < self.until_s:
            self.failures += 1
            raise self.failing[min(self.failures, len(self.failing)) - 1]

    @asynccontextmanager
    async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Played]:
        self.ids.append(id)
        self.answer()
        yield Played(self)


@dataclass
class Played(Episode):
    server: Server

    async def reset(self) -> Reset:
        return Reset(Observation("start"), {})

    async def step(self, action: str) -> Step:
        self.server.answer()
        if clock.now() >= self.server.until_s > 0 and not self.server.keeps_sessions:
            raise SessionNotFoundError("no session")
        self.server.actions.append((round(clock.now(), 1), action))
        return Step(Observation(action), 1.0, False, False, {})

    async def grade(self) -> float | None:
        self.server.answer()
        return 0.5


def play(server: Server, *, steps_s: Sequence[float] = (), outage_timeout_s: float = 120.0) -> list[str]:
    """Lease an episode, play a step after each pause of `steps_s`, and return the announced lines."""
    lines: list[str] = []

    async def main() -> None:
        host = ReconnectingHost(server, outages_of_run(outage_timeout_s, lines.append))
        async with host.lease(TASK) as episode:
            assert (await episode.reset()).observation.text == "start"
            for number, pause_s in enumerate(steps_s):
                await anyio.sleep(pause_s)
                assert (await episode.step(str(number))).observation.text == str(number)
        assert host.queued == 0

    clock.run(main, virtual=True)
    return lines


def test_a_grade_waits_for_a_server_that_is_down() -> None:
    async def main() -> None:
        host = ReconnectingHost(Server(from_s=5, until_s=30), outages_of_run(60, print))
        async with host.lease(TASK) as episode:
            await anyio.sleep(10)
            assert await episode.grade() == 0.5
            assert 30 <= clock.now() < 33

    clock.run(main, virtual=True)


def test_a_lease_waits_for_a_server_that_is_down_and_announces_it_once() -> None:
    server = Server(until_s=60)
    assert play(server) == [
        "env.url: http://fleet does not answer: Connection refused; waiting up to 120 s for the server"
    ]
    assert len(set(server.ids)) == 1  # the server recognises a repeated call by its id
    assert 30 < server.failures < 80


def test_a_step_is_sent_again_until_the_server_has_restarted() -> None:
    server = Server(from_s=5, until_s=20)
    assert len(play(server, steps_s=(1, 5, 1))) == 1
    (first_s, first), (second_s, second), (_, third) = server.actions
    assert (first_s, first, second, third) == (1.0, "0", "1", "2")
    assert 20 <= second_s < 23


def test_an_episode_whose_session_is_gone_ends_so_that_it_is_played_again() -> None:
    with pytest.raises(SessionNotFoundError):
        play(Server(from_s=5, until_s=20, keeps_sessions=False), steps_s=(6,))


def test_after_the_limit_the_error_says_what_to_do() -> None:
    with pytest.raises(EnvkitError) as raised:
        play(Server(until_s=1000), outage_timeout_s=30)
    assert type(raised.value) is EnvkitError  # no class that only ends an episode
    assert str(raised.value) == (
        "env.url: lost the server for 30 s: http://fleet does not answer: Connection refused; once it plays "
        "episodes again, continue the run with --resume"
    )


def test_each_outage_has_the_whole_limit() -> None:
    server = Server(until_s=20)

    async def main() -> list[str]:
        lines: list[str] = []
        host = ReconnectingHost(server, outages_of_run(30, lines.append))
        async with host.lease(TASK):
            server.from_s, server.until_s = 40, 60
            await anyio.sleep_until(41)
            async with host.lease(TASK):
                return lines

    assert len(clock.run(main, virtual=True)) == 2


@pytest.mark.parametrize("error", [RateLimitError("slow down"), CapacityError("all 0 slots are in use")])
def test_refusals_that_may_pass_are_waited_for(error: EnvkitError) -> None:
    assert play(Server(failing=[error], until_s=5)) == [f"env.url: {error}; waiting up to 120 s for the server"]


def test_a_refused_token_is_not_retried() -> None:
    server = Server(failing=[DOWN, UnauthorizedError("unknown token")], until_s=10)
    with pytest.raises(UnauthorizedError, match="unknown token"):
        play(server)
    assert server.failures == 2


def test_leases_that_wait_count_as_queued_and_steps_do_not() -> None:
    server = Server(from_s=5, until_s=20, queued=3)

    async def main() -> tuple[int, int]:
        host = ReconnectingHost(server, outages_of_run(120, print))

        async def lease(step: Callable[[], float] | None = None) -> None:
            async with host.lease(TASK) as episode:
                if step is not None:
                    await anyio.sleep(step())
                    await episode.step("x")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(lease, lambda: 6.0))
            await anyio.sleep(6.5)
            tasks.start_soon(lease)
            tasks.start_soon(lease)
            await anyio.sleep(1)
            during = host.queued
        return during, host.queued

    assert clock.run(main, virtual=True) == (3 + 2, 3)


def test_an_outage_that_ended_with_a_lost_session_does_not_count_later() -> None:
    server = Server(from_s=5, until_s=20, keeps_sessions=False)

    async def main() -> None:
        host = ReconnectingHost(server, outages_of_run(30, lambda line: None))
        async with host.lease(TASK) as episode:
            await episode.reset()
            await anyio.sleep(6)
            with pytest.raises(SessionNotFoundError):
                await episode.step("up")
        await anyio.sleep(100)  # a long update
        server.from_s, server.until_s, server.keeps_sessions = clock.now(), clock.now() + 5, True
        async with host.lease(TASK) as episode:
            await episode.reset()

    clock.run(main, virtual=True)


def test_an_episode_whose_sandbox_did_not_start_is_played_again() -> None:
    class Failing(Played):
        async def reset(self) -> Reset:
            raise SandboxStartError("env-1", "no healthy worker for 60 s")

    class Full(Server):
        @asynccontextmanager
        async def lease(self, task: Task, *, id: str | None = None) -> AsyncIterator[Played]:
            yield Failing(self)

    with pytest.raises(UnreachableError, match="no healthy worker"):
        play(Full())


def test_outside_of_training_only_outages_are_waited_for_and_the_error_is_that_of_the_last_call() -> None:
    lines: list[str] = []

    async def main(server: Server, timeout_s: float) -> float:
        began = clock.now()
        host = ReconnectingHost(server, Outages(timeout_s, lines.append))
        with pytest.raises(EnvkitError) as raised:
            async with host.lease(TASK):
                pass
        assert raised.value is server.failing[0]
        return clock.now() - began

    assert 30 <= clock.run(main, Server(until_s=1000), 30.0, virtual=True) < 33
    assert lines == ["http://fleet does not answer: Connection refused; waiting up to 30 s for the server"]
    assert clock.run(main, Server(until_s=1000), 0.0, virtual=True) == 0
    assert clock.run(main, Server(failing=[CapacityError("full")], until_s=1000), 30.0, virtual=True) == 0
    assert len(lines) == 1


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
