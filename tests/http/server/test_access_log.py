"""The access log: its lines and their limits."""

from __future__ import annotations

import json
import shutil
import string
import threading
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import anyio
import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit import clock
from envkit.http.server.access_log import DELAY_S, MAX_LINE_BYTES, MAX_WAITING, AccessLog

LINE: dict[str, Any] = {
    "id": "r-1",
    "tenant": "acme",
    "method": "POST",
    "path": "/v1/sessions/abc/step",
    "status": 200,
    "seconds": 0.0123456,
    "bytes_in": 30,
    "bytes_out": 160,
}


def lines_of(*lines: dict[str, Any]) -> list[str]:
    """Return the text of `lines`."""
    batches: list[bytes] = []
    with AccessLog(batches.append) as log:
        for line in lines:
            log.write(**line)
    return b"".join(batches).decode().splitlines()


def test_a_line_has_caller_request_and_outcome() -> None:
    line = json.loads(*lines_of(LINE))
    at = line.pop("at")
    assert at > 1.7e9
    assert datetime.fromisoformat(line.pop("time")).timestamp() == at
    assert line == {
        "id": "r-1",
        "tenant": "acme",
        "method": "POST",
        "path": "/v1/sessions/abc/step",
        "status": 200,
        "ms": 12.346,
        "in": 30,
        "out": 160,
        "session": "abc",
    }


def test_lines_of_sandboxes_and_sockets_have_their_own_fields() -> None:
    lines = lines_of({**LINE, "path": "/v1/sandboxes/b"}, {**LINE, "path": "/v1/ws", "messages": (3, 2)})
    first, second = map(json.loads, lines)
    assert (first["sandbox"], "session" in first) == ("b", False)
    assert (second["messages_in"], second["messages_out"], "session" in second) == (3, 2, False)


def test_lines_are_written_in_batches_after_a_short_delay() -> None:
    batches: list[bytes] = []
    is_written = threading.Event()

    def write(lines: bytes) -> None:
        batches.append(lines)
        is_written.set()

    with AccessLog(write) as log:
        for _ in range(3):
            log.write(**LINE)
        assert is_written.wait(20)
    assert [lines.count(b"\n") for lines in batches] == [3]


@given(
    id=st.text("abc.-", min_size=1, max_size=64),
    tenant=st.text("abc", max_size=32),
    path=st.text(max_size=2000) | st.text('\\"\x00é☃😀\ud800/', max_size=500),
    before=st.sampled_from(["", "/v1/sessions/", "/v1/sandboxes/"]),
    method=st.text(string.ascii_letters + '"\x1b', max_size=20),
    numbers=st.tuples(st.integers(0, 10**12), st.integers(0, 10**12)),
)
def test_a_line_is_short_json_for_any_request(
    id: str, tenant: str, path: str, before: str, method: str, numbers: tuple[int, int]
) -> None:
    line = {**LINE, "id": id, "tenant": tenant, "path": before + path, "method": method, "messages": numbers}
    (text,) = lines_of({**line, "bytes_in": numbers[0], "seconds": 1e6})
    assert len(f"{text}\n".encode()) < MAX_LINE_BYTES
    assert text.isascii()
    assert json.loads(text)["status"] == 200


def test_a_long_path_is_cut_and_short_fields_are_not() -> None:
    line = json.loads(*lines_of({**LINE, "path": "/v1/sessions/" + "x" * 500 + "/step"}))
    assert line["path"].startswith("/v1/sessions/xxx")
    assert line["path"].endswith("*")
    assert line["session"].endswith("x*")
    assert (line["id"], line["tenant"], line["method"]) == ("r-1", "acme", "POST")


def test_the_log_file_can_be_rotated(tmp_path: Path) -> None:
    path = tmp_path / "access.log"

    async def main() -> None:
        with AccessLog.to(path) as log:
            log.write(**LINE)
            with anyio.fail_after(20):
                while not path.read_text():  # noqa: ASYNC110
                    await anyio.sleep(DELAY_S)
            path.rename(tmp_path / "old.log")
            log.write(**LINE)

    clock.run(partial(main))
    assert [len((tmp_path / name).read_text().splitlines()) for name in ("old.log", "access.log")] == [1, 1]


def test_a_blocked_writer_delays_nobody_and_dropped_lines_are_counted() -> None:
    is_free = threading.Event()
    batches: list[bytes] = []

    def write(lines: bytes) -> None:
        is_free.wait(20)
        batches.append(lines)

    with AccessLog(write) as log:
        for _ in range(MAX_WAITING + 2500):
            log.write(**LINE)
        assert log.dropped == 2500
        is_free.set()
    assert b"".join(batches).count(b"\n") == MAX_WAITING


def test_a_deleted_folder_loses_lines_and_nothing_else(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = tmp_path / "logs"
    folder.mkdir()

    async def main() -> int:
        with AccessLog.to(folder / "access.log") as log:
            log.write(**LINE)
            with anyio.fail_after(20):
                while not (folder / "access.log").read_text():  # noqa: ASYNC110
                    await anyio.sleep(DELAY_S)
            shutil.rmtree(folder)
            for _ in range(3):
                log.write(**LINE)
            with anyio.fail_after(20):
                while not log.dropped:  # noqa: ASYNC110
                    await anyio.sleep(DELAY_S)
            folder.mkdir()
            log.write(**LINE)
        return log.dropped

    assert clock.run(main) == 3
    assert len((folder / "access.log").read_text().splitlines()) == 1
    assert [text.partition(":")[0] for text in caplog.messages] == ["cannot write the access log"]
