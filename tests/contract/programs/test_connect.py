"""One promise for every kind of sandbox: a server inside is reached, and nothing but it."""

from __future__ import annotations

import asyncio
import socket

import anyio
import pytest

from envkit.errors import SandboxLostError, UnreachableError
from envkit.protocols import Sandbox
from tests.contract.kinds import ALSO_REMOTE, Kind, run
from tests.contract.shared import AnySandbox, Shared

# Listens on a socket of the given name or port, and echoes what each connection sends.
SERVER = """
import socket, sys, threading, os
place = sys.argv[1]
if place.isdecimal():
    listener = socket.socket(socket.AF_INET)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", int(place)))
else:
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(os.environ["ENVKIT_SOCKETS"] + "/" + place)
listener.listen(100)
def echo(stream):
    with stream:
        while data := stream.recv(65536):
            stream.sendall(data)
        stream.sendall(b" and goodbye")
while True:
    threading.Thread(target=echo, args=(listener.accept()[0],)).start()
"""


def free_port() -> int:
    """A port that nobody has: a sandbox may have the host's network."""
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


@pytest.fixture
def place(request: pytest.FixtureRequest) -> str | int:
    return free_port() if getattr(request, "param", "") == "port" else "echo.sock"


async def reached(sandbox: Sandbox, place: str | int) -> socket.socket:
    with anyio.fail_after(20):
        while True:
            try:
                return await sandbox.connect(place)
            except UnreachableError:  # its server does not listen yet
                await anyio.sleep(0.01)


async def talk(stream: socket.socket, content: bytes) -> bytes:
    """Send `content` and the end, and return all that comes until the other side has ended."""
    loop = asyncio.get_running_loop()
    taken = bytearray()

    async def receive() -> None:
        while data := await loop.sock_recv(stream, 1 << 16):
            taken.extend(data)

    async with anyio.create_task_group() as tasks:
        tasks.start_soon(receive)
        await loop.sock_sendall(stream, content)
        stream.shutdown(socket.SHUT_WR)
    return bytes(taken)


@ALSO_REMOTE
@pytest.mark.parametrize("place", ["socket", "port"], indirect=True)
def test_every_byte_and_more_than_any_window_passes_both_ways_at_once(kind: Kind, place: str | int) -> None:
    content = bytes(range(256)) * 20_000

    async def main() -> None:
        async with kind.sandbox(kind.python, "-c", SERVER, str(place)) as sandbox:
            with await reached(sandbox, place) as stream:
                assert await talk(stream, content) == content + b" and goodbye"

    run(main)


def test_sixteen_connections_at_once_do_not_mix(kind: Kind, place: str | int) -> None:
    async def main() -> None:
        async with kind.sandbox(kind.python, "-c", SERVER, str(place)) as sandbox:
            (await reached(sandbox, place)).close()

            async def one(number: int) -> None:
                content = bytes([number]) * 300_000
                with await sandbox.connect(place) as stream:
                    assert await talk(stream, content) == content + b" and goodbye"

            async with anyio.create_task_group() as tasks:
                for number in range(16):
                    tasks.start_soon(one, number)

    run(main)


def test_a_client_that_does_not_read_does_not_block_others(kind: Kind, place: str | int) -> None:
    async def main() -> None:
        async with kind.sandbox(kind.python, "-c", SERVER, str(place)) as sandbox:
            loop = asyncio.get_running_loop()
            with await reached(sandbox, place) as deaf:
                with anyio.move_on_after(0.3) as limit:
                    await loop.sock_sendall(deaf, b"x" * 50_000_000)
                assert limit.cancelled_caught
                assert await sandbox.probe(5) < 5
                assert (await sandbox.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"
                with await sandbox.connect(place) as stream:
                    assert await talk(stream, b"hello") == b"hello and goodbye"

    run(main)


def test_a_connection_that_is_dropped_disturbs_nobody(kind: Kind, place: str | int) -> None:
    async def main() -> None:
        async with kind.sandbox(kind.python, "-c", SERVER, str(place)) as sandbox:
            (await reached(sandbox, place)).close()
            for _ in range(20):
                stream = await sandbox.connect(place)
                stream.send(b"x" * 1000)
                stream.close()
            with await sandbox.connect(place) as stream:
                assert await talk(stream, b"hello") == b"hello and goodbye"

    run(main)


def test_a_connection_ends_with_its_sandbox(kind: Kind, place: str | int) -> None:
    async def main() -> None:
        async with kind.sandbox(kind.python, "-c", SERVER, str(place)) as sandbox:
            with await reached(sandbox, place) as stream:
                await sandbox.stop()
                with anyio.fail_after(5):
                    assert await asyncio.get_running_loop().sock_recv(stream, 100) == b""
            with pytest.raises(SandboxLostError, match="lost: stopped"):
                await sandbox.connect(place)

    run(main)


def test_a_socket_without_a_listener_is_unreachable(kind: Kind, shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        leave = "import os, socket; socket.socket(socket.AF_UNIX).bind(os.environ['ENVKIT_SOCKETS'] + '/old.sock')"
        with pytest.raises(UnreachableError, match="No such file"):
            await sandbox.connect("new.sock")
        assert (await sandbox.exec([kind.python, "-c", leave], timeout_s=20)).exit_code == 0
        with pytest.raises(UnreachableError, match="Connection refused"):
            await sandbox.connect("old.sock")
        with pytest.raises(UnreachableError, match="Connection refused"):
            await sandbox.connect(free_port())

    shared.run(main)


def test_only_names_within_the_folder_of_sockets_are_connected_to(shared: Shared) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for name in ("", ".", "..", "../../etc/passwd", "/var/run/docker.sock", "a\0b"):
            with pytest.raises(UnreachableError, match="is not the name of a socket"):
                await sandbox.connect(name)

    shared.run(main)


def test_what_is_not_a_socket_itself_is_not_connected_to(kind: Kind, shared: Shared) -> None:
    make_socket = "import socket; socket.socket(socket.AF_UNIX).bind('real.sock')"
    baits = {
        "link-to-a-socket": f'{kind.python} -c "{make_socket}"; ln -s real.sock $0',
        "link-to-nowhere": "ln -s /nowhere $0",
        "file": "echo > $0",
        "folder": "mkdir $0",
    }

    async def main(sandbox: AnySandbox) -> None:
        for bait, make in baits.items():
            made = await sandbox.exec(["sh", "-c", f'cd "$ENVKIT_SOCKETS"; {make}', bait], timeout_s=10)
            assert made.exit_code == 0, bait
            with pytest.raises(UnreachableError, match=f"{bait} is not a socket"):
                await sandbox.connect(bait)

    shared.run(main)
