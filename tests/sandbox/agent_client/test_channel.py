"""The channel to an agent: each call gets its own answer, invalid frames end it, and no call waits for ever."""

from __future__ import annotations

import socket
import struct
from collections.abc import AsyncIterator

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.sandbox.agent_client.channel import AgentChannel, ChannelEndedError, RefusedCallError, SocketStream
from tests.sandbox.agent_client.peer import HELLO, Peer, frame, opened, run

OTHER_VERSION = (
    "broken frame: hello 1 instead of hello 3: another version of envkit started this sandbox; "
    "use that version, or start a new sandbox"
)


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        ({"hello": 1}, OTHER_VERSION),
        ({"hello": True}, "broken frame: a first frame that is not hello 3"),
        ({"id": 1, "end": True}, "broken frame: a first frame that is not hello 3"),
        (None, "not ready after 5 s"),
    ],
)
def test_a_missing_or_invalid_hello_ends_the_channel(first: object, reason: str) -> None:
    async def main() -> None:
        peer = Peer()
        channel = AgentChannel(peer)
        if first is not None:
            peer.emit(first)
        with pytest.raises(ChannelEndedError, match=f"^{reason}$"):
            await channel.open({}, 5)
        assert peer.is_closed

    run(main)


@pytest.mark.parametrize("size", [1, 7])
def test_frames_may_be_split_anywhere(size: int) -> None:
    async def main() -> None:
        channel, peer = await opened()
        content = bytes(range(256)) * 4
        answer = frame({"id": 1, "of": "data"}, content) + frame({"id": 1, "end": True})

        async def trickle() -> None:
            await peer.next_frame()
            for start in range(0, len(answer), size):
                peer.emit_bytes(answer[start : start + size])
                await anyio.lowlevel.checkpoint()

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(trickle)
            assert (await channel.call("read", path="x", max_bytes=1024)).data == content
        channel.close()

    run(main)


def test_no_input_is_sent_after_the_answer() -> None:
    async def main() -> None:
        channel, peer = await opened()

        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(100):
                yield b"x"
                await anyio.sleep(1)

        async with anyio.create_task_group() as tasks:

            async def refuse() -> None:
                await peer.next_frame()
                await anyio.sleep(2.5)
                peer.emit({"id": 1, "error": "refused", "text": "disk\nfull\x1b"})

            tasks.start_soon(refuse)
            with pytest.raises(RefusedCallError, match=r"^refused: disk full$"):
                await channel.call("write", feed=pieces(), path="x")
        assert clock.now() == 3
        assert peer.pending_frames == 3
        channel.close()

    run(main)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (struct.pack(">II", (1 << 20) + 1, 0), "frame too large: header 1048577 bytes, body 0 bytes"),
        (frame(b""), "a header that is not JSON"),
        (frame(b'{"id": 1, "end": NaN}'), "a header that is not JSON"),
        (frame(b"[" * 100_000), "a header that is not JSON"),
        (frame(b'{"id":' * 5000 + b"1" + b"}" * 5000), "a header that is not JSON"),
        (frame([1, 2]), "a header that is not an object"),
        (frame({"id": 2, "end": True}), "a reply to an unknown call"),
        (frame({"id": True, "end": True}), "a reply to an unknown call"),
        (frame({"ending": "bored"}), "an unknown notice about the sandbox"),
        (frame({"ending": "exited"}, b"x"), "an unknown notice about the sandbox"),
        (frame({"id": 1, "end": 1}), "an unexpected header"),
        (frame({"id": 1, "end": True}, b"x"), "a body without 'of', the name of its output"),
        (frame({"id": 1, "error": 7, "text": "x"}), "an error without code and text"),
        (frame({"id": 1, "of": "out"}, b"x"), "an unexpected piece of 'out'"),
        (frame({"id": 1, "of": "data"}), "an empty piece"),
        (frame({"id": 1, "of": "data"}, b"x" * 11), "'data' exceeds the requested size"),
        (frame({"id": 1, "of": "data"}, b"x") * 11, "'data' exceeds the requested size"),
        (frame({"id": 1, "ack": 1}), "an acknowledgement of bytes that were not sent"),
        (frame({"id": 1, "eof": True}) * 2, "an unexpected header"),
        (frame({"id": 1, "eof": True}) + frame({"id": 1, "of": "data"}, b"x"), "an unexpected piece of 'data'"),
        (frame(HELLO), "a reply to an unknown call"),
    ],
)
def test_an_invalid_frame_ends_the_channel_and_is_named_as_the_reason(data: bytes, what: str) -> None:
    async def main() -> None:
        channel, peer = await opened()
        async with anyio.create_task_group() as tasks:

            async def misbehave() -> None:
                await peer.next_frame()
                peer.emit_bytes(data)

            tasks.start_soon(misbehave)
            with pytest.raises(ChannelEndedError) as caught:
                await channel.call("read", path="x", max_bytes=10)
        assert str(caught.value.reason).startswith(f"broken frame: {what}")
        assert channel.reason == caught.value.reason
        assert peer.is_closed
        with pytest.raises(ChannelEndedError):
            await channel.call("ping")

    run(main)


def test_a_header_that_arrives_byte_by_byte_costs_no_more_than_its_length() -> None:
    async def main() -> None:
        channel, peer = await opened()
        answer = frame({"id": 1, "error": "bad", "text": "x" * (1 << 16)})
        async with anyio.create_task_group() as tasks:

            async def trickle() -> None:
                await peer.next_frame()
                for byte in answer:
                    peer.emit_bytes(bytes([byte]))

            tasks.start_soon(trickle)
            began = clock.stopwatch()
            with pytest.raises(RefusedCallError, match=r"^bad: x{300}$"):
                await channel.call("ping")
        assert clock.stopwatch() - began < 5
        channel.close()

    run(main)


def test_a_broken_stream_ends_the_channel_on_send() -> None:
    async def main() -> None:
        channel, peer = await opened()
        peer.is_closed = True
        with pytest.raises(ChannelEndedError):
            await channel.call("ping")
        assert channel.is_ended

    run(main)


def test_a_sender_waits_for_a_receiver_and_fails_once_it_has_closed() -> None:
    async def main() -> None:
        ours, theirs = socket.socketpair()
        stream = await SocketStream.open(ours)
        with anyio.move_on_after(0.05) as limit:
            while True:
                await stream.send(b"x" * 500_000)
        assert limit.cancelled_caught
        theirs.close()
        with pytest.raises(ConnectionError):
            await stream.send(b"x")
        stream.close()

    run(main, virtual=False)
