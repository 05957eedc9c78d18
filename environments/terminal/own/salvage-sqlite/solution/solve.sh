#!/bin/bash
set -e
cd /workspace
python3 - <<'P'
import sqlite3
from pathlib import Path

Path("recovered.db").unlink(missing_ok=True)
damaged = sqlite3.connect("file:measurements.db?immutable=1", uri=True)
target = sqlite3.connect("recovered.db")
target.execute("create table measurements(id INTEGER PRIMARY KEY, host TEXT, reading REAL, note TEXT)")
lost = []
for number in range(1, 3001):
    try:
        row = damaged.execute("select id, host, reading, note from measurements where id = ?", (number,)).fetchone()
    except sqlite3.DatabaseError:
        row = None
    if row is None:
        lost.append(number)
    else:
        target.execute("insert into measurements values (?, ?, ?, ?)", row)
target.execute("create index by_host on measurements(host)")
target.commit()
Path("lost.txt").write_text("".join(f"{number}\n" for number in lost))
P
