"""A connection to a socket inside a box that is carried by the box's channel."""

from __future__ import annotations

import socket
from collections.abc import Coroutine
from contextlib import suppress
from typing import Any

import anyio

from envkit.sandbox.call import WINDOW_BYTES
from envkit.sandbox.channel import Call, Channel, ChannelEndedError, RefusedCallError, SocketStream
from envkit.types import JSON


async def connected(channel: Channel, **place: JSON) -> tuple[socket.socket, Coroutine[Any, Any, None]]:
    """Connect to a ``port`` or a ``socket``, named by its path, inside.

    Returns:
        One end of a pair of sockets, non-blocking, and what must run for as long as it is used.

    Raises:
        RefusedCallError: Nothing listens there.
        ChannelEndedError: The box is gone.
    """
    call = await channel.start("forward", **place)
    try:
        if await call.receive() != ("open", b""):
            raise channel.broken("a connection that is closed before it is open")
        call.disarm()
        ours, theirs = socket.socketpair()
    except BaseException:
        await call.leave()
        raise
    theirs.setblocking(False)
    return theirs, _pump(call, ours)


async def _pump(call: Call, ours: socket.socket) -> None:
    """Carry bytes both ways until both sides have ended, or one is gone."""
    stream = SocketStream(ours)
    try:
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(_carry_in, call, stream)
            await _carry_out(call, stream)
            if call.is_over:
                tasks.cancel_scope.cancel()
    finally:
        stream.close()
        await call.leave()


async def _carry_in(call: Call, stream: SocketStream) -> None:
    with suppress(ChannelEndedError):
        while data := await stream.receive():
            await call.send_within_window(data)
        await call.send({"eof": True})


async def _carry_out(call: Call, stream: SocketStream) -> None:
    taken = 0
    with suppress(ChannelEndedError, RefusedCallError, ConnectionError):
        while (piece := await call.receive()) is not None:
            await stream.send(piece[1])
            taken += len(piece[1])
            if taken >= WINDOW_BYTES // 4:
                await call.acknowledge(taken)
                taken = 0
        await stream.end()
        await call.over()
