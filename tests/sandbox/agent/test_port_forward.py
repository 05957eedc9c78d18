"""The agent forwards connections to servers inside, a window at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started

WINDOW = 256 << 10


@pytest.fixture
def box(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


@pytest.fixture(params=["port", "socket"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, object]]]:
    """A listening socket, and how a call names it."""
    if request.param == "port":
        listener = socket.create_server(("127.0.0.1", 0))
        place: dict[str, object] = {"port": listener.getsockname()[1]}
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        place = {"socket": str(tmp_path / "s")}
    listener.settimeout(20)
    with listener:
        yield listener, place


def opened(box: Client, place: dict[str, object], listener: socket.socket) -> tuple[int, socket.socket]:
    number = box.start("forward", **place)
    assert box.next(number) == ({"id": number, "of": "open"}, b"")
    inside, _ = listener.accept()
    inside.settimeout(20)
    return number, inside


def write_some(inside: socket.socket, content: bytes) -> bytes:
    """Write what can be written at once, and return the rest."""
    try:
        while content:
            content = content[inside.send(content) :]
    except BlockingIOError:
        pass
    return content


def test_bytes_go_both_ways_and_each_way_ends_by_itself(
    box: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(box, server[1], server[0])
    with inside:
        box.send({"id": number, "more": True}, b"to the server")
        assert inside.recv(100) == b"to the server"
        assert box.next(number)[0] == {"id": number, "ack": 13}
        inside.sendall(b"back")
        assert box.next(number) == ({"id": number, "of": "data"}, b"back")
        box.send({"id": number, "eof": True})
        assert inside.recv(100) == b""
        inside.sendall(b"last")
        assert box.next(number)[1] == b"last"
    assert box.next(number)[0] == {"id": number, "eof": True}
    assert box.next(number)[0] == {"id": number, "end": True}


def test_no_more_is_sent_than_the_window_until_it_is_acknowledged(
    box: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(box, server[1], server[0])
    content = bytes(range(256)) * 8192
    inside.setblocking(False)
    received, unsent = b"", write_some(inside, content)
    while len(received) < WINDOW:
        unsent = write_some(inside, unsent)
        received += box.next(number)[1]
    for _ in range(3):
        unsent = write_some(inside, unsent)
        assert box.call("ping")["end"] is True
    assert (len(received), box.waiting(number)) == (WINDOW, 0)
    box.send({"id": number, "ack": WINDOW})
    while len(received) < len(content):
        unsent = write_some(inside, unsent)
        frame = box.next(number)
        received += frame[1]
        box.send({"id": number, "ack": len(frame[1])})
    assert received == content
    inside.close()
    frame = box.next(number)
    assert frame[0] == {"id": number, "eof": True}
    box.send({"id": number, "eof": True})
    assert box.next(number)[0] == {"id": number, "end": True}


def test_a_server_that_does_not_read_is_not_acknowledged(
    box: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(box, server[1], server[0])
    with inside:
        content = bytes(8 << 20)
        box.feed(number, content)
        received = acknowledged = 0
        while received < len(content):
            received += len(inside.recv(1 << 20))
        assert inside.recv(1) == b""
    while "end" not in (header := box.next(number)[0]):
        acknowledged += header.get("ack", 0)
    assert acknowledged == len(content)


def test_where_nobody_listens_is_unreachable(box: Client, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert box.call("forward", port=port)["error"] == "unreachable"
    assert box.call("forward", socket=str(tmp_path / "none"))["error"] == "unreachable"
    assert box.call("forward", socket="/" + "x" * 200)["error"] in ("unreachable", "bad")


def test_a_cancelled_connection_is_closed(box: Client, server: tuple[socket.socket, dict[str, object]]) -> None:
    number, inside = opened(box, server[1], server[0])
    with inside:
        box.send({"id": number, "cancel": True})
        assert inside.recv(1) == b""
    assert box.answer(number)["end"] is True
