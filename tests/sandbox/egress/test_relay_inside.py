"""The relay of the proxy in the sandbox, and the hosts that programs reach through it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from envkit import clock
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.egress import proxy, relay_inside
from envkit.types import SandboxSpec
from tests.sandbox import containers
from tests.sandbox.egress.internet import TIMEOUT_S, web_server

# Sends each argument as a request over a connection of its own, and prints the answers.
ASK = """
import socket, sys
for request in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", 3128)) as stream:
        stream.sendall(request.encode() + b"\\r\\n\\r\\n")
        print(b"".join(iter(lambda: stream.recv(1 << 16), b"")).decode())
"""

# Finds the proxy in its environment variables, as pip and git do.
FETCH = """
import sys, urllib.error, urllib.request
for url in sys.argv[1:]:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            print(answer.status, answer.read().split(b"\\r\\n")[1].decode())
    except urllib.error.HTTPError as error:
        print(error.code, error.read().decode().strip())
    except OSError as error:
        print(error)
"""
DIAL = """
import socket, sys
for target in sys.argv[1:]:
    try:
        socket.create_connection((target.split()[0], int(target.split()[1])), 3)
        print("in")
    except OSError as error:
        print(error.strerror or type(error).__name__)
"""


@contextmanager
def relay(folder: Path) -> Iterator[int]:
    """Run the relay on this host; yield the port at which it accepts clients."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command = [sys.executable, "-I", "-S", relay_inside.__file__, str(folder / "s"), str(port)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as running:
        try:
            yield port
        finally:
            running.kill()


def connected(family: socket.AddressFamily, address: object) -> socket.socket:
    """Connect as soon as a server listens."""
    deadline = clock.stopwatch() + TIMEOUT_S
    while True:
        stream = socket.socket(family)
        try:
            stream.connect(address)  # type: ignore[arg-type]
        except OSError:
            stream.close()
            if clock.stopwatch() > deadline:
                raise
        else:
            stream.settimeout(TIMEOUT_S)
            return stream


def test_the_relay_gives_each_client_a_connection_of_the_host_even_if_that_comes_later(tmp_path: Path) -> None:
    with (
        relay(tmp_path) as port,
        connected(socket.AF_INET, ("127.0.0.1", port)) as client,
        connected(socket.AF_INET, ("127.0.0.1", port)) as other_client,
    ):
        client.sendall(b"one")
        other_client.sendall(b"two")
        with (
            connected(socket.AF_UNIX, str(tmp_path / "s")) as ours,
            connected(socket.AF_UNIX, str(tmp_path / "s")) as other,
        ):
            by_what_came = {ours.recv(9): ours, other.recv(9): other}
            by_what_came[b"one"].sendall(b"answer")
            assert client.recv(9) == b"answer"
            client.shutdown(socket.SHUT_WR)
            assert by_what_came[b"one"].recv(9) == b""
            by_what_came[b"one"].sendall(b"still")
            by_what_came[b"one"].close()
            assert (client.recv(9), client.recv(9)) == (b"still", b"")


def test_the_relay_gives_no_client_a_connection_that_the_host_closed(tmp_path: Path) -> None:
    with relay(tmp_path) as port:
        connected(socket.AF_UNIX, str(tmp_path / "s")).close()
        with (
            connected(socket.AF_UNIX, str(tmp_path / "s")) as ours,
            connected(socket.AF_INET, ("127.0.0.1", port)) as client,
        ):
            client.sendall(b"one")
            assert ours.recv(9) == b"one"


@pytest.mark.bwrap
def test_python_in_a_sandbox_fetches_from_allowed_hosts_by_proxy_and_reaches_no_other_address() -> None:
    spec = SandboxSpec(network=("ok.example",))

    async def main() -> tuple[list[str], list[str]]:
        async with LocalBackend() as backend, web_server() as resolve:
            [(address, port)] = await resolve("", 0)
            sandbox = await backend.start(SandboxSpec(env=proxy.VARIABLES))
            await proxy.open_for(sandbox, spec, sys.executable, resolve=resolve)
            urls = ["http://ok.example/a", "http://no.example/", "https://no.example/"]
            fetched = await sandbox.exec([sys.executable, "-c", FETCH, *urls], timeout_s=TIMEOUT_S)
            targets = [f"{address} {port}", "172.17.0.1 22", "169.254.169.254 80", "1.1.1.1 443", "ok.example 80"]
            dialled = await sandbox.exec([sys.executable, "-c", DIAL, *targets], timeout_s=TIMEOUT_S)
            return fetched.stdout.splitlines(), dialled.stdout.splitlines()

    fetched, dialled = clock.run(main)
    assert fetched[0] == "200 Host: ok.example"
    assert fetched[1] == "403 no.example is not on the allowlist of this sandbox; add it to `network`"
    assert "Tunnel connection failed: 403" in fetched[2]
    assert dialled[0] == "Connection refused"  # its own loopback, where nothing listens
    assert dialled[1:4] == ["Network is unreachable"] * 3
    assert dialled[4] != "in"


@pytest.mark.docker
def test_a_container_reaches_hosts_only_through_the_proxy() -> None:
    spec = SandboxSpec(image=containers.image(), network=("ok.invalid",), untrusted=True)

    async def main() -> tuple[list[str], list[str]]:
        async with DockerBackend() as backend:
            sandbox = await backend.start(spec)
            urls = ["http://ok.invalid/", "http://no.invalid/"]
            fetched = await sandbox.exec(["python3", "-c", FETCH, *urls], timeout_s=TIMEOUT_S)
            dialled = await sandbox.exec(["python3", "-c", DIAL, "172.17.0.1 22", "1.1.1.1 443"], timeout_s=TIMEOUT_S)
            return fetched.stdout.splitlines(), dialled.stdout.splitlines()

    fetched, dialled = clock.run(main)
    assert fetched == [
        "403 ok.invalid has no public address",
        "403 no.invalid is not on the allowlist of this sandbox; add it to `network`",
    ]
    assert dialled == ["Network is unreachable"] * 2


@pytest.mark.bwrap
def test_a_relay_that_a_sandbox_kills_is_restarted() -> None:
    async def main() -> str:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(network=("ok.invalid",)))
            await sandbox.exec(["sh", "-c", "kill -9 -1"], timeout_s=TIMEOUT_S)
            ask = f"while ! python3 -c '{ASK}' 'GET http://no.invalid/ HTTP/1.1' 2>/dev/null; do sleep 0.05; done"
            return (await sandbox.exec(["sh", "-c", ask], timeout_s=TIMEOUT_S)).stdout

    assert "403 no.invalid is not on the allowlist" in clock.run(main)
