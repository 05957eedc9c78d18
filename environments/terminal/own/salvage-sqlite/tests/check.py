"""Compares the recovered rows with those of the original database, which only this check knows."""

import hashlib
import json

from harness import WORK, read, require, run

ROWS = 3000
LOST = ((343, 376), (1589, 1655), (2727, 2759))
"""First and last ids of the rows that are on the overwritten pages."""
QUERY = """import json, sqlite3, sys
database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
select = "select id, host, reading, note from measurements order by id"
print(json.dumps([[list(row) for row in database.execute(query)] for query in (select, "pragma integrity_check")]))"""


def row(number):
    digest = hashlib.sha256(b"measurement %d" % number).hexdigest()
    note = f"note {digest[20:28]}" if digest[0] in "01234" else None
    return [number, f"host-{digest[:2]}", int(digest[2:8], 16) / 1000, note]


def verify():
    lost = {number for first, last in LOST for number in range(first, last + 1)}
    result = run(["python3", "-I", "-c", QUERY, WORK / "recovered.db"])
    require(result.returncode == 0, f"recovered.db cannot be read: {result.stderr[-300:]}")
    rows, state = json.loads(result.stdout)
    require(state == [["ok"]], f"recovered.db is damaged: {state}")
    wanted = [row(number) for number in range(1, ROWS + 1) if number not in lost]
    require(len(rows) == len(wanted), f"{len(rows)} rows, where {len(wanted)} can be recovered")
    require(rows == wanted, "rows differ from the original ones")
    require([int(word) for word in read(WORK / "lost.txt").split()] == sorted(lost), "lost.txt is wrong")
