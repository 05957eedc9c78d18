"""Calls over a channel: how long they may take, what cancelling does, and who waits for whom."""

from __future__ import annotations

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.sandbox.agent_client.channel import ChannelEndedError
from tests.sandbox.agent_client.peer import opened, run


def test_an_agent_that_does_not_answer_is_given_up_after_ten_seconds() -> None:
    async def main() -> None:
        channel, peer = await opened()
        with pytest.raises(ChannelEndedError, match=r"^it does not answer$"):
            await channel.call("ping")
        assert clock.now() == 10.5
        assert peer.is_closed

    run(main)


def test_an_agent_that_does_not_answer_for_a_command_is_given_up_ten_seconds_after_the_commands_time() -> None:
    async def main() -> None:
        channel, _ = await opened()
        with pytest.raises(ChannelEndedError, match=r"^it does not answer$"):
            await channel.call("exec", timeout_s=30, keep_bytes=1)
        assert clock.now() == 40.5

    run(main)


def test_a_command_that_has_to_wait_for_its_turn_has_more_time() -> None:
    async def main() -> None:
        channel, _ = await opened()
        with pytest.raises(ChannelEndedError):
            await channel.call("shell", queue_s=100, timeout_s=30, keep_bytes=1)
        assert clock.now() == 140.5

    run(main)


def test_a_transfer_may_take_long_as_long_as_something_comes() -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def dribble() -> None:
                await peer.heard()
                for _ in range(20):
                    await anyio.sleep(9)
                    peer.say({"id": 1, "of": "data"}, b"x")

            tasks.start_soon(dribble)
            with pytest.raises(ChannelEndedError, match="does not answer"):
                await channel.call("read", path="x", max_bytes=100)
        assert clock.now() == 20 * 9 + 10.5

    run(main)


def test_output_that_dribbles_in_does_not_lengthen_a_commands_time() -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def dribble() -> None:
                await peer.heard()
                for _ in range(5):
                    await anyio.sleep(5)
                    peer.say({"id": 1, "of": "out"}, b"x")

            tasks.start_soon(dribble)
            with pytest.raises(ChannelEndedError, match="does not answer"):
                await channel.call("exec", timeout_s=3, keep_bytes=100)
        assert clock.now() >= 13.5

    run(main)


def test_a_cancelled_command_is_cancelled_inside_and_waited_for() -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def end_it() -> None:
                await peer.heard()
                assert await peer.heard() == ({"id": 1, "cancel": True}, b"")
                await anyio.sleep(0.25)
                peer.say({"id": 1, "of": "out"}, b"late")
                peer.say({"id": 1, "end": True, "code": -9})

            tasks.start_soon(end_it)
            with anyio.move_on_after(3):
                await channel.call("exec", timeout_s=100, keep_bytes=100)
            assert clock.now() == 3.25
        assert not channel.is_ended
        channel.close()

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


def test_cancelling_is_not_held_up_by_a_stream_that_takes_nothing() -> None:
    async def main() -> None:
        channel, peer = await opened()
        peer.take_nothing()
        with anyio.move_on_after(3):
            await channel.call("write", feed=b"x" * 1000, path="x")
        assert clock.now() == 5
        channel.close()

    run(main)


def test_a_cancelled_question_is_not_waited_for_and_its_late_answer_is_nobodys() -> None:
    async def main() -> None:
        channel, peer = await opened()
        with anyio.move_on_after(3):
            await channel.call("ping")
        assert clock.now() == 3
        peer.say({"id": 1, "end": True})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: channel.call("ping"))
            assert (await peer.heard())[0]["id"] == 1
            assert (await peer.heard())[0] == {"id": 1, "cancel": True}
            assert (await peer.answer(do="ping"))["id"] == 2
        channel.close()

    run(main)


def test_who_takes_pieces_slowly_makes_the_box_wait_and_loses_nothing() -> None:
    async def main() -> None:
        channel, peer = await opened()
        piece = b"x" * 65536
        call = await channel.start("pack", path="x", max_bytes=100 << 20)
        for number in range(100):
            peer.say({"id": 1, "of": "data"}, piece)
            if number == 50:
                await anyio.sleep(100)  # nothing is overdue while it is we who do not read
        peer.say({"id": 1, "end": True})
        waiting = peer.unread
        assert 80 <= waiting <= 85  # 1 MiB and one piece were taken in
        taken = 0
        while (got := await call.receive()) is not None:
            assert got == ("data", piece)
            taken += 1
        assert taken == 100
        channel.close()

    run(main)


def test_leaving_a_call_in_the_middle_lets_the_others_go_on() -> None:
    async def main() -> None:
        channel, peer = await opened()
        call = await channel.start("pack", path="x", max_bytes=100 << 20)
        for _ in range(40):
            peer.say({"id": 1, "of": "data"}, b"x" * 65536)
        await anyio.sleep(0.1)
        await call.leave()
        peer.say({"id": 1, "end": True})
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(lambda: channel.call("ping"))
            assert (await peer.heard())[0]["do"] == "pack"
            assert (await peer.heard())[0] == {"id": 1, "cancel": True}
            await peer.answer(do="ping")
        channel.close()

    run(main)


def test_what_is_sent_into_a_forwarded_connection_waits_for_its_window() -> None:
    async def main() -> None:
        channel, peer = await opened()
        call = await channel.start("forward", port=80)
        peer.say({"id": 1, "of": "open"})
        assert await call.receive() == ("open", b"")
        call.disarm()
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(call.send_within_window, b"y" * (300 << 10))
            await anyio.sleep(100)
            assert peer.unheard == 1 + 4  # the call, and 256 KiB
            peer.say({"id": 1, "ack": 65536})
        assert peer.unheard == 1 + 5
        channel.close()

    run(main)


def test_a_box_that_ignores_the_window_of_a_forwarded_connection_is_ended() -> None:
    async def main() -> None:
        channel, peer = await opened()
        call = await channel.start("forward", port=80)
        peer.say({"id": 1, "of": "open"})
        for _ in range(4):
            peer.say({"id": 1, "of": "data"}, b"x" * 65536)
        await anyio.sleep(1)
        assert not channel.is_ended
        await call.acknowledge(65536)
        peer.say({"id": 1, "of": "data"}, b"x" * 65536)
        peer.say({"id": 1, "of": "data"}, b"x")
        await channel.ended()
        assert str(channel.reason) == "broken frame: 'data' exceeds the requested size"

    run(main)


def test_a_connection_opens_once() -> None:
    async def main() -> None:
        channel, peer = await opened()
        await channel.start("forward", port=80)
        peer.say({"id": 1, "of": "open"})
        peer.say({"id": 1, "of": "open"})
        await channel.ended()
        assert str(channel.reason) == "broken frame: 'open' exceeds the requested size"

    run(main)
