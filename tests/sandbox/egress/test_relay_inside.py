"""The box's end of the proxy, and what programs of a box reach by it."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from envkit import clock
from envkit.errors import SandboxStartError
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.egress import proxy, relay_inside
from envkit.types import SandboxSpec
from tests.sandbox import containers
from tests.sandbox.egress.internet import PATIENCE_S, web_server

# Asks for what its arguments name, each over a connection of its own, and prints what came back.
ASK = """
import socket, sys
for request in sys.argv[1:]:
    with socket.create_connection(("127.0.0.1", 3128)) as stream:
        stream.sendall(request.encode() + b"\\r\\n\\r\\n")
        print(b"".join(iter(lambda: stream.recv(1 << 16), b"")).decode())
"""

# Goes by the environment alone, as pip and git do.
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
for place in sys.argv[1:]:
    try:
        socket.create_connection((place.split()[0], int(place.split()[1])), 3)
        print("in")
    except OSError as error:
        print(error.strerror or type(error).__name__)
"""


@contextmanager
def switch(folder: Path) -> Iterator[int]:
    """Run what runs inside, here; give the port at which it takes clients."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
    command = [sys.executable, "-I", "-S", relay_inside.__file__, str(folder / "s"), str(port)]
    with subprocess.Popen(command, stdin=subprocess.DEVNULL) as running:
        try:
            yield port
        finally:
            running.kill()


def connected(family: socket.AddressFamily, address: object) -> socket.socket:
    """Connect as soon as there is something to connect to."""
    deadline = clock.stopwatch() + PATIENCE_S
    while True:
        stream = socket.socket(family)
        try:
            stream.connect(address)  # type: ignore[arg-type]
        except OSError:
            stream.close()
            if clock.stopwatch() > deadline:
                raise
        else:
            stream.settimeout(PATIENCE_S)
            return stream


def test_inside_each_client_is_given_a_connection_of_the_host_even_if_that_comes_later(tmp_path: Path) -> None:
    with (
        switch(tmp_path) as port,
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


def test_inside_a_connection_that_the_host_gave_up_is_not_handed_to_a_client(tmp_path: Path) -> None:
    with switch(tmp_path) as port:
        connected(socket.AF_UNIX, str(tmp_path / "s")).close()
        with (
            connected(socket.AF_UNIX, str(tmp_path / "s")) as ours,
            connected(socket.AF_INET, ("127.0.0.1", port)) as client,
        ):
            client.sendall(b"one")
            assert ours.recv(9) == b"one"


def test_inside_a_slow_reader_gets_everything(tmp_path: Path) -> None:
    content = bytes(range(256)) * (1 << 15)
    with (
        switch(tmp_path) as port,
        connected(socket.AF_UNIX, str(tmp_path / "s")) as ours,
        connected(socket.AF_INET, ("127.0.0.1", port)) as client,
    ):
        client.sendall(b"one")
        assert ours.recv(9) == b"one"
        ours.settimeout(0.05)  # until nothing fits in between any more
        sent = 0
        try:
            while sent < len(content):
                sent += ours.send(content[sent : sent + (1 << 16)])
        except TimeoutError:
            pass
        ours.shutdown(socket.SHUT_WR)
        came = b"".join(iter(lambda: client.recv(1 << 16), b""))
    assert came == content[:sent]


@pytest.mark.bwrap
def test_a_box_reaches_nothing_but_what_it_may() -> None:
    spec = SandboxSpec(("sh", "-c", "echo $HTTPS_PROXY >&2; exec sleep 1000"), network=("ok.invalid",), untrusted=True)

    async def main() -> Mapping[str, str]:
        async with LocalBackend() as backend:
            box = await backend.start(spec)
            requests = ["GET http://ok.invalid/ HTTP/1.1", "CONNECT no.invalid:443 HTTP/1.1"]
            result = await box.exec(["python3", "-c", ASK, *requests], timeout_s=PATIENCE_S)
            outside = "import socket; socket.create_connection(('1.1.1.1', 80), 3)"
            other = await box.exec(["python3", "-c", outside], timeout_s=PATIENCE_S)
            return {"asked": result.stdout, "outside": other.stderr, "log": await box.log()}

    found = clock.run(main)
    assert "403 ok.invalid has no public address" in found["asked"]
    assert "403 no.invalid is not on the allowlist" in found["asked"]
    assert "Network is unreachable" in found["outside"]
    assert found["log"] == "http://127.0.0.1:3128\n"


@pytest.mark.bwrap
def test_in_a_box_python_fetches_from_allowed_hosts_by_its_environment_and_reaches_no_other_address() -> None:
    spec = SandboxSpec(network=("ok.example",))

    async def main() -> tuple[list[str], list[str]]:
        async with LocalBackend() as backend, web_server() as resolve:
            [(address, port)] = await resolve("", 0)
            box = await backend.start(SandboxSpec(env=proxy.VARIABLES))
            await proxy.open_for(box, spec, sys.executable, resolve=resolve)
            urls = ["http://ok.example/a", "http://no.example/", "https://no.example/"]
            fetched = await box.exec([sys.executable, "-c", FETCH, *urls], timeout_s=PATIENCE_S)
            places = [f"{address} {port}", "172.17.0.1 22", "169.254.169.254 80", "1.1.1.1 443", "ok.example 80"]
            dialled = await box.exec([sys.executable, "-c", DIAL, *places], timeout_s=PATIENCE_S)
            return fetched.stdout.splitlines(), dialled.stdout.splitlines()

    fetched, dialled = clock.run(main)
    assert fetched[0] == "200 Host: ok.example"
    assert fetched[1] == "403 no.example is not on the allowlist of this sandbox; add it to `network`"
    assert "Tunnel connection failed: 403" in fetched[2]
    assert dialled[0] == "Connection refused"  # its own loopback, where nothing listens
    assert dialled[1:4] == ["Network is unreachable"] * 3
    assert dialled[4] != "in"


@pytest.mark.docker
def test_a_container_reaches_hosts_by_the_proxy_alone() -> None:
    spec = SandboxSpec(image=containers.image(), network=("ok.invalid",), untrusted=True)

    async def main() -> tuple[list[str], list[str]]:
        async with DockerBackend() as backend:
            box = await backend.start(spec)
            urls = ["http://ok.invalid/", "http://no.invalid/"]
            fetched = await box.exec(["python3", "-c", FETCH, *urls], timeout_s=PATIENCE_S)
            dialled = await box.exec(["python3", "-c", DIAL, "172.17.0.1 22", "1.1.1.1 443"], timeout_s=PATIENCE_S)
            return fetched.stdout.splitlines(), dialled.stdout.splitlines()

    fetched, dialled = clock.run(main)
    assert fetched == [
        "403 ok.invalid has no public address",
        "403 no.invalid is not on the allowlist of this sandbox; add it to `network`",
    ]
    assert dialled == ["Network is unreachable"] * 2


@pytest.mark.bwrap
def test_a_box_that_kills_its_end_of_the_proxy_gets_it_back() -> None:
    async def main() -> str:
        async with LocalBackend() as backend:
            box = await backend.start(SandboxSpec(network=("ok.invalid",)))
            await box.exec(["sh", "-c", "kill -9 -1"], timeout_s=PATIENCE_S)
            ask = f"while ! python3 -c '{ASK}' 'GET http://no.invalid/ HTTP/1.1' 2>/dev/null; do sleep 0.05; done"
            return (await box.exec(["sh", "-c", ask], timeout_s=PATIENCE_S)).stdout

    assert "403 no.invalid is not on the allowlist" in clock.run(main)


@pytest.mark.bwrap
def test_a_box_whose_network_cannot_be_does_not_start() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            await backend.start(SandboxSpec(network=("http://example.org",)))

    with pytest.raises(SandboxStartError, match="is not a host name"):
        clock.run(main)
