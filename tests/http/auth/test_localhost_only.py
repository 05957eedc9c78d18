"""Foreign web pages in a local browser, on a server without tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus

from tests.http.guarded import COUNT, Stage, on_stage, open_socket

PAGES = [
    {"Origin": "http://evil.example"},
    {"Origin": "null"},
    {"Origin": "http://localhost:1"},
    {"Origin": "http://evil.example", "Host": "evil.example"},
    {"Host": "evil.example:8000"},
    {"Host": "127.0.0.1.evil.example"},
]


def test_without_tokens_foreign_web_pages_are_refused(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        for headers in PAGES:
            refused = await stage.ask("PUT", "/v1/sessions/a", json=COUNT, headers=headers)
            assert (refused.status_code, refused.json()["type"]) == (403, "forbidden")
            assert "envkit token create" in refused.json()["detail"]
            with pytest.raises(InvalidStatus) as caught:
                await open_socket(stage, headers)
            assert caught.value.response.status_code == 403
        assert (await stage.ask("GET", "/v1/sessions")).json() == {"sessions": []}

    on_stage(main, tmp_path, has_tokens=False)


def test_without_tokens_own_pages_and_local_programs_are_allowed(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        port = stage.address.rpartition(":")[2]
        for host in (f"localhost:{port}", f"127.0.0.1:{port}", f"LOCALHOST:{port}", "127.1.2.3", f"[::1]:{port}"):
            for headers in ({"Host": host}, {"Host": host, "Origin": f"http://{host}"}):
                assert (await stage.ask("GET", "/v1/envs", headers=headers)).status_code == 200, headers
        async with await open_socket(stage, {"Origin": stage.address}):
            pass

    on_stage(main, tmp_path, has_tokens=False)


def test_with_a_token_any_origin_and_host_are_allowed(tmp_path: Path) -> None:
    async def main(stage: Stage) -> None:
        token = stage.token()
        for headers in PAGES:
            assert (await stage.ask("GET", "/v1/envs", token, headers=headers)).status_code == 200
            assert (await stage.ask("GET", "/v1/envs", headers=headers)).status_code == 401

    on_stage(main, tmp_path)
