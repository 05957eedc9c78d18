"""The WebSocket with raw frames, as a client in any language uses it."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import Any, TypeAlias

import anyio
import pytest
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import InvalidStatus

from envkit import clock
from envkit.http.api.dispatcher import Dispatcher
from envkit.http.api.session_operations import SessionOperations
from envkit.http.api.websocket import MAX_OWED, Sockets
from envkit.http.auth.caller import Caller
from envkit.http.protocol.asgi import Message
from envkit.http.protocol.messages import MAX_FRAMES
from envkit.http.sessions.table import SessionTable
from tests.http.envs import Lender, serving, slots

UPGRADE = (
    b"GET /v1/ws HTTP/1.1\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Version: 13\r\n"
    b"Sec-WebSocket-Key: AAAAAAAAAAAAAAAAAAAAAA==\r\n\r\n"
)
Main: TypeAlias = Callable[[ClientConnection], Awaitable[None]]
Json: TypeAlias = dict[str, Any]


def play(main: Main, *, capacity: int = 4, **settings: Any) -> None:
    """Run `main` with an open socket to a running server."""

    async def run() -> None:
        async with (
            slots(capacity) as host,
            serving(host, **settings) as address,
            connect(address.replace("http", "ws") + "/v1/ws", proxy=None) as socket,
        ):
            with anyio.fail_after(20):
                await main(socket)

    clock.run(run)


def frame(id: int | str, method: str, **params: Any) -> Json:
    return {"id": id, "method": method, "params": params}


async def ask(socket: ClientConnection, sent: object) -> list[Json]:
    """Send frames; return their answers sorted by id."""
    await socket.send(sent if isinstance(sent, (str, bytes)) else json.dumps(sent))
    count = len(sent) if isinstance(sent, list) else 1
    answers: list[Json] = []
    while len(answers) < count:
        message = json.loads(await socket.recv())
        answers += message if isinstance(message, list) else [message]
    return sorted(answers, key=lambda answer: str(answer["id"]))


COUNT = {"env_id": "Count-v0", "seed": 7}


def test_a_single_frame_is_answered_with_a_single_frame() -> None:
    async def main(socket: ClientConnection) -> None:
        await socket.send(json.dumps(frame("first", "create", session_id="a", **COUNT)))
        answer = json.loads(await socket.recv())
        assert (answer["id"], answer["result"]["observation"], answer["result"]["turn"]) == ("first", "seed 7", 0)

    play(main)


def test_frames_of_one_list_are_answered_together_even_if_some_fail() -> None:
    async def main(socket: ClientConnection) -> None:
        await ask(socket, [frame(1, "create", session_id="a", **COUNT), frame(2, "create", session_id="b", **COUNT)])
        await socket.send(
            json.dumps(
                [
                    frame(1, "step", session_id="a", turn=0, action="x"),
                    frame(2, "step", session_id="b", turn=5, action="x"),
                    frame(3, "step", session_id="nobody", turn=0, action="x"),
                    frame(4, "step", session_id="a", turn=1, action="y"),
                    frame(5, "step", session_id="a"),
                    {"id": 6},
                ]
            )
        )
        answers = json.loads(await socket.recv())
        assert [(one["id"], one["result"]["turn"] if "result" in one else one["error"]["type"]) for one in answers] == [
            (1, 1),
            (2, "step_order"),
            (3, "session_not_found"),
            (4, 2),
            (5, "bad_request"),
            (None, "bad_request"),
        ]
        assert answers[1]["error"]["turn"] == 0

    play(main)


def test_a_step_of_a_session_with_an_invalid_id_is_answered_with_not_found() -> None:
    async def main(socket: ClientConnection) -> None:
        wrong = frame(1, "step", session_id="no such: name", turn=0, action="x")
        alone = await ask(socket, wrong)
        among_others = await ask(socket, [wrong, frame(2, "health")])
        assert [one["error"]["type"] for one in (*alone, among_others[0])] == ["session_not_found"] * 2

    play(main)


def test_a_quick_answer_overtakes_a_slow_one() -> None:
    async def main(socket: ClientConnection) -> None:
        await ask(socket, frame(1, "create", session_id="slow", env_id="Sleeper-v0", seed=0))
        await socket.send(json.dumps(frame("slow", "step", session_id="slow", turn=0, action="sleep 0.2")))
        await socket.send(json.dumps(frame("quick", "health")))
        assert [json.loads(await socket.recv())["id"] for _ in range(2)] == ["quick", "slow"]

    play(main)


JUNK = [
    "",
    "null",
    "17",
    "{",
    '{"id":1}',
    '{"id":null,"method":"health"}',
    '{"id":[],"method":"health"}',
    '{"id":1,"method":7}',
    '{"id":1,"method":"sleep"}',
    '{"id":1,"method":"health","params":{"more":1}}',
    '{"id":1,"method":"delete","params":{"session_id":"never made"}}',
    '{"id":1,"method":"health","params":[]}',
    '{"id":1,"method":"health","params":null}',
    '{"id":1,"method":"step","params":{"session_id":"\\ud800","turn":0,"action":""}}',
    '{"id":1,"method":"create","params":{"session_id":"","env_id":"Count-v0","seed":0}}',
    '{"id":1,"method":"create","params":{"session_id":"a b","env_id":"Count-v0","seed":0}}',
    '{"id":1,"method":"create","params":' + "[" * 5000 + "]" * 5000 + "}",
    b"\xff\xfe",
    b"\x00",
]


def test_junk_is_answered_with_a_bad_request_and_keeps_the_socket_open() -> None:
    async def main(socket: ClientConnection) -> None:
        for junk in JUNK:
            (answer,) = await ask(socket, junk)
            assert answer["error"]["type"] == "bad_request", junk
            (answer,) = await ask(socket, frame(2, "health"))
            assert answer["result"]["status"] == "alive", junk

    play(main)


def test_a_frame_that_is_too_large_is_refused_alone() -> None:
    async def main(socket: ClientConnection) -> None:
        large = frame(1, "step", session_id="a", turn=0, action="x" * 3000)
        answers = await ask(socket, [large, frame(2, "health")])
        assert [one["error"]["type"] if "error" in one else one["result"]["status"] for one in answers] == [
            "too_large",
            "alive",
        ]

    play(main, max_request_bytes=2000)


def test_a_message_of_too_many_frames_is_refused_as_a_whole() -> None:
    async def main(socket: ClientConnection) -> None:
        assert len(await ask(socket, [frame(1, "health")] * MAX_FRAMES)) == MAX_FRAMES
        await socket.send(json.dumps([frame(1, "health")] * (MAX_FRAMES + 1)))
        refused = json.loads(await socket.recv())
        assert (refused["id"], refused["error"]["type"]) == (None, "bad_request")
        assert refused["error"]["detail"] == "too many frames in a message: 1001 (limit 1000); send fewer"

    play(main)


def test_a_paused_socket_loses_no_message() -> None:
    messages = 3 * MAX_OWED // MAX_FRAMES

    async def main() -> tuple[int, int]:
        answered = waiting = 0
        sender, receiver = anyio.create_memory_object_stream[Message](messages + 2)
        sender.send_nowait({"type": "websocket.connect"})
        for _ in range(messages):
            sender.send_nowait({"type": "websocket.receive", "text": json.dumps([frame(1, "health")] * MAX_FRAMES)})

        async def send(message: Message) -> None:
            nonlocal answered, waiting
            if message["type"] == "websocket.accept":
                return
            await anyio.sleep(1)
            waiting = waiting or receiver.statistics().current_buffer_used
            answers = json.loads(message["bytes"])
            answered += len(answers) if isinstance(answers, list) else 1
            if answered == messages * MAX_FRAMES:
                sender.send_nowait({"type": "websocket.disconnect", "code": 1000})

        async with SessionTable(slots()) as sessions, anyio.create_task_group() as tasks, sender, receiver:
            dispatcher = Dispatcher(SessionOperations(sessions, tuple), slow_s=1, max_request_bytes=1 << 20)
            with anyio.fail_after(1000):
                await Sockets(dispatcher, tasks, 1 << 20).serve(Caller("acme"), receiver.receive, send)
        return answered, waiting

    answered, waiting = clock.run(main, virtual=True)
    assert answered == messages * MAX_FRAMES
    assert waiting > 0  # it was paused


def test_a_socket_on_another_path_is_refused() -> None:
    async def run() -> int:
        async with slots() as host, serving(host) as address:
            with pytest.raises(InvalidStatus) as caught:
                await connect(address.replace("http", "ws") + "/v2/ws", proxy=None)
        return caught.value.response.status_code

    assert clock.run(run) == 403


def test_sessions_and_running_steps_survive_their_socket() -> None:
    async def run() -> None:
        lender = Lender(slots())
        async with serving(lender) as address:
            url = address.replace("http", "ws") + "/v1/ws"
            async with connect(url, proxy=None) as socket:
                await ask(socket, frame(1, "create", session_id="a", env_id="Sleeper-v0", seed=0))
                await socket.send(json.dumps(frame(2, "step", session_id="a", turn=0, action="sleep 0.1")))
                await ask(socket, frame(3, "health"))
            assert lender.open == 1
            async with connect(url, proxy=None) as socket:
                (answer,) = await ask(socket, frame(1, "step", session_id="a", turn=0, action="sleep 0.1"))
                assert answer["result"]["observation"] == "1 slept"

    clock.run(run)


def test_an_open_socket_keeps_its_sessions_and_a_closed_one_does_not() -> None:
    async def run() -> None:
        async with slots() as host, serving(host, ttl_s=0.5) as address:
            url = address.replace("http", "ws") + "/v1/ws"
            async with connect(url, proxy=None) as monitor:
                async with connect(url, proxy=None) as socket:
                    await ask(socket, frame(1, "create", session_id="a", **COUNT))
                    await anyio.sleep(1.5)
                    (answer,) = await ask(monitor, frame(1, "session", session_id="a"))
                    assert answer["result"]["state"] == "ready"
                with anyio.fail_after(5):
                    while "result" in (await ask(monitor, frame(1, "session", session_id="a")))[0]:
                        pass  # inspecting a session does not renew it

    clock.run(run)


def test_a_client_that_never_reads_is_paused_and_can_disconnect() -> None:
    async def run() -> None:
        async with slots() as host, serving(host, ttl_s=0.5) as address:
            url = address.replace("http", "ws") + "/v1/ws"
            async with connect(url, proxy=None) as monitor:
                stalled = await connect(url, proxy=None, max_queue=1)
                await stalled.send(json.dumps(frame(0, "create", session_id="a", **COUNT)))
                many = json.dumps([frame("x" * 2000, "step")] * MAX_FRAMES)
                with anyio.move_on_after(2) as scope:
                    for _ in range(30):
                        await stalled.send(many)
                assert scope.cancelled_caught
                (answer,) = await ask(monitor, frame(1, "session", session_id="a"))
                assert answer["result"]["state"] == "ready"
                stalled.transport.abort()
                with anyio.fail_after(20):
                    while "result" in (await ask(monitor, frame(1, "session", session_id="a")))[0]:
                        pass  # while its socket is served, the session is kept

    clock.run(run)


def test_only_a_socket_that_answers_pings_remains_open() -> None:
    async def main() -> None:
        async with slots() as host, serving(host) as address:
            port = int(address.rpartition(":")[2])
            async with (
                await anyio.connect_tcp("127.0.0.1", port) as silent,
                await anyio.connect_tcp("127.0.0.1", port) as idle,
                anyio.create_task_group() as tasks,
            ):
                for stream in (silent, idle):
                    await stream.send(UPGRADE)
                    assert (await stream.receive()).startswith(b"HTTP/1.1 101")

                async def answer_pings() -> None:
                    while True:
                        ping = await idle.receive()
                        assert ping[:2] == b"\x89\x04"
                        await idle.send(b"\x8a\x84\0\0\0\0" + ping[2:6])

                tasks.start_soon(answer_pings)
                with suppress(anyio.EndOfStream):
                    while True:
                        await silent.receive()
                assert 120 < clock.now() < 160
                await anyio.sleep(300)
                tasks.cancel_scope.cancel()

    clock.run(main, virtual=True)


@pytest.mark.parametrize("message", ["[]", "[1]", "{}"])
def test_empty_messages_do_no_harm(message: str) -> None:
    async def main(socket: ClientConnection) -> None:
        await socket.send(message)
        await socket.send(json.dumps(frame(1, "health")))
        while "alive" not in json.dumps(json.loads(await socket.recv())):
            pass

    play(main)
