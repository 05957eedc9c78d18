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


def write_some(inside: socket.socket, content: bytes) -> bytes:
    """Write as much as fits without blocking, and return the rest."""
    try:
        while content:
            content = content[inside.send(content) :]
    except BlockingIOError:
        pass
    return content


def test_the_agent_sends_at_most_one_window_until_it_is_acknowledged(sandbox: Client) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(20)
        number = sandbox.start("forward", port=listener.getsockname()[1])
        assert sandbox.next(number) == ({"id": number, "of": "open"}, b"")
        inside, _ = listener.accept()
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
