"""Programs with streamed input and output, and connections, in real sandboxes behind a server."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

import anyio
import pytest

from envkit import clock
from envkit.errors import EnvkitError, SandboxLostError, SandboxNotFoundError
from envkit.http.client.remote_sandbox import RemoteSandbox
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Program
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec
from tests.http.envs import serving, slots
from tests.http.pools import pool_of

pytestmark = pytest.mark.bwrap

SERVER = """
import socket
with socket.create_server(("127.0.0.1", 8000)) as listener:
    print("listening", flush=True)
    stream, _ = listener.accept()
    with stream:
        while piece := stream.recv(1 << 16):
            stream.sendall(piece.upper())
        stream.sendall(b"the end")
"""
Main = Callable[[SandboxClient, RemoteSandbox], Awaitable[None]]


def on_stage(main: Main) -> None:
    async def run() -> None:
        async with (
            LocalBackend() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool) as address,
            SandboxClient(address) as client,
            client.lease(SandboxSpec()) as sandbox,
        ):
            with anyio.fail_after(30):
                await main(client, sandbox)

    clock.run(run)


async def output_of(program: Program) -> dict[str, bytes]:
    found = {"out": b"", "err": b""}
    while (piece := await program.receive()) is not None:
        found[piece[0]] += piece[1]
    return found


def test_a_program_reads_input_while_it_runs_and_reports_its_result() -> None:
    async def main(client: SandboxClient, sandbox: RemoteSandbox) -> None:
        script = "read name; echo hello $name; echo $COLOUR >&2; wc -c; exit 7"
        async with sandbox.program(["sh", "-c", script], timeout_s=20, env={"COLOUR": "red"}) as program:
            await program.send(b"you\n")
            assert await program.receive() == ("out", b"hello you\n")
            await program.send(b"x" * 3_000_000)
            await program.send_eof()
            found = await output_of(program)
            assert (found["out"].strip(), found["err"]) == (b"3000000", b"red\n")
            result = await program.result()
            assert (result.exit_code, result.timed_out) == (7, False)

    on_stage(main)


def test_a_program_has_a_terminal_that_can_be_resized() -> None:
    async def main(client: SandboxClient, sandbox: RemoteSandbox) -> None:
        async with sandbox.program(["sh"], timeout_s=20, terminal=(24, 80)) as program:
            await program.send(b"stty size; exec 2>&1\n")
            await _until(program, b"24 80")
            await program.resize(30, 100)
            await program.send(b"stty size\n")
            await _until(program, b"30 100")
            await program.send(b"tty; exit\n")
            assert b"/dev/pts/" in (await output_of(program))["out"]

    on_stage(main)


def test_leaving_the_block_or_the_timeout_ends_the_program() -> None:
    async def main(client: SandboxClient, sandbox: RemoteSandbox) -> None:
        async with sandbox.program(["sleep", "987"], timeout_s=0.3) as program:
            assert (await output_of(program), (await program.result()).timed_out) == ({"out": b"", "err": b""}, True)
        async with sandbox.program(["sleep", "987"], timeout_s=60):
            pass
        while "sleep 987" in (await sandbox.exec(["ps", "ax"], timeout_s=20)).stdout:  # noqa: ASYNC110
            await anyio.sleep(0.05)

    on_stage(main)


def test_errors_of_a_program_arrive_as_the_errors_of_a_local_one() -> None:
    async def main(client: SandboxClient, sandbox: RemoteSandbox) -> None:
        for name, error in ((sandbox.id, EnvkitError), ("nobody", SandboxNotFoundError)):
            with pytest.raises(error):
                async with client.get(name).program(["true"], timeout_s=10.0**9) as program:
                    await program.receive()
        async with sandbox.program(["nosuch"], timeout_s=5) as program:
            await output_of(program)
            assert (await program.result()).exit_code == 127
        async with sandbox.program(["sleep", "60"], timeout_s=60) as program:
            await sandbox.stop()
            with pytest.raises(SandboxLostError):
                await output_of(program)

    on_stage(main)


def test_a_connection_reaches_a_port_in_the_sandbox_and_ends_with_it() -> None:
    async def main(client: SandboxClient, sandbox: RemoteSandbox) -> None:
        loop = asyncio.get_running_loop()
        async with sandbox.program(["/usr/bin/python3", "-c", SERVER], timeout_s=20) as program:
            await _until(program, b"listening")
            with await sandbox.connect(8000) as stream:
                await loop.sock_sendall(stream, b"loud")
                assert await loop.sock_recv(stream, 100) == b"LOUD"
                stream.shutdown(1)
                received = b""
                while piece := await loop.sock_recv(stream, 100):
                    received += piece
                assert received == b"the end"
        with await sandbox.connect("nosuch") as stream, suppress(ConnectionError):
            assert await loop.sock_recv(stream, 1) == b""

    on_stage(main)


async def _until(program: Program, wanted: bytes) -> None:
    """Read output until it contains `wanted`."""
    found = b""
    while wanted not in found:
        piece = await program.receive()
        assert piece is not None
        found += piece[1]
