"""What we know of a Docker daemon by what it answers."""

from __future__ import annotations

import gc
import importlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import anyio
import pytest
from anyio.abc import SocketStream

from envkit import clock
from envkit.sandbox.docker.api import Daemon, DaemonError

UPGRADED = b"HTTP/1.1 101 UPGRADED\r\nConnection: Upgrade\r\nUpgrade: tcp\r\n\r\n"
HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
KILLED = b'{"Action": "die", "Actor": {"Attributes": {"exitCode": "137"}}}\n'
MEMORY = b'{"Action": "oom", "Actor": {"Attributes": {}}}\n'


def chunk(content: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(content), content)


@asynccontextmanager
async def answering(folder: Path, answer: bytes, *, hangs_up: bool) -> AsyncIterator[str]:
    """Listen as a daemon that gives the same answer to everybody, and then hangs up or says nothing more."""
    path = str(folder / "docker.sock")

    async def serve(link: SocketStream) -> None:
        async with link:
            await link.receive()
            if answer:
                await link.send(answer)
            if not hangs_up:
                await anyio.sleep_forever()

    async with await anyio.create_unix_listener(path) as listener, anyio.create_task_group() as tasks:
        tasks.start_soon(listener.serve, serve)
        yield path
        tasks.cancel_scope.cancel()


def daemon_at(path: str, timeout_s: float) -> Daemon:
    api = importlib.import_module("docker").APIClient(base_url=f"unix://{path}", version="1.43", timeout=timeout_s)
    return Daemon(api, api, {})


@pytest.mark.parametrize(
    ("reported", "found"),
    [
        (chunk(KILLED + MEMORY) + chunk(b""), (True, 137)),
        (chunk(KILLED), (False, 137)),
        (chunk(b""), (False, None)),
    ],
)
def test_how_a_container_ended_is_what_its_events_say(
    reported: bytes, found: tuple[bool, int | None], tmp_path: Path
) -> None:
    async def main() -> None:
        async with answering(tmp_path, HEAD + reported, hangs_up=True) as path:
            daemon = daemon_at(path, 20)
            assert await daemon.end_since("sandbox", 0) == found
            await daemon.aclose()
        gc.collect()

    clock.run(main)


def test_a_daemon_that_stands_still_is_not_waited_for_without_end(tmp_path: Path) -> None:
    async def main() -> None:
        async with answering(tmp_path, HEAD + chunk(KILLED), hangs_up=False) as path:
            daemon = daemon_at(path, 0.2)
            with pytest.raises(DaemonError, match="does not answer: timed out"):
                await daemon.end_since("sandbox", 0)
            await daemon.aclose()
        gc.collect()

    clock.run(main)


def test_output_that_arrives_with_the_answer_to_attaching_is_not_lost(tmp_path: Path) -> None:
    async def main() -> None:
        async with answering(tmp_path, UPGRADED + b"\1\0\0\0\0\0\0\5early", hangs_up=False) as path:
            daemon = daemon_at(path, 20)
            stream = await daemon.attach("sandbox")
            with anyio.fail_after(5):
                assert await stream.receive() == b"early"
            stream.close()
            await daemon.aclose()

    clock.run(main)


def test_attaching_to_a_missing_container_is_an_error(tmp_path: Path) -> None:
    async def main() -> None:
        missing = b'HTTP/1.1 404 Not Found\r\nContent-Length: 30\r\n\r\n{"message":"no such container"}'
        async with answering(tmp_path, missing, hangs_up=False) as path:
            daemon = daemon_at(path, 20)
            with pytest.raises(DaemonError, match="no such container") as refused:
                await daemon.attach("sandbox")
            assert refused.value.http_status == 404
            await daemon.aclose()

    clock.run(main)
