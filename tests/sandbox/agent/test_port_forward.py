"""The agent forwards connections to servers in the sandbox, one window at a time."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.sandbox.agent.agent_process import Client, started

WINDOW = 256 << 10


@pytest.fixture
def sandbox(tmp_path: Path) -> Iterator[Client]:
    with started(tmp_path) as client:
        yield client


@pytest.fixture(params=["port", "socket"])
def server(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[socket.socket, dict[str, object]]]:
    """A listening socket, and how a call names it."""
    if request.param == "port":
        listener = socket.create_server(("127.0.0.1", 0))
        target: dict[str, object] = {"port": listener.getsockname()[1]}
    else:
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        target = {"socket": str(tmp_path / "s")}
    listener.settimeout(20)
    with listener:
        yield listener, target


def opened(sandbox: Client, target: dict[str, object], listener: socket.socket) -> tuple[int, socket.socket]:
    number = sandbox.start("forward", **target)
    assert sandbox.next(number) == ({"id": number, "of": "open"}, b"")
    inside, _ = listener.accept()
    inside.settimeout(20)
    return number, inside


def write_some(inside: socket.socket, content: bytes) -> bytes:
    """Write as much as fits without blocking, and return the rest."""
    try:
        while content:
            content = content[inside.send(content) :]
    except BlockingIOError:
        pass
    return content


def test_bytes_go_both_ways_and_each_direction_closes_separately(
    sandbox: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(sandbox, server[1], server[0])
    with inside:
        sandbox.send({"id": number, "more": True}, b"to the server")
        assert inside.recv(100) == b"to the server"
        assert sandbox.next(number)[0] == {"id": number, "ack": 13}
        inside.sendall(b"back")
        assert sandbox.next(number) == ({"id": number, "of": "data"}, b"back")
        sandbox.send({"id": number, "eof": True})
        assert inside.recv(100) == b""
        inside.sendall(b"last")
        assert sandbox.next(number)[1] == b"last"
    assert sandbox.next(number)[0] == {"id": number, "eof": True}
    assert sandbox.next(number)[0] == {"id": number, "end": True}


def test_the_agent_sends_at_most_one_window_until_it_is_acknowledged(
    sandbox: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(sandbox, server[1], server[0])
    content = bytes(range(256)) * 8192
    inside.setblocking(False)
    received, unsent = b"", write_some(inside, content)
    while len(received) < WINDOW:
        unsent = write_some(inside, unsent)
        received += sandbox.next(number)[1]
    for _ in range(3):
        unsent = write_some(inside, unsent)
        assert sandbox.call("ping")["end"] is True
    assert (len(received), sandbox.waiting(number)) == (WINDOW, 0)
    sandbox.send({"id": number, "ack": WINDOW})
    while len(received) < len(content):
        unsent = write_some(inside, unsent)
        frame = sandbox.next(number)
        received += frame[1]
        sandbox.send({"id": number, "ack": len(frame[1])})
    assert received == content
    inside.close()
    frame = sandbox.next(number)
    assert frame[0] == {"id": number, "eof": True}
    sandbox.send({"id": number, "eof": True})
    assert sandbox.next(number)[0] == {"id": number, "end": True}


def test_all_data_that_the_server_reads_is_acknowledged(
    sandbox: Client, server: tuple[socket.socket, dict[str, object]]
) -> None:
    number, inside = opened(sandbox, server[1], server[0])
    with inside:
        content = bytes(8 << 20)
        sandbox.feed(number, content)
        received = acknowledged = 0
        while received < len(content):
            received += len(inside.recv(1 << 20))
        assert inside.recv(1) == b""
    while "end" not in (header := sandbox.next(number)[0]):
        acknowledged += header.get("ack", 0)
    assert acknowledged == len(content)


def test_a_port_or_socket_without_a_listener_is_unreachable(sandbox: Client, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        port = closed.getsockname()[1]
    assert sandbox.call("forward", port=port)["error"] == "unreachable"
    assert sandbox.call("forward", socket=str(tmp_path / "none"))["error"] == "unreachable"
    assert sandbox.call("forward", socket="/" + "x" * 200)["error"] in ("unreachable", "bad")


def test_a_cancelled_connection_is_closed(sandbox: Client, server: tuple[socket.socket, dict[str, object]]) -> None:
    number, inside = opened(sandbox, server[1], server[0])
    with inside:
        sandbox.send({"id": number, "cancel": True})
        assert inside.recv(1) == b""
    assert sandbox.answer(number)["end"] is True
