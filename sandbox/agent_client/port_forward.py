"""Connects to a socket inside a sandbox, over the channel to the sandbox's agent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable, Coroutine
from contextlib import suppress
from typing import Any

import anyio

from envkit.types import JSON

from .call import WINDOW_BYTES
from .channel import AgentChannel, Call, ChannelEndedError, RefusedCallError, SocketStream


async def connected(
    channel: AgentChannel, start_task: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]], **address: JSON
) -> socket.socket:
    """Connect to a socket inside the sandbox; return a socket of the host through which to reach the server.

    Raises:
        RefusedCallError: No server listens at the address.
        ChannelEndedError: The sandbox is gone.
    """
    call = await channel.start("forward", address)
    try:
        if await call.receive() != ("open", b""):
            raise channel.broken("a connection that closed before it opened")
        call.disarm()
        ours, theirs = socket.socketpair()
    except BaseException:
        await call.leave()
        raise
    theirs.setblocking(False)
    pump = start_task(_pump(call, ours))
    # Close `ours` in a callback, because the callback runs even if the task is cancelled before it starts.
    pump.add_done_callback(lambda _: ours.close())
    return theirs


async def _pump(call: Call, ours: socket.socket) -> None:
    """Copy bytes between the call and the socket `ours` until both directions have ended or one side is gone."""
    stream = await SocketStream.open(ours)
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
