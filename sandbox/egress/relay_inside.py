"""The relay that runs inside a sandbox with an allowlist and forwards HTTP clients to the proxy on the host.

It listens at the address in ``HTTP_PROXY`` and joins each client with a connection that the proxy has opened to the
relay. Only the proxy opens connections between proxy and relay, so the sandbox can reach nothing on the host. The
sandbox's own Python runs this file, so the file uses only Python 3.7 and the standard library.
"""

from __future__ import annotations

import os
import selectors
import socket
import sys

_PIECE_BYTES = 1 << 16
_MOST_WAITING = 128
"""Maximum number of clients that wait for a connection from the host; the relay disconnects further clients."""


class Switch:
    """Joins each client in the sandbox with an idle connection from the host.

    Args:
        path: Path of the Unix socket that the host connects to.
        port: TCP port on 127.0.0.1 that clients connect to.
    """

    def __init__(self, path: str, port: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._idle: list[socket.socket] = []
        self._waiting: list[socket.socket] = []
        if os.path.lexists(path):
            os.unlink(path)
        self._listen(socket.socket(socket.AF_INET), ("127.0.0.1", port), self._on_client)
        # Create this socket last, because its file signals that the relay is ready.
        self._listen(socket.socket(socket.AF_UNIX), path, self._on_host)

    def run(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if self._selector.get_map().get(key.fd) is key:  # An earlier event may have closed this socket.
                    key.data(key.fileobj)

    def _listen(self, listener: socket.socket, address: object, on_connection: object) -> None:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)  # type: ignore[arg-type]
        listener.listen(_MOST_WAITING)
        listener.setblocking(False)
        self._selector.register(listener, selectors.EVENT_READ, on_connection)

    def _on_client(self, listener: socket.socket) -> None:
        client = _accepted(listener)
        if client is not None and len(self._waiting) < _MOST_WAITING:
            self._waiting.append(client)
            self._match()
        elif client is not None:
            client.close()

    def _on_host(self, listener: socket.socket) -> None:
        ours = _accepted(listener)
        if ours is not None:
            self._idle.append(ours)
            self._selector.register(ours, selectors.EVENT_READ, self._on_idle)
            self._match()

    def _on_idle(self, ours: socket.socket) -> None:
        """Close an idle connection that became readable: the host never sends first, so the host has closed it."""
        self._selector.unregister(ours)
        self._idle.remove(ours)
        ours.close()

    def _match(self) -> None:
        while self._idle and self._waiting:
            ours = self._idle.pop(0)
            self._selector.unregister(ours)
            if _is_silent(ours):
                Pair(self._selector, ours, self._waiting.pop(0))
            else:  # The host has closed the connection, but `_on_idle` has not run yet.
                ours.close()


class Pair:
    """Copies bytes both ways between two sockets."""

    def __init__(self, selector: selectors.BaseSelector, one: socket.socket, other: socket.socket) -> None:
        self._selector = selector
        self._other = {one: other, other: one}
        self._taken = {one: b"", other: b""}  # bytes read from the socket and not yet sent to the other one
        self._ended = {one: False, other: False}
        for end in self._other:
            selector.register(end, selectors.EVENT_READ, self._on_event)

    def _on_event(self, end: socket.socket) -> None:
        try:
            for source in self._other:
                self._move(source)
        except OSError:
            self._close()
            return
        if all(self._ended.values()) and not any(self._taken.values()):
            self._close()
        else:
            self._watch()

    def _move(self, source: socket.socket) -> None:
        target = self._other[source]
        try:
            if not self._taken[source] and not self._ended[source]:
                self._taken[source] = source.recv(_PIECE_BYTES)
                self._ended[source] = not self._taken[source]
                if self._ended[source]:
                    target.shutdown(socket.SHUT_WR)
            if self._taken[source]:
                self._taken[source] = self._taken[source][target.send(self._taken[source]) :]
        except BlockingIOError:
            pass

    def _watch(self) -> None:
        for end, other in self._other.items():
            mask = 0 if self._taken[end] or self._ended[end] else selectors.EVENT_READ
            mask |= selectors.EVENT_WRITE if self._taken[other] else 0
            if end in self._selector.get_map():
                self._selector.unregister(end)
            if mask:
                self._selector.register(end, mask, self._on_event)

    def _close(self) -> None:
        for end in self._other:
            if end in self._selector.get_map():
                self._selector.unregister(end)
            end.close()


def _is_silent(stream: socket.socket) -> bool:
    """Whether `stream` is open and has no data to read."""
    try:
        stream.recv(1, socket.MSG_PEEK)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def _accepted(listener: socket.socket) -> socket.socket | None:
    try:
        found, _ = listener.accept()
    except OSError:
        return None
    found.setblocking(False)
    return found


if __name__ == "__main__":
    Switch(sys.argv[1], int(sys.argv[2])).run()
