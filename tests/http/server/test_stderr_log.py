"""The log on standard error, also if nobody reads it."""

from __future__ import annotations

import subprocess
import sys

WRITER = """
import logging, sys
from envkit.http.server.stderr_log import StandardErrorLog

log = logging.getLogger("envkit")
with StandardErrorLog():
    for number in range(10_000):
        log.warning("warning %d", number)
    try:
        raise ValueError("a mistake")
    except ValueError:
        log.exception("it failed")
print("a last word", file=sys.stderr, flush=True)
"""
ONE = """
import logging
from envkit.http.server.stderr_log import StandardErrorLog

with StandardErrorLog():
    logging.warning("long " * 2000)
    try:
        raise ValueError("a mistake")
    except ValueError:
        logging.exception("it failed")
"""


def test_a_process_whose_log_is_not_read_continues_and_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER], stderr=subprocess.PIPE) as running:
        try:
            assert running.wait(60) == 0
            assert running.stderr is not None
            *lines, last = running.stderr.read().splitlines()
        finally:
            running.kill()
    assert last == b"a last word"
    # The number of dropped records may appear anywhere between them.
    kept = [line for line in lines if line.startswith(b"warning ")]
    assert kept[:3] == [b"warning 0", b"warning 1", b"warning 2"]
    assert len(lines) < 10_000


def test_records_are_written_in_full_with_their_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, timeout=60, check=True)
    long, message, *trace = done.stderr.splitlines()
    assert long == "long " * 2000
    assert message == "it failed"
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: a mistake")
