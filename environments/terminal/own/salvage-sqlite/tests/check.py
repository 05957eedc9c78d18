"""Compares the rows that were recovered, also from a database that the agent has not seen, with the original ones."""

import hashlib
import json
import random
import sqlite3
import tempfile
from pathlib import Path

from harness import WORK, private_folder, read, require, run, write

ROWS, PAGE, LEAF = 3000, 1024, 13
LOST = ((343, 376), (1589, 1655), (2727, 2759))
"""First and last ids of the rows that are on the overwritten pages."""
VISIBLE = "measurement"
HIDDEN = "measurement of 5518"
TABLE = "create table measurements(id INTEGER PRIMARY KEY, host TEXT, reading REAL, note TEXT)"
QUERY = """import json, sqlite3, sys
database = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True)
select = "select id, host, reading, note from measurements order by id"
print(json.dumps([[list(row) for row in database.execute(query)] for query in (select, "pragma integrity_check")]))"""


def row(seed, number):
    digest = hashlib.sha256(f"{seed} {number}".encode()).hexdigest()
    note = f"note {digest[20:28]}" if digest[0] in "01234" else None
    return [number, f"host-{digest[:2]}", int(digest[2:8], 16) / 1000, note]


def ids_of(leaf):
    """Yield the ids of the rows on a page of the table. Each cell begins with its size, below 128, and the id."""
    for index in range(int.from_bytes(leaf[3:5], "big")):
        start = int.from_bytes(leaf[8 + 2 * index : 10 + 2 * index], "big") + 1
        first, second = leaf[start : start + 2]
        yield first if first < 128 else (first & 127) << 7 | second


def damaged_database(seed):
    """Return a database with overwritten pages, and the set of the ids of the rows that were on them."""
    draw = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, "original.db")
        database = sqlite3.connect(file)
        database.execute(f"pragma page_size = {PAGE}")
        database.execute(TABLE)
        values = [row(seed, number) for number in range(1, ROWS + 1)]
        database.executemany("insert into measurements values (?, ?, ?, ?)", values)
        database.execute("create index by_host on measurements(host)")
        database.commit()
        database.close()
        content = file.read_bytes()
    pages = [content[start : start + PAGE] for start in range(0, len(content), PAGE)]
    leaves = [number for number, page in enumerate(pages) if number and page[0] == LEAF]
    kept, *overwritten = draw.sample(leaves, 6)
    lost = {id for number in overwritten for id in ids_of(pages[number])}
    contents = [bytes(PAGE), b"\xff" * PAGE, pages[kept], draw.randbytes(PAGE), draw.randbytes(PAGE)]
    for number in overwritten:
        pages[number] = contents.pop()
    return b"".join(pages), lost


def check(seed, recovered, lost, expected):
    result = run(["python3", "-I", "-c", QUERY, recovered])
    require(result.returncode == 0, f"{recovered} cannot be read: {result.stderr[-300:]}")
    rows, state = json.loads(result.stdout)
    require(state == [["ok"]], f"{recovered} is damaged: {state}")
    wanted = [row(seed, number) for number in range(1, ROWS + 1) if number not in expected]
    require(len(rows) == len(wanted), f"{recovered} has {len(rows)} rows, where {len(wanted)} can be recovered")
    require(rows == wanted, f"rows of {recovered} differ from the original ones")
    require([int(word) for word in read(lost).split()] == sorted(expected), f"{lost} is wrong")


def verify():
    lost = {number for first, last in LOST for number in range(first, last + 1)}
    check(VISIBLE, WORK / "recovered.db", WORK / "lost.txt", lost)
    content, lost = damaged_database(HIDDEN)
    folder = private_folder()
    write(folder / "damaged.db", content)
    result = run([WORK / "salvage", folder / "damaged.db", folder / "recovered.db", folder / "lost.txt"], timeout_s=30)
    require(result.returncode == 0, f"salvage failed with another database: {result.stderr[-500:]}")
    check(HIDDEN, folder / "recovered.db", folder / "lost.txt", lost)
