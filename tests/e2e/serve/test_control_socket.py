"""Access to a real server before and after its first token, and calls during its shutdown."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import httpx
import pytest

from envkit import clock
from tests.e2e.serve.gateway import Gateway, gateway, memory

pytestmark = pytest.mark.bwrap

SMALL = {"disk_mib": 8, **memory(64)}


def test_a_server_is_open_to_programs_of_the_machine_until_there_is_a_token(tmp_path: Path) -> None:
    with gateway(tmp_path, has_tokens=False) as server, httpx.Client(base_url=server.url, trust_env=False) as anyone:
        made = anyone.put("/v1/sandboxes/x", json=SMALL)
        assert (made.status_code, made.json()["tenant"]) == (200, "")
        for headers in ({"Origin": "http://evil.example"}, {"Host": "evil.example"}):
            assert anyone.put("/v1/sandboxes/y", json=SMALL, headers=headers).status_code == 403
        with server.client(server.token("ops", "admin")) as admin:
            until = clock.stopwatch() + 20
            while anyone.get("/v1/sandboxes").status_code != 401:
                assert clock.stopwatch() < until
            names = [one["sandbox_id"] for one in admin.get("/v1/sandboxes").json()["sandboxes"]]
            assert ":x" in names
            for name in names:
                assert admin.get(f"/v1/sandboxes/{name}").json()["sandbox_id"] == name
            run = {"argv": ["cat", "/none"], "timeout_s": 5}
            assert admin.post("/v1/sandboxes/:x/exec", json=run).json()["exit_code"] == 1
            missing = admin.get("/v1/sandboxes/:x/files?path=/none")
            assert missing.json()["detail"] == "/none: No such file or directory"
            admin.delete("/v1/sandboxes/:x").raise_for_status()
            assert admin.get("/v1/sandboxes/:x").json()["phases"][-1]["state"] == "stopped"
            counted = admin.get("/metrics").text
            assert 'envkit_errors_total{code="unauthorized"} ' in counted
            assert "envkit_access_log_dropped_total" not in counted  # there is no log


def test_a_running_http_call_is_answered_during_shutdown(tmp_path: Path) -> None:
    with gateway(tmp_path) as server:
        token = server.token("acme", "sandbox")
        with server.client(token) as client:
            client.put("/v1/sandboxes/a", json=SMALL).raise_for_status()
            sent = _send(server, token, {"argv": ["sh", "-c", "echo > begun; sleep 2"], "timeout_s": 20})
            until = clock.stopwatch() + 20
            while client.get("/v1/sandboxes/a/files?path=begun").status_code != 200:
                assert clock.stopwatch() < until
    with sent:
        answer = sent.makefile("rb").read()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 200 ")
    assert json.loads(body)["exit_code"] == 0


def _send(server: Gateway, token: str, run: dict[str, object]) -> socket.socket:
    """Send a request; return the socket with its answer."""
    host, _, port = server.url.removeprefix("http://").partition(":")
    body = json.dumps(run)
    head = f"POST /v1/sandboxes/a/exec HTTP/1.1\r\nHost: {host}\r\nAuthorization: Bearer {token}\r\n"
    sent = socket.create_connection((host, int(port)), timeout=30)
    sent.sendall(f"{head}Content-Length: {len(body)}\r\n\r\n{body}".encode())
    return sent
