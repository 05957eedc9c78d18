"""The agent as a plain process, and a small blocking client that exchanges frames with it."""

from __future__ import annotations

import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from envkit.sandbox import agent

Frame = tuple[dict[str, Any], bytes]
TIMEOUT_S = 20.0
"""How long an answer may take before it counts as hanging."""


@dataclass
class Answer:
    """The whole answer to one call."""

    end: dict[str, Any] = field(default_factory=dict)
    out: bytes = b""
    err: bytes = b""
    data: bytes = b""

    def __getitem__(self, name: str) -> Any:
        return self.end[name]


class Client:
    """One channel to an agent that has sent its hello."""

    def __init__(self, line: socket.socket, process: subprocess.Popen[bytes] | None = None) -> None:
        line.settimeout(TIMEOUT_S)
        self.line = line
        self.process = process
        self._buffer = bytearray()
        self._last = 0
        self._waiting: dict[int, list[Frame]] = {}
        self.hello = self.frame()[0]

    @property
    def pid(self) -> int:
        assert self.process is not None
        return self.process.pid

    def send(self, header: Mapping[str, Any], body: bytes = b"") -> None:
        self.line.sendall(encoded(header, body))

    def frame(self) -> Frame:
        """Return the next frame; raises `EOFError` at the end."""
        head = self._take(8)
        header_bytes, body_bytes = struct.unpack(">II", head)
        assert body_bytes <= 1 << 16
        return json.loads(self._take(header_bytes)), self._take(body_bytes)

    def start(self, do: str, **fields: Any) -> int:
        """Make a call and return its number."""
        self._last += 1
        self.send({"id": self._last, "do": do, **fields})
        return self._last

    def feed(self, number: int, content: bytes, *, end: bool = True) -> None:
        for at in range(0, len(content), 1 << 16):
            self.send({"id": number, "more": True}, content[at : at + (1 << 16)])
        if end:
            self.send({"id": number, "eof": True})

    def next(self, number: int) -> Frame:
        """Return the next frame of a call, and keep those of others."""
        while True:
            waiting = self._waiting.get(number)
            if waiting:
                return waiting.pop(0)
            header, body = self.frame()
            self._waiting.setdefault(header["id"], []).append((header, body))

    def waiting(self, number: int) -> int:
        """Return the number of frames of a call that were received and not taken."""
        return len(self._waiting.get(number, ()))

    def answer(self, number: int) -> Answer:
        """Return all of the answer to a call."""
        found = Answer()
        while True:
            header, body = self.next(number)
            if "of" in header:
                kind = header["of"]
                setattr(found, kind, getattr(found, kind) + body)
            elif "end" in header or "error" in header:
                found.end = header
                return found

    def call(self, do: str, *, feed: bytes | None = None, **fields: Any) -> Answer:
        number = self.start(do, **fields)
        if feed is not None:
            self.feed(number, feed)
        return self.answer(number)

    def exec(self, *argv: str, timeout_s: float = 10, keep_bytes: int = 1 << 20, **fields: Any) -> Answer:
        return self.call("exec", argv=list(argv), timeout_s=timeout_s, keep_bytes=keep_bytes, **fields)

    def sh(self, script: str, **fields: Any) -> Answer:
        return self.exec("sh", "-c", script, **fields)

    def shell(self, command: str, *, name: str = "main", timeout_s: float = 10, **fields: Any) -> Answer:
        fields.setdefault("keep_bytes", 1 << 20)
        return self.call("shell", name=name, command=command, timeout_s=timeout_s, **fields)

    def is_at_end(self) -> bool:
        """Whether the agent closes the channel without another frame."""
        try:
            self.frame()
        except (EOFError, ConnectionError):
            return True
        return False

    def _take(self, count: int) -> bytes:
        while len(self._buffer) < count:
            piece = self.line.recv(1 << 18)
            if not piece:
                raise EOFError("the agent closed the channel")
            self._buffer += piece
        taken = bytes(self._buffer[:count])
        del self._buffer[:count]
        return taken


def encoded(header: Mapping[str, Any], body: bytes = b"") -> bytes:
    text = json.dumps(header).encode()
    return struct.pack(">II", len(text), len(body)) + text + body


def config(work: Path, **settings: Any) -> dict[str, Any]:
    env = {"PATH": os.environ["PATH"], "HOME": str(work)}
    return {"agent_uid": None, "grader_uid": None, "env": env, "work": str(work), **settings}


@contextmanager
def started(
    work: Path, *, python: str = sys.executable, prefix: Sequence[str] = (), **settings: Any
) -> Iterator[Client]:
    """Start an agent in `work`, and end it after the block."""
    ours, theirs = socket.socketpair()
    with ours:
        process = subprocess.Popen(
            [*prefix, *agent.command(python)],
            stdin=theirs.fileno(),
            stdout=theirs.fileno(),
            stderr=subprocess.PIPE,
            env={},
        )
        with process, theirs:
            try:
                theirs.close()
                ours.sendall(agent.opening())
                client = Client(ours, process)
                client.send({"config": config(work, **settings)})
                yield client
            finally:
                ours.close()
                try:
                    process.wait(TIMEOUT_S)
                finally:
                    process.kill()
