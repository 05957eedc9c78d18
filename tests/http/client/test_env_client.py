"""The client against a real server: remote episodes equal local ones, and faults raise the right errors."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    CapacityError,
    DeadlineError,
    EnvError,
    OptionError,
    RequestError,
    SandboxLostError,
    StepOrderError,
    UnknownEnvError,
    UnreachableError,
    UsageError,
)
from envkit.http.client.env_client import EnvClient
from envkit.protocols import EnvHost
from envkit.types import Reset, Step, Task
from tests.causes import cause
from tests.http.envs import TOOL, Lender, Line, serving, slots
from tests.http.stage import by_client

COUNT = Task("Count-v0", 7)
SLEEPER = Task("Sleeper-v0", 0)


def test_a_remote_episode_is_played_like_a_local_one() -> None:
    async def episode(host: EnvHost) -> tuple[Reset, list[Step]]:
        async with host.lease(COUNT) as episode:
            return await episode.reset(), [await episode.step(action) for action in ("x", "äöü \N{SNOWMAN}", "")]

    async def main(client: EnvClient, lender: Lender) -> None:
        assert client.capacity == 4
        far = await episode(client)
        async with slots() as here:
            assert far == await episode(here)
        assert far[1][-1].terminated

    by_client(main)


def test_a_remote_graded_episode_has_the_tools_and_the_grade_of_a_local_one() -> None:
    async def episode(host: EnvHost) -> tuple[Reset, Step, float | None]:
        async with host.lease(Task("Graded-v0", 0, {"grade": 0.5})) as episode:
            return await episode.reset(), await episode.step("end"), await episode.grade()

    async def main(client: EnvClient, lender: Lender) -> None:
        far = await episode(client)
        async with slots() as here:
            assert far == await episode(here)
        assert (far[0].system, far[0].tools, far[0].observation.role) == ("Be brief.", (TOOL,), "tool")
        assert (far[1].observation.role, far[2]) == ("tool", 0.5)

    by_client(main)


def test_a_reset_and_a_grader_may_take_longer_than_other_calls() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(Task("Sleeper-v0", 0, {"reset_s": 0.6})) as episode:
            await episode.reset()
            with pytest.raises(DeadlineError):
                await episode.step("sleep 5")
        async with client.lease(Task("Graded-v0", 0, {"grade_s": 0.6})) as episode:
            await episode.reset()
            assert await episode.grade() == 1.0

    by_client(main, timeout_s=0.3)


def test_the_limits_of_the_environment_extend_the_deadlines_of_a_client() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(Task("Sleeper-v0", 0, {"limit_s": 1.0})) as episode:
            await episode.reset()
            await episode.step("sleep 0.6")
        async with client.lease(Task("Graded-v0", 0, {"grade_s": 0.6, "limit_s": 1.0})) as episode:
            await episode.reset()
            assert await episode.grade() == 1.0

    by_client(main, timeout_s=0.3, grade_timeout_s=0.3)


def test_a_lease_waits_while_the_slots_for_its_environment_are_in_use_and_others_are_free() -> None:
    class Parted(Lender):
        creates = 0

        def partition_of(self, env_id: str, tenant: str) -> tuple[str, int]:
            self.creates += 1
            return env_id, 1

    async def main() -> None:
        host, got = Parted(slots(4)), anyio.Event()
        async with (
            serving(host) as address,
            EnvClient(address) as client,
            EnvClient(address) as other,
            client.lease(COUNT),
            anyio.create_task_group() as tasks,
        ):

            async def wait() -> None:
                async with other.lease(COUNT):
                    got.set()

            tasks.start_soon(wait)
            await anyio.sleep(0.5)
            async with other.lease(SLEEPER):
                assert (got.is_set(), other.queued) == (False, 1)
            assert host.creates < 12
            tasks.cancel_scope.cancel()

    clock.run(main)


def test_a_task_cancelled_with_its_client_releases_its_slot() -> None:
    async def main() -> None:
        async with slots() as host:
            lender = Lender(host)
            async with serving(lender) as address:
                with anyio.CancelScope() as scope:
                    async with EnvClient(address) as client, client.lease(Task("Count-v0", 1)) as episode:
                        await episode.reset()
                        assert lender.open == 1
                        scope.cancel()
                        await anyio.sleep_forever()
                assert lender.open == 0

    clock.run(main)


def test_leaving_a_lease_releases_its_slot_in_every_case() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(COUNT):
            assert lender.open == 1
        assert lender.open == 0

        async def leave_by_error() -> None:
            async with client.lease(COUNT):
                raise KeyError("mine")

        with pytest.raises(KeyError, match="mine"):
            await leave_by_error()
        assert lender.open == 0
        with anyio.move_on_after(0.1):
            async with client.lease(SLEEPER) as episode:
                await episode.reset()
                await episode.step("sleep 50")
        assert lender.open == 0

    by_client(main)


def test_errors_keep_their_class_over_the_wire() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(COUNT) as episode:
            with pytest.raises(StepOrderError, match="before reset"):
                await episode.step("x")
            await episode.reset()
            with pytest.raises(EnvError) as failed:
                await episode.step("raise")
            assert (failed.value.env_id, failed.value.cause) == ("Count-v0", "ValueError in step: boom")
        async with client.lease(Task("Count-v0", 0, {"end": 1})) as episode:
            await episode.reset()
            await episode.step("x")
            with pytest.raises(StepOrderError, match="after the end"):
                await episode.step("x")
        async with client.lease(Task("Count-v0", 0, {"end": 0})) as episode:
            with pytest.raises(OptionError) as refused:
                await episode.reset()
            assert (refused.value.option, refused.value.reason) == ("end", "must be at least 1")
        with pytest.raises(UnknownEnvError, match="did you mean 'Count-v0'"):
            async with client.lease(Task("Cuont-v0", 0)):
                pass
        with pytest.raises(RequestError, match="cannot be encoded as JSON"):
            async with client.lease(Task("Count-v0", 0, {"end": object()})):  # type: ignore[dict-item]
                pass

    by_client(main)


def test_an_action_with_lone_surrogates_is_played() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(COUNT) as episode:
            await episode.reset()
            assert (await episode.step("\ud800\x00")).observation.text == "1 ?\x00"

    by_client(main)


@pytest.mark.parametrize("action", ["\n" * (4 << 20), "x" * 1_000_000])
def test_an_action_that_no_request_can_hold_is_cut_and_played(action: str) -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(COUNT) as episode:
            await episode.reset()
            text = (await episode.step(action)).observation.text
            assert text == f"1 {action[: len(text) - 2]}"
            assert len(text) == 2 + (1_000_000 if len(action) == 1_000_000 else 150_000)

    by_client(main)


def test_two_hundred_sessions_share_one_socket(tmp_path: Path) -> None:
    async def run() -> None:
        async with slots(200) as host, serving(host, uds=str(tmp_path / "s")) as address:
            with Line(address) as line:
                texts: list[str] = []
                async with EnvClient(connect=line.connect) as client, anyio.create_task_group() as tasks:

                    async def episode(number: int) -> None:
                        async with client.lease(Task("Sleeper-v0", number)) as episode:
                            await episode.reset()
                            for turn in range(3):
                                await episode.step("sleep 0.05" if turn == 1 else "sleep 0")
                            texts.append((await episode.step("sleep 0")).observation.text)

                    for number in range(200):
                        tasks.start_soon(episode, number)
                assert (texts, line.count) == (["4 slept"] * 200, 1)

    clock.run(run)


def test_leases_wait_for_slots_of_other_clients_too() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        most = played = 0

        async def episodes(mine: EnvClient) -> None:
            nonlocal most, played
            async with mine.lease(SLEEPER) as episode:
                await episode.reset()
                most = max(most, lender.open)
                await episode.step("sleep 0.02")
                played += 1

        async with EnvClient(client.address) as other, anyio.create_task_group() as tasks:
            for mine in (client, other):
                for _ in range(12):
                    tasks.start_soon(episodes, mine)
        assert (most, played) == (3, 24)

    by_client(main, capacity=3)


def test_a_socket_that_breaks_during_a_call_reconnects_and_steps_once(tmp_path: Path) -> None:
    async def run() -> None:
        async with slots() as host, serving(host, uds=str(tmp_path / "s")) as address:
            with Line(address) as line:
                async with (
                    EnvClient(connect=line.connect) as client,
                    client.lease(SLEEPER) as episode,
                    anyio.create_task_group() as tasks,
                ):
                    await episode.reset()

                    async def cut() -> None:
                        await anyio.sleep(0.1)
                        line.cut()

                    tasks.start_soon(cut)
                    assert (await episode.step("sleep 0.4")).observation.text == "1 slept"
                    assert (await episode.step("sleep 0")).observation.text == "2 slept"
                    assert line.count == 2

    clock.run(run)


def test_a_socket_that_breaks_between_calls_reconnects(tmp_path: Path) -> None:
    async def run() -> None:
        async with slots() as host, serving(host, uds=str(tmp_path / "s")) as address:
            with Line(address) as line:
                async with EnvClient(connect=line.connect) as client:
                    for _ in range(3):
                        line.cut()
                        await client.health()
                assert line.count == 4

    clock.run(run)


def test_a_call_has_a_deadline_and_a_late_answer_is_ignored() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with client.lease(SLEEPER) as episode:
            await episode.reset()
            began = clock.now()
            with pytest.raises(DeadlineError, match=r"did not answer 'step' within 0\.2 s"):
                await episode.step("sleep 0.5")
            assert 0.2 <= clock.now() - began < 2
            with anyio.move_on_after(0.5):
                await anyio.sleep_forever()
            assert (await client.health()).status == "alive"

    by_client(main, timeout_s=0.2)


def test_a_reset_timeout_of_the_server_is_an_error_of_the_lease() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        with pytest.raises(DeadlineError, match=r"the reset exceeded its timeout of 0\.2 s"):
            async with client.lease(Task("Sleeper-v0", 0, {"reset_s": 50})):
                pass

    by_client(main, reset_timeout_s=0.2)


def test_a_closed_client_raises() -> None:
    async def main(client: EnvClient, lender: Lender) -> None:
        async with EnvClient(client.address) as other:
            pass
        with pytest.raises(UnreachableError, match=r"the connection to http://.* was closed"):
            await other.health()

    by_client(main)


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("http://127.0.0.1:1", "http://127.0.0.1:1 does not answer: "),
        ("unix:/nowhere/socket", "unix:/nowhere/socket does not answer: No such file or directory"),
    ],
)
def test_an_unreachable_address_is_named(url: str, message: str) -> None:
    async def run() -> None:
        async with EnvClient(url, timeout_s=5):
            pass

    with pytest.raises(UnreachableError, match=message):
        clock.run(run)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "", "ftp://host", "http://", "http://[::1", "http://host:x", "unix:"]
)
def test_an_invalid_address_is_rejected_at_once(url: str) -> None:
    with pytest.raises(UsageError, match="is not a server address"):
        EnvClient(url)


def test_a_client_needs_either_url_or_connect() -> None:
    for arguments in ({}, {"url": "http://host", "connect": Line("unix:x").connect}):
        with pytest.raises(UsageError, match="pass either url or connect"):
            EnvClient(**arguments)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="timeout_s"):
        EnvClient("http://host", timeout_s=0)


def test_an_error_of_the_connector_is_raised_unchanged() -> None:
    async def connect() -> Any:
        raise SandboxLostError("sandbox-1", cause("killed by signal 9"))

    async def run() -> None:
        async with EnvClient(connect=connect):
            pass

    with pytest.raises(SandboxLostError, match="sandbox-1"):
        clock.run(run)


def test_a_full_server_is_waited_for_only_as_long_as_asked() -> None:
    async def main() -> float:
        async with (
            slots(1) as host,
            serving(host) as address,
            EnvClient(address) as first,
            EnvClient(address, wait_timeout_s=0.2) as second,
            first.lease(Task("Count-v0", 0)),
        ):
            began = clock.now()
            with pytest.raises(CapacityError, match="all 1 slots are in use"):
                async with second.lease(Task("Count-v0", 1)):
                    pass
            return clock.now() - began

    assert 0.1 < clock.run(main) < 5
