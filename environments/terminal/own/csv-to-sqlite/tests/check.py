"""Loads files that the agent has not seen, and compares the tables with the rows from which the files were made."""

import csv
import io
import json
import random
from collections import defaultdict

from harness import WORK, private_folder, read, require, run, write

REGIONS = ("north", "south", "east", "west", "centre")
VISIBLE = 11
HIDDEN = 4207
QUERY = """import json, sqlite3, sys
select = "select date, region, round(amount, 2) from sales"
rows = sqlite3.connect(f"file:{sys.argv[1]}?mode=ro", uri=True).execute(select)
print(json.dumps(rows.fetchall()))"""


def amount_text(amount, separator):
    text = f"{amount:,.2f}"
    return text.translate(str.maketrans(",.", ".,")) if separator == ";" else text


def files_of(seed):
    """Return the rows of a seed, and files that hold them, by name."""
    pick = random.Random(seed).random
    rows, files = [], {}
    for number in range(6):
        separator = ",;\t"[number % 3]
        order = sorted(("date", "region", "amount"), key=lambda _: pick())
        out = io.StringIO()
        table = csv.writer(out, delimiter=separator, lineterminator="\n")
        table.writerow(order)
        for _ in range(8 + int(pick() * 12)):
            day, month = 1 + int(pick() * 28), 1 + int(pick() * 12)
            date, region = f"2024-{month:02}-{day:02}", REGIONS[int(pick() * len(REGIONS))]
            amount = round(pick() * 10 ** (1 + int(pick() * 4)), 2)
            rows.append((date, region, amount))
            shown = {"date": date if pick() < 0.6 else f"{day:02}.{month:02}.2024"}
            shown["region"] = region if pick() < 0.6 else f" {region.title()}  "
            shown["amount"] = amount_text(amount, separator)
            table.writerow([shown[name] for name in order])
            if pick() < 0.1:
                out.write("\n")
            if pick() < 0.1:
                table.writerow(order)
        files[f"part{number}.csv"] = ("\ufeff" if number % 4 == 1 else "") + out.getvalue()
    rows.append(rows[0])
    files["late.csv"] = "date,region,amount\n" + '{},{},"{:,.2f}"\n'.format(*rows[0])
    return rows, files


def check_table(database, rows):
    result = run(["python3", "-I", "-c", QUERY, database])
    require(result.returncode == 0, f"{database} cannot be read: {result.stderr[-500:]}")
    found = [tuple(row) for row in json.loads(result.stdout)]
    require(
        sorted(found) == sorted(rows), f"{database} has {len(found)} rows that are not the {len(rows)} expected ones"
    )


def verify():
    rows, _ = files_of(VISIBLE)
    totals = defaultdict(float)
    for _, region, amount in rows:
        totals[region] += amount
    best = max(totals, key=totals.__getitem__)
    require(read(WORK / "answer.txt").split() == [best, f"{totals[best]:.2f}"], "answer.txt is wrong")
    check_table(WORK / "sales.db", rows)

    rows, files = files_of(HIDDEN)
    folder = private_folder()
    for name, content in files.items():
        write(folder / "in" / name, content)
    write(folder / "out.db", "old")
    result = run([WORK / "load", folder / "in", folder / "out.db"])
    require(result.returncode == 0, f"load failed: {result.stderr[-500:]}")
    check_table(folder / "out.db", rows)
