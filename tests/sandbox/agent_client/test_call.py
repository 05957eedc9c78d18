"""Calls over a channel: timeouts, cancellation and flow control."""

from __future__ import annotations

from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.sandbox.agent_client.channel import ChannelEndedError
from tests.sandbox.agent_client.peer import opened, run


@pytest.mark.parametrize(
    ("do", "fields", "ends_at_s"),
    [
        ("ping", {}, 10.5),
        ("exec", {"timeout_s": 30, "keep_bytes": 1}, 40.5),
        ("shell", {"queue_s": 100, "timeout_s": 30, "keep_bytes": 1}, 140.5),
    ],
)
def test_an_agent_is_given_up_ten_seconds_after_the_time_of_a_call_and_of_its_queue(
    do: str, fields: dict[str, Any], ends_at_s: float
) -> None:
    async def main() -> None:
        channel, peer = await opened()
        with pytest.raises(ChannelEndedError, match=r"^it does not answer$"):
            await channel.call(do, **fields)
        assert (clock.now(), peer.is_closed) == (ends_at_s, True)

    run(main)


def test_a_transfer_does_not_time_out_while_data_arrives() -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def dribble() -> None:
                await peer.next_frame()
                for _ in range(20):
                    await anyio.sleep(9)
                    peer.emit({"id": 1, "of": "data"}, b"x")

            tasks.start_soon(dribble)
            with pytest.raises(ChannelEndedError, match="does not answer"):
                await channel.call("read", path="x", max_bytes=100)
        assert clock.now() == 20 * 9 + 10.5

    run(main)


def test_output_that_trickles_in_does_not_extend_the_timeout_of_a_command() -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def dribble() -> None:
                await peer.next_frame()
                for _ in range(5):
                    await anyio.sleep(5)
                    peer.emit({"id": 1, "of": "out"}, b"x")

            tasks.start_soon(dribble)
            with pytest.raises(ChannelEndedError, match="does not answer"):
                await channel.call("exec", timeout_s=3, keep_bytes=100)
        assert clock.now() >= 13.5

    run(main)


def test_a_cancelled_command_is_not_waited_for_longer_than_two_seconds_and_its_agent_than_ten() -> None:
    async def main() -> None:
        channel, peer = await opened()
        with anyio.move_on_after(3):
            await channel.call("exec", timeout_s=100, keep_bytes=100)
        assert clock.now() == 5
        await channel.ended()
        assert (clock.now(), str(channel.reason)) == (13.5, "it does not answer")
        assert peer.is_closed

    run(main)


def test_cancelling_is_not_delayed_by_a_blocked_stream() -> None:
    async def main() -> None:
        channel, peer = await opened()
        peer.block_sends()
        with anyio.move_on_after(3):
            await channel.call("write", feed=b"x" * 1000, path="x")
        assert clock.now() == 5
        channel.close()

    run(main)


def test_a_slow_reader_makes_the_sandbox_wait_and_loses_nothing() -> None:
    async def main() -> None:
        channel, peer = await opened()
        piece = b"x" * 65536
        call = await channel.start("pack", {"path": "x", "max_bytes": 100 << 20})
        for number in range(100):
            peer.emit({"id": 1, "of": "data"}, piece)
            if number == 50:
                await anyio.sleep(100)  # no timeout runs while the host does not read
        peer.emit({"id": 1, "end": True})
        waiting = peer.unread
        assert 80 <= waiting <= 85  # 1 MiB and one piece were taken in
        taken = 0
        while (got := await call.receive()) is not None:
            assert got == ("data", piece)
            taken += 1
        assert taken == 100
        channel.close()

    run(main)


def test_output_that_comes_during_the_input_of_a_command_neither_blocks_other_calls_nor_hides_a_frozen_agent() -> None:
    async def endless() -> AsyncIterator[bytes]:
        yield b"x"
        await anyio.sleep_forever()

    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(partial(channel.call, "exec", feed=endless(), timeout_s=5, keep_bytes=4 << 20))
            for _ in range(2):
                await peer.next_frame()
            for _ in range(40):
                peer.emit({"id": 1, "of": "out"}, b"y" * 65536)
            tasks.start_soon(partial(peer.answer, do="ping"))
            await channel.call("ping")
            assert clock.now() == 0
            await channel.ended()
            assert (clock.now(), str(channel.reason)) == (15.5, "it does not answer")
            tasks.cancel_scope.cancel()

    run(main)


def test_data_sent_into_a_forwarded_connection_waits_for_its_window() -> None:
    async def main() -> None:
        channel, peer = await opened()
        call = await channel.start("forward", {"port": 80})
        peer.emit({"id": 1, "of": "open"})
        assert await call.receive() == ("open", b"")
        call.disarm()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call.send_within_window, b"y" * (300 << 10))
            await anyio.sleep(100)
            assert peer.pending_frames == 1 + 4  # the call, and 256 KiB
            peer.emit({"id": 1, "ack": 65536})
        assert peer.pending_frames == 1 + 5
        channel.close()

    run(main)


def test_a_sandbox_that_ignores_the_window_of_a_forwarded_connection_is_ended() -> None:
    async def main() -> None:
        channel, peer = await opened()
        call = await channel.start("forward", {"port": 80})
        peer.emit({"id": 1, "of": "open"})
        for _ in range(4):
            peer.emit({"id": 1, "of": "data"}, b"x" * 65536)
        await anyio.sleep(1)
        assert not channel.is_ended
        await call.acknowledge(65536)
        peer.emit({"id": 1, "of": "data"}, b"x" * 65536)
        peer.emit({"id": 1, "of": "data"}, b"x")
        await channel.ended()
        assert str(channel.reason) == "broken frame: 'data' exceeds the requested size"

    run(main)
