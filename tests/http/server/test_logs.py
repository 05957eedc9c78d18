"""The access log and the log of events, also if nobody reads them."""

from __future__ import annotations

import json
import logging
import re
import shutil
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import anyio
from hypothesis import given
from hypothesis import strategies as st

from envkit import clock
from envkit.http.server.logs import JsonFormatter, access_log

RECORD = logging.makeLogRecord({"msg": {"path": "/v1/health"}})
UNREAD = """
import logging
from contextlib import closing
from envkit.http.server.logs import access_log, events_on_standard_error

record = logging.makeLogRecord({"msg": {"path": "/"}})
with events_on_standard_error(), closing(access_log(None)) as access:
    for number in range(40_000):  # 10,000 may wait, 10,000 be in the thread's hands, and 4,700 in the pipe
        logging.getLogger("envkit").warning("warning %d", number)
        access.handle(record)
print(access.dropped, flush=True)
"""
ONE = """
import logging
from envkit.http.server.logs import events_on_standard_error

with events_on_standard_error():
    logging.warning("long \\x1b " * 2000)
    try:
        raise ValueError("a mistake")
    except ValueError:
        logging.exception("it failed")
"""


def test_a_process_whose_logs_are_not_read_continues_and_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", UNREAD], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.wait(60) == 0
            assert running.stdout is not None
            assert running.stderr is not None
            assert int(running.stdout.read()) > 5000
            lines = running.stderr.read().splitlines()
        finally:
            running.kill()
    kept = [line.partition(b"Z ")[2] for line in lines[:-1] if b"WARNING" in line]  # none, if accesses filled the pipe
    assert kept == [b"WARNING warning %d" % number for number in range(len(kept))]
    assert len(lines) > 500


def test_events_are_written_in_full_with_their_traceback_and_without_control_characters() -> None:
    done = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, timeout=60, check=True)
    long, message, *trace = done.stderr.splitlines()
    assert long.partition(" ")[2] == "WARNING " + "long \\x1b " * 2000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR it failed", message)
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: a mistake")


@given(path=st.text(max_size=2000) | st.text('\\"\x00\x9bé☃😀\ud800/\u2028', max_size=500))
def test_a_line_of_the_access_log_is_one_line_of_ascii_for_any_path(path: str) -> None:
    text = JsonFormatter().format(logging.makeLogRecord({"msg": {"path": path}}))
    assert text.isascii()
    assert text.isprintable()
    assert json.loads(text) == {"path": path}


def test_the_access_log_can_be_rotated_and_survives_a_deleted_folder(tmp_path: Path) -> None:
    path, old = tmp_path / "logs" / "access.log", tmp_path / "old.log"
    path.parent.mkdir()

    async def main() -> None:
        with closing(access_log(path)) as log, anyio.fail_after(20):
            log.handle(RECORD)
            while not path.read_text():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            path.rename(old)
            log.handle(RECORD)
            while not path.exists() or not path.read_text():  # noqa: ASYNC110
                await anyio.sleep(0.01)
            shutil.rmtree(path.parent)
            log.handle(RECORD)
            while not log.dropped:  # noqa: ASYNC110
                await anyio.sleep(0.01)
            path.parent.mkdir()
            log.handle(RECORD)

    clock.run(main)
    assert [len(each.read_text().splitlines()) for each in (old, path)] == [1, 1]
