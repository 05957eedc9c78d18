"""The relay that runs inside a sandbox with an allowlist and forwards HTTP clients to the proxy on the host.

It listens at the address in ``HTTP_PROXY`` and joins each client with a connection that the proxy has opened to the
relay. Only the proxy opens connections between proxy and relay, so the sandbox can reach nothing on the host. The
sandbox's own Python runs this file, so the file uses only Python 3.8 and the standard library.
"""

from __future__ import annotations

import asyncio
import os
import sys

_PIECE_BYTES = 1 << 16
_MOST_WAITING = 128
"""Maximum number of clients that wait for a connection from the host; the relay disconnects further clients."""


class Connection:
    """An open connection: the stream to read from, and the stream to write to."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    async def copy_to(self, target: Connection) -> None:
        """Send everything that arrives here to `target`, then the end."""
        while True:
            piece = await self.reader.read(_PIECE_BYTES)
            if not piece:
                break
            target.writer.write(piece)
            await target.writer.drain()
        target.writer.write_eof()


class Relay:
    """Joins each client in the sandbox with an idle connection from the host."""

    def __init__(self) -> None:
        self._idle: list[Connection] = []
        self._waiting: list[Connection] = []
        self._joined: set[asyncio.Future[None]] = set()

    async def serve(self, path: str, port: int) -> None:
        """Serve clients at `port` on 127.0.0.1, and the host at the Unix socket `path`. Never returns."""
        clients = await asyncio.start_server(self._on_client, "127.0.0.1", port)
        # Create this socket last, because its file signals that the relay is ready.
        await asyncio.start_unix_server(self._on_host, path)
        await clients.serve_forever()

    async def _on_client(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if len(self._waiting) < _MOST_WAITING:
            self._waiting.append(Connection(reader, writer))
            self._match()
        else:
            writer.close()

    async def _on_host(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0)  # if the host has closed the connection already, the loop reads its end now
        self._idle.append(Connection(reader, writer))
        self._match()

    def _match(self) -> None:
        # The host never sends first. An idle connection that has ended was closed by the host.
        for ours in [one for one in self._idle if one.reader.at_eof()]:
            self._idle.remove(ours)
            ours.writer.close()
        while self._idle and self._waiting:
            joined = asyncio.ensure_future(_join(self._idle.pop(0), self._waiting.pop(0)))
            self._joined.add(joined)  # the event loop holds only a weak reference
            joined.add_done_callback(self._joined.discard)


async def _join(one: Connection, other: Connection) -> None:
    """Copy bytes both ways until both directions have ended or one side is gone."""
    try:
        await asyncio.gather(one.copy_to(other), other.copy_to(one))
    except OSError:
        pass
    finally:
        one.writer.close()
        other.writer.close()


if __name__ == "__main__":
    if os.path.lexists(sys.argv[1]):
        os.unlink(sys.argv[1])
    asyncio.run(Relay().serve(sys.argv[1], int(sys.argv[2])))
