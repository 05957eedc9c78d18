"""The logs on standard error, also if nobody reads it."""

from __future__ import annotations

import json
import re
import subprocess
import sys

WRITER = """
import logging, sys
from envkit.http.server.access_log import AccessLog
from envkit.http.server.stderr_log import StandardErrorLog

line = dict(id="r", tenant="", method="GET", path="/", status=200, seconds=0.0, bytes_in=0, bytes_out=0)
log = logging.getLogger("envkit")
with AccessLog.to(None) as access:
    access.write(**line)
with StandardErrorLog(), AccessLog.to(None) as access:
    for number in range(20_000):
        log.warning("warning %d", number)
        access.write(**line)
print("a last word", file=sys.stderr, flush=True)
print(access.dropped, flush=True)
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


def test_a_process_whose_logs_are_not_read_continues_and_exits() -> None:
    with subprocess.Popen([sys.executable, "-c", WRITER], stdout=subprocess.PIPE, stderr=subprocess.PIPE) as running:
        try:
            assert running.wait(60) == 0
            assert running.stdout is not None
            assert running.stderr is not None
            assert int(running.stdout.read()) > 5000
            *lines, last = running.stderr.read().splitlines()
        finally:
            running.kill()
    assert last == b"a last word"
    requests = [json.loads(line) for line in lines if line.startswith(b"{")]
    assert {request["path"] for request in requests} == {"/"}
    # The number of dropped records may appear anywhere between them.
    kept = [line.partition(b"Z ")[2] for line in lines if b"WARNING" in line]
    assert kept[:3] == [b"WARNING warning 0", b"WARNING warning 1", b"WARNING warning 2"]


def test_records_are_written_in_full_with_their_traceback() -> None:
    done = subprocess.run([sys.executable, "-c", ONE], capture_output=True, text=True, timeout=60, check=True)
    long, message, *trace = done.stderr.splitlines()
    assert long.partition(" ")[2] == "WARNING " + "long " * 2000
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ERROR it failed", message)
    assert (trace[0], trace[-1]) == ("Traceback (most recent call last):", "ValueError: a mistake")
