"""Access to a real server before and after its first token."""

from __future__ import annotations

from pathlib import Path

import httpx
import pytest

from envkit import clock
from tests.e2e.serve.gateway import gateway, memory

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
