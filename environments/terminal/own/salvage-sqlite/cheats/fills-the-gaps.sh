#!/bin/bash
# Recovers what it can, and invents the rest, so that the database looks complete.
sed 's/^        lost.append(number)$/&\n        target.execute("insert into measurements values (?, ?, ?, NULL)", (number, f"host-{number % 256:02x}", 0.0))/' \
    >/tmp/recover.py <<'P'
import sqlite3
damaged = sqlite3.connect("file:/workspace/measurements.db?immutable=1", uri=True)
target = sqlite3.connect("/workspace/recovered.db")
target.execute("create table measurements(id INTEGER PRIMARY KEY, host TEXT, reading REAL, note TEXT)")
lost = []
for number in range(1, 3001):
    try:
        row = damaged.execute("select * from measurements where id = ?", (number,)).fetchone()
    except sqlite3.DatabaseError:
        row = None
    if row is None:
        lost.append(number)
    else:
        target.execute("insert into measurements values (?, ?, ?, ?)", row)
target.commit()
open("/workspace/lost.txt", "w").write("".join(f"{number}\n" for number in lost))
P
python3 /tmp/recover.py
