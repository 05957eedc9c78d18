"""A real ``envkit serve`` with tokens, in its own process."""

from __future__ import annotations

import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.wiring.gateway.token_store import open_tokens
from tests.programs.program import SCRIPT, Program

_STOP_S = 30


def memory(memory_mib: int) -> dict[str, int]:
    """Return the key with a memory limit; empty if this machine cannot enforce one in sandboxes, which needs root."""
    return {"memory_mib": memory_mib} if LocalBackend().capabilities()["memory"] else {}


CONFIG = f"""
backend: local
listen: {{port: 0}}
node: {{max_sandboxes: 8, memory_mib: 4096}}
envs: {json.dumps({"sandboxes": 1, "capacity": 16, "warm": 0, **memory(512)})}
limits: {{sandbox_ttl_s: 120, step_timeout_s: 10}}
"""


@dataclass(frozen=True)
class Gateway:
    """A running server and its state folder."""

    url: str
    state: Path
    process_id: int = 0

    def token(self, tenant: str, scopes: str) -> str:
        return open_tokens(self.state).create(tenant, scopes.split(","))

    def client(self, token: str) -> httpx.Client:
        return httpx.Client(
            base_url=self.url, headers={"Authorization": f"Bearer {token}"}, timeout=30, trust_env=False
        )


@contextmanager
def gateway(
    folder: Path, config: str = CONFIG, *, has_tokens: bool = True, popen: type[subprocess.Popen[Any]] = Program
) -> Iterator[Gateway]:
    """Serve for the duration of the block; the server must then stop on SIGINT without an error."""
    state = folder / "state"
    if has_tokens:
        Gateway("", state).token("ops", "admin")  # from now on every caller needs a token
    (folder / "fleet.yaml").write_text(config)
    words = [SCRIPT, "serve", "--config", str(folder / "fleet.yaml"), "--state", str(state), "--set", "access_log=null"]
    with (
        (folder / "stderr").open("w") as errors,
        popen(words, stdout=subprocess.PIPE, stderr=errors, text=True) as server,
    ):
        try:
            assert server.stdout is not None
            ready, _, url = server.stdout.readline().strip().partition(" ")
            assert ready == "ready", (folder / "stderr").read_text()
            yield Gateway(url, state, server.pid)
            server.send_signal(signal.SIGINT)
            assert server.wait(_STOP_S) == 0
        finally:
            server.kill()
    assert "Traceback" not in (folder / "stderr").read_text()
