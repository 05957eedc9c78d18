#!/bin/bash
set -e
cat > /workspace/load <<'P'
#!/usr/bin/env python3
import csv, pathlib, re, sqlite3, sys
folder, database = map(pathlib.Path, sys.argv[1:])
database.unlink(missing_ok=True)
with sqlite3.connect(database) as connection:
    connection.execute("create table sales(date TEXT, region TEXT, amount REAL)")
    for file in sorted(folder.glob("*.csv")):
        lines = file.read_text(encoding="utf-8-sig").splitlines()
        header = next(line for line in lines if line.strip())
        separator = next(mark for mark in ";\t," if mark in header)
        names = header.split(separator)
        for cells in csv.reader(lines, delimiter=separator):
            if not any(cell.strip() for cell in cells) or cells == names:
                continue
            row = dict(zip(names, cells))
            amount = row["amount"].replace(".", "").replace(",", ".") if separator == ";" else row["amount"].replace(",", "")
            date = re.sub(r"^(\d\d)\.(\d\d)\.(\d{4})$", r"\3-\2-\1", row["date"].strip())
            connection.execute("insert into sales values (?, ?, ?)", (date, row["region"].strip().lower(), float(amount)))
P
chmod +x /workspace/load
/workspace/load /workspace/sales /workspace/sales.db
sqlite3 /workspace/sales.db "select region || ' ' || printf('%.2f', sum(amount)) from sales group by region order by sum(amount) desc limit 1" > /workspace/answer.txt
