"""docs/nginx.conf in front of a real server: clients play through it, and slow clients do not reach the server."""

from __future__ import annotations

import os
import pwd
import socket
import ssl
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

import envkit
from tests.e2e.fleet.fleet import free_port
from tests.e2e.serve.gateway import Gateway, gateway, memory
from tests.http.server.test_tls import Pair, make_pair

pytestmark = [pytest.mark.bwrap, pytest.mark.nginx]

CONFIG = Path(__file__).parents[3] / "docs" / "nginx.conf"


@contextmanager
def proxied(server: Gateway, folder: Path, pair: Pair) -> Iterator[int]:
    """Run nginx with the documented file in front of `server`; yield its port. Only paths and times differ."""
    port, user = free_port(), pwd.getpwuid(os.geteuid()).pw_name
    text = CONFIG.read_text()
    for old, new in {
        "worker_processes auto;": f"user {user}; daemon off; pid {folder}/pid; error_log {folder}/errors;",
        "http {": f"http {{ access_log off; {''.join(_temporary(folder))}",
        "unix:/run/envkit/envkit.sock": server.url.removeprefix("http://"),
        "listen 443 ssl": f"listen 127.0.0.1:{port} ssl",
        "/etc/ssl/fleet.pem": str(pair.certificate),
        "/etc/ssl/fleet.key": str(pair.key),
        "client_header_timeout 20s": "client_header_timeout 1s",
        "client_body_timeout 30s": "client_body_timeout 1s",
    }.items():
        assert text.count(old) == 1, old
        text = text.replace(old, new)
    (folder / "nginx.conf").write_text(text)
    with subprocess.Popen(["nginx", "-c", str(folder / "nginx.conf"), "-p", str(folder)]) as nginx:
        try:
            _wait_for(port)
            yield port
        finally:
            nginx.terminate()


def _temporary(folder: Path) -> Iterator[str]:
    for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi"):
        yield f"{kind}_temp_path {folder}/{kind}; "


def _wait_for(port: int) -> None:
    transport = httpx.HTTPTransport(retries=8, verify=False)  # retries only connecting, with growing pauses
    with httpx.Client(transport=transport) as client:
        assert client.get(f"https://127.0.0.1:{port}/v1/health").status_code == 200


def test_clients_play_and_run_programs_through_nginx_and_slow_requests_are_cut_off(tmp_path: Path) -> None:
    pair = make_pair(tmp_path)
    with gateway(tmp_path) as server, proxied(server, tmp_path, pair) as port:
        token, url = server.token("acme", "play,sandbox"), f"https://127.0.0.1:{port}"
        with envkit.make("FrozenLake-v0", url=url, token=token, ca=str(pair.certificate)) as env:
            env.reset(seed=1)
            assert env.step("<answer>down</answer>")[0]
        with envkit.open_sandbox(
            url=url, token=token, ca=str(pair.certificate), disk_mib=8, memory_mib=memory(64).get("memory_mib")
        ) as sandbox:
            assert sandbox.exec(["echo", "hello"], timeout_s=20).stdout == "hello\n"
            sandbox.write("large", b"x" * 2_000_000)
            assert len(sandbox.read("large")) == 2_000_000
        trusted = ssl.create_default_context(cafile=str(pair.certificate))
        head = b"POST /v1/sessions:step HTTP/1.1\r\nHost: localhost\r\n"
        for part in (head, head + b"Content-Length: 9\r\n\r\n["):
            with (
                socket.create_connection(("127.0.0.1", port), 10) as plain,
                trusted.wrap_socket(plain, server_hostname="127.0.0.1") as slow,
            ):
                slow.sendall(part)
                reply = slow.recv(65536)  # nginx closes the connection, or answers 408 first
                assert reply == b"" or reply.startswith(b"HTTP/1.1 408 ")
        with httpx.Client(base_url=url, verify=trusted, headers={"Authorization": f"Bearer {token}"}) as client:
            assert client.get("/v1/envs").status_code == 200
            assert client.get("/v1/health", headers={"x-long": "y" * 70_000}).status_code == 400
