"""Queries: look up, filter, join, group and convert data in CSV, JSON and SQLite files."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterable, Sequence

from .family import Draw, DrawnTask, Family, file_case, lines, python, rows_case, run_case, write_file

_FIELDS = ("amount", "price", "weight", "stock", "score", "units")
_GROUPS = ("city", "region", "team", "category", "color", "customer")
Row = tuple[int, str, str, int]


def _rows(draw: Draw, low: int, high: int, groups: int = 5) -> list[Row]:
    """Return rows (id, name, group, number) with different ids and names."""
    chosen = draw.words(groups)
    ids = draw.some(range(100, 1000), draw.number(low, high))
    names = draw.words(len(ids))
    return [(id, name, draw.one(chosen), draw.number(1, 5000)) for id, name in zip(ids, names, strict=True)]


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]], delimiter: str = ",") -> str:
    text = io.StringIO()
    writer = csv.writer(text, delimiter=delimiter, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    return text.getvalue()


def _database(path: str, tables: dict[str, str]) -> str:
    """Return a shell command that moves CSV files into a SQLite file; `tables` are the columns by table."""
    return python(f"""
import csv, os, sqlite3
with sqlite3.connect("{path}") as database:
    for table, columns in {tables!r}.items():
        database.execute(f"create table {{table}} ({{columns}})")
        with open(table + ".csv") as file:
            rows = list(csv.reader(file))[1:]
        database.executemany(f"insert into {{table}} values ({{','.join('?' * len(rows[0]))}})", rows)
        os.remove(table + ".csv")
""")


def _lookup_csv(draw: Draw) -> DrawnTask:
    data, out, field, group = f"{draw.word()}.csv", draw.output(), draw.one(_FIELDS), draw.one(_GROUPS)
    rows = _rows(draw, 15, 60)
    row = draw.one(rows)
    by_name = draw.chance(0.5)
    column, key, value = (2, "name", row[1]) if by_name else (1, "id", row[0])
    return DrawnTask(
        instruction=draw.either(
            f"Write the {field} of the row with {key} {value} in {data} to {out}.",
            f"Which {field} does the row with the {key} {value} have in {data}? Write only the {field} to {out}.",
        ),
        files={data: _csv(("id", "name", group, field), rows)},
        solution=f"awk -F, '${column} == \"{value}\" {{ print $4 }}' {data} > {out}\n",
        checks=file_case(out, str(row[3]), "words"),
    )


def _lookup_json(draw: Draw) -> DrawnTask:
    data, out, keys = f"{draw.word()}.json", draw.output(), draw.words(9)
    tree = {key: {inner: draw.number(1, 100000) for inner in draw.words(4)} for key in keys}
    first = draw.one(keys)
    second = draw.one(list(tree[first]))
    return DrawnTask(
        instruction=draw.either(
            f"{data} has an object for each of several keys. Write the value of {second} in the object {first} to "
            f"{out}.",
            f"Write the value of {first}.{second} in {data} to {out}.",
        ),
        files={data: json.dumps(tree, indent=2) + "\n"},
        solution=f'python3 -c \'import json; print(json.load(open("{data}"))["{first}"]["{second}"])\' > {out}\n',
        checks=file_case(out, str(tree[first][second]), "words"),
    )


def _column_csv(draw: Draw) -> DrawnTask:
    data, out, field, group = f"{draw.word()}.csv", draw.output(), draw.one(_FIELDS), draw.one(_GROUPS)
    rows, column = _rows(draw, 10, 40), draw.number(0, 3)
    name = ("id", "name", group, field)[column]
    return DrawnTask(
        instruction=f"Write the values of the column {name} of {data} to {out}, one a line, in the order of the rows "
        "and without the header.",
        files={data: _csv(("id", "name", group, field), rows)},
        solution=f"tail -n +2 {data} | cut -d, -f{column + 1} > {out}\n",
        checks=file_case(out, lines(row[column] for row in rows)),
    )


def _sum_csv(draw: Draw) -> DrawnTask:
    data, out, field, group = f"{draw.word()}.csv", draw.output(), draw.one(_FIELDS), draw.one(_GROUPS)
    rows, delimiter = _rows(draw, 30, 90), draw.either(",", ";", "\t")
    key, least = draw.one(rows)[2], draw.number(500, 4000)
    condition, test, found = draw.either(
        (f"the {group} {key}", f'$3 == "{key}"', [row for row in rows if row[2] == key]),
        (f"a {field} above {least}", f"$4 > {least}", [row for row in rows if row[3] > least]),
        (f"another {group} than {key}", f'$3 != "{key}"', [row for row in rows if row[2] != key]),
    )
    named = {",": "commas", ";": "semicolons", "\t": "tabs"}[delimiter]
    return DrawnTask(
        instruction=f"The columns of {data} are separated by {named}. Write the sum of the column {field} over all "
        f"rows with {condition} to {out}.",
        files={data: _csv(("id", "name", group, field), rows, delimiter)},
        solution=f"awk -F'{delimiter}' 'NR > 1 && {test} {{ total += $4 }} END {{ print total + 0 }}' {data} > {out}\n",
        checks=file_case(out, str(sum(row[3] for row in found)), "words"),
    )


def _filter_json(draw: Draw) -> DrawnTask:
    data, out, field, group = f"{draw.word()}.json", draw.output(), draw.one(_FIELDS), draw.one(_GROUPS)
    rows, least = _rows(draw, 20, 60), draw.number(1500, 3500)
    key, is_above = draw.one(rows)[2], draw.chance(0.5)
    found = sorted(row[1] for row in rows if row[2] == key and (row[3] > least) == is_above)
    if not found:
        return _filter_json(draw)
    objects = [{"id": row[0], "name": row[1], group: row[2], field: row[3]} for row in rows]
    return DrawnTask(
        instruction=f"{data} has a list of objects. Write the names of all objects whose {group} is {key} and whose "
        f"{field} is {'above' if is_above else 'at most'} {least} to {out}, one a line, sorted.",
        files={data: json.dumps(objects, indent=1) + "\n"},
        solution=python(f"""
import json
rows = [row for row in json.load(open("{data}")) if row["{group}"] == "{key}"]
found = [row["name"] for row in rows if row["{field}"] {">" if is_above else "<="} {least}]
open("{out}", "w").write("\\n".join(sorted(found)) + "\\n")
"""),
        checks=file_case(out, lines(found)),
    )


def _query_database(draw: Draw) -> DrawnTask:
    table, group = draw.one(_GROUPS) + "_" + draw.word(), draw.word()
    path, out, field = f"{draw.word()}.db", draw.output(), draw.one(_FIELDS)
    rows = _rows(draw, 30, 90)
    key = draw.one(rows)[2]
    of_group = [row for row in rows if row[2] == key]
    what, expression, value = draw.either(
        (f"sum of the column {field}", f"sum({field})", sum(row[3] for row in of_group)),
        (f"largest value of the column {field}", f"max({field})", max(row[3] for row in of_group)),
        (f"smallest value of the column {field}", f"min({field})", min(row[3] for row in of_group)),
    )
    return DrawnTask(
        instruction=f"The SQLite file {path} has a table {table}. Write the {what} over all rows whose column {group} "
        f"is {key} to {out}.",
        files={f"{table}.csv": _csv(("id", "name", group, field), rows)},
        setup=_database(path, {table: f"id integer, name text, {group} text, {field} integer"}),
        solution=python(f"""
import sqlite3
value, = sqlite3.connect("{path}").execute("select {expression} from {table} where {group} = '{key}'").fetchone()
open("{out}", "w").write(f"{{value}}\\n")
"""),
        checks=file_case(out, str(value), "words"),
    )


def _group_csv(draw: Draw) -> DrawnTask:
    data, out, field, group = f"{draw.word()}.csv", draw.output(".csv"), draw.one(_FIELDS), draw.one(_GROUPS)
    rows = [
        (id, f"{name}, {draw.word()}" if draw.chance(0.4) else name, key, number)
        for id, name, key, number in _rows(draw, 30, 70, 8)
    ]
    counts, totals = Counter(row[2] for row in rows), Counter[str]()
    for row in rows:
        totals[row[2]] += row[3]
    by_total = draw.chance(0.5)
    order = sorted(totals, key=lambda key: (-totals[key] if by_total else 0, key))
    return DrawnTask(
        instruction=f"Group the rows of {data} by {group} (some fields are quoted). Write a CSV file {out} with the "
        f"header {group},rows,total and a row for each {group}: its number of rows and the sum of their {field}, "
        f"sorted by {f'total, the largest first, and then by {group}' if by_total else group}.",
        files={data: _csv(("id", "name", group, field), rows)},
        solution=python(f"""
import csv
rows, totals = {{}}, {{}}
for row in csv.DictReader(open("{data}")):
    key = row["{group}"]
    rows[key] = rows.get(key, 0) + 1
    totals[key] = totals.get(key, 0) + int(row["{field}"])
with open("{out}", "w") as file:
    print("{group},rows,total", file=file)
    for key in sorted(totals, key=lambda key: ({"-totals[key], " if by_total else ""}key)):
        print(key, rows[key], totals[key], sep=",", file=file)
"""),
        checks=file_case(out, _csv((group, "rows", "total"), [(key, counts[key], totals[key]) for key in order])),
    )


def _convert(draw: Draw) -> DrawnTask:
    source, field, group = draw.word(), draw.one(_FIELDS), draw.one(_GROUPS)
    out, rows = f"{draw.word()}.json", _rows(draw, 12, 30)
    if draw.chance(0.5):
        nested: dict[str, dict[str, int]] = {}
        for _, name, key, number in rows:
            nested.setdefault(key, {})[name] = number
        return DrawnTask(
            instruction=f"Convert {source}.csv to {out}: an object with a key for each {group}, whose value is an "
            f"object with the {field} (as a number) of each row of this {group} by name. "
            f'For example: {{"{rows[0][2]}": {{"{rows[0][1]}": {rows[0][3]}, ...}}, ...}}',
            files={f"{source}.csv": _csv(("id", "name", group, field), rows)},
            solution=python(f"""
import csv, json
found = {{}}
for row in csv.DictReader(open("{source}.csv")):
    found.setdefault(row["{group}"], {{}})[row["name"]] = int(row["{field}"])
json.dump(found, open("{out}", "w"))
"""),
            checks=file_case(out, json.dumps(nested), "json"),
        )
    objects = [{"id": row[0], "name": row[1], group: row[2], field: row[3]} for row in rows]
    return DrawnTask(
        instruction=f"Convert {source}.csv to {out}: a list with an object for each row, in the same order, with the "
        f"columns as keys. The values of id and {field} are numbers, the other values are strings.",
        files={f"{source}.csv": _csv(("id", "name", group, field), rows)},
        solution=python(f"""
import csv, json
rows = list(csv.DictReader(open("{source}.csv")))
for row in rows:
    row.update(id=int(row["id"]), {field}=int(row["{field}"]))
json.dump(rows, open("{out}", "w"))
"""),
        checks=file_case(out, json.dumps(objects), "json"),
    )


def _join(draw: Draw) -> DrawnTask:
    path, out, (items, orders) = f"{draw.word()}.db", draw.output(), draw.words(2)
    rows = _rows(draw, 10, 20)
    amounts = [(number, draw.one(rows)[0], draw.number(1, 20)) for number in range(1, draw.number(30, 60))]
    field = draw.one(_FIELDS)
    names = {row[0]: row[1] for row in rows}
    totals = Counter[str]()
    for _, item, count in amounts:
        totals[names[item]] += count
    unsold = sorted(name for name in names.values() if name not in totals)
    if draw.chance(0.5) and unsold:
        what, query, found = (
            f"the names of all rows of {items} that no row of {orders} refers to, one a line, sorted by name",
            "select name from {0} where id not in (select item from {1}) order by name",
            unsold,
        )
    else:
        what = (
            f"a line NAME TOTAL for each row of {items} that rows of {orders} refer to, sorted by name: the sum of the "
            f"column {field}_count of these rows"
        )
        query, found = (
            "select name || ' ' || sum({2}_count) from {1} join {0} on {0}.id = item group by name order by name",
            [f"{name} {totals[name]}" for name in sorted(totals)],
        )
    columns = {
        items: "id integer, name text, kind text, number integer",
        orders: f"number integer, item integer, {field}_count integer",
    }
    return DrawnTask(
        instruction=f"The SQLite file {path} has the tables {items} and {orders}. The column item of {orders} refers "
        f"to the column id of {items}. Write to {out} {what}.",
        files={
            f"{items}.csv": _csv(("id", "name", "kind", "number"), rows),
            f"{orders}.csv": _csv(("n", "i", "c"), amounts),
        },
        setup=_database(path, columns),
        solution=python(f"""
import sqlite3
rows = sqlite3.connect("{path}").execute("{query.format(items, orders, field)}").fetchall()
open("{out}", "w").write("".join(f"{{row[0]}}\\n" for row in rows))
"""),
        checks=file_case(out, lines(found)),
    )


def _load(draw: Draw) -> DrawnTask:
    folder, path, table = *draw.words(2), draw.word()
    group, field = draw.one(_GROUPS), draw.one(_FIELDS)
    path += ".db"
    rows = [(*row[:3], row[3] * 100 + draw.number(0, 99)) for row in _rows(draw, 30, 50)]
    files: dict[str, str] = {}
    rest = list(rows)
    for name in draw.words(3):
        part, rest = rest[: len(rows) // 3 + 1], rest[len(rows) // 3 + 1 :]
        delimiter = draw.either(",", ";")
        shown = [
            (id, name, key if draw.chance(0.6) else f" {key.upper()} ", f"{number / 100:,.2f}")
            for id, name, key, number in part
        ]
        text = _csv(("id", "name", group, field), shown, delimiter).splitlines()
        for _ in range(draw.number(1, 3)):
            text.insert(draw.number(2, len(text)), draw.either("", text[0]))
        files[f"{folder}/{name}.csv"] = lines(text)
    return DrawnTask(
        instruction=f"Load the files {folder}/*.csv into a new SQLite file {path}: a table {table} with the columns id "
        f"INTEGER, name TEXT, {group} TEXT and cents INTEGER, and a row for each row of the files. cents is the "
        f"{field}, such as 1,234.50, in hundredths (123450). Some files use ; instead of , between their fields; the "
        f"header may be repeated and lines may be empty: skip these. Store {group} in lower case and without blanks "
        "around it.",
        files=files,
        solution=python(f"""
import csv, glob, sqlite3
rows = []
for path in glob.glob("{folder}/*.csv"):
    text = open(path).read().splitlines()
    for row in csv.reader(text, delimiter=";" if ";" in text[0] else ","):
        if row and row[0] != "id":
            rows.append((int(row[0]), row[1], row[2].strip().lower(), int(row[3].replace(",", "").replace(".", ""))))
with sqlite3.connect("{path}") as database:
    database.execute("create table {table} (id INTEGER, name TEXT, {group} TEXT, cents INTEGER)")
    database.executemany("insert into {table} values (?, ?, ?, ?)", rows)
"""),
        checks=rows_case(path, f"select id, name, {group}, cents from {table} order by id", sorted(rows)),
    )


def _orders(draw: Draw) -> DrawnTask:
    name, state = draw.script("py"), draw.either("paid", "sent", "open", "done")
    who, goods = draw.either("customer", "client", "buyer"), draw.either("items", "lines", "goods")

    def orders() -> list[dict[str, object]]:
        people, states = draw.words(5), [state, *draw.words(2)]
        return [
            {
                "id": number,
                who: {"name": draw.one(people)},
                "state": draw.one(states),
                goods: [
                    {"name": draw.word(), "price": draw.number(1, 500), "count": draw.number(1, 9)}
                    for _ in range(draw.number(0, 4))
                ],
            }
            for number in range(1, draw.number(14, 24))
        ]

    visible, hidden = orders(), orders()
    totals = Counter[str]()
    for order in hidden:
        if order["state"] == state:
            key, bought = order[who], order[goods]
            assert isinstance(key, dict)
            assert isinstance(bought, list)
            totals[key["name"]] += sum(item["price"] * item["count"] for item in bought)
    found = [f"{key} {total}" for key, total in sorted(totals.items(), key=lambda item: (-item[1], item[0]))]
    program = f"""
import json, sys
totals = {{}}
for line in sys.stdin:
    order = json.loads(line)
    if order["state"] == "{state}":
        name = order["{who}"]["name"]
        totals[name] = totals.get(name, 0) + sum(item["price"] * item["count"] for item in order["{goods}"])
for name in sorted(totals, key=lambda name: (-totals[name], name)):
    print(name, totals[name])
"""
    return DrawnTask(
        instruction=f"Each line of orders.jsonl is an order as a JSON object. Write a Python program {name}, run as "
        f"`python3 {name} < orders.jsonl`, which prints a line NAME TOTAL for each {who} that has orders with the "
        f"state {state}: the sum of price times count over all {goods} of these orders, 0 if they have none. Sort by "
        "total, the largest first, and then by name. It is run on other orders too.",
        files={"orders.jsonl": lines(json.dumps(order) for order in visible)},
        solution=write_file(name, program),
        checks=run_case(f"python3 {name}", stdin=lines(json.dumps(order) for order in hidden), stdout=lines(found)),
    )


def _pivot(draw: Draw) -> DrawnTask:
    name, group, field = draw.script("py"), draw.one(_GROUPS), draw.one(_FIELDS)
    years = draw.number(2001, 2020)

    def data() -> list[tuple[str, str, str]]:
        keys = [f"{word}, {draw.word()}" if draw.chance(0.3) else word for word in draw.words(4)]
        return [
            (
                f"{years + draw.number(0, 1)}-{draw.number(1, 6):02}-{draw.number(1, 28):02}",
                draw.one(keys),
                str(draw.number(1, 900)) if draw.chance(0.9) else "",
            )
            for _ in range(draw.number(25, 50))
        ]

    visible, hidden = data(), data()
    cells = Counter[tuple[str, str]]()
    for date, key, value in hidden:
        cells[key, date[:7]] += int(value or 0)
    keys, months = sorted({row[1] for row in hidden}), sorted({row[0][:7] for row in hidden})
    table = [
        [key, *(str(cells[key, month]) for month in months), str(sum(cells[key, month] for month in months))]
        for key in keys
    ]
    table.append(
        ["total", *(str(sum(cells[key, month] for key in keys)) for month in months), str(sum(cells.values()))]
    )
    program = f"""
import csv, sys
from collections import Counter
cells = Counter()
with open(sys.argv[1], newline="") as file:
    for row in csv.DictReader(file):
        cells[row["{group}"], row["date"][:7]] += int(row["{field}"] or 0)
keys, months = sorted({{key for key, _ in cells}}), sorted({{month for _, month in cells}})
writer = csv.writer(sys.stdout, lineterminator="\\n")
writer.writerow(["{group}", *months, "total"])
for key in keys:
    numbers = [cells[key, month] for month in months]
    writer.writerow([key, *numbers, sum(numbers)])
sums = [sum(cells[key, month] for key in keys) for month in months]
writer.writerow(["total", *sums, sum(sums)])
"""
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} FILE`, as in `python3 {name} data.csv`, "
        f"which prints a CSV table of the sums of {field} (an empty {field} is 0) by {group} and month. Its header is "
        f"{group}, then all months of the data such as {years}-03 in order, then total; then comes a row for each "
        f"{group}, sorted by {group}, with its sum for each month (0 for a month without rows) and over all months, "
        "and at last a row total with the sums over each column. Quote fields as in the input, only where necessary. "
        "It is run on other files with these columns too.",
        files={"data.csv": _csv(("date", group, field), visible)},
        solution=write_file(name, program),
        checks=run_case(
            f"python3 {name} in.csv",
            files={"in.csv": _csv(("date", group, field), hidden)},
            stdout=_csv((group, *months, "total"), table),
        ),
    )


def _changes(draw: Draw) -> DrawnTask:
    name, table, group, field = draw.script("py"), draw.word(), draw.one(_GROUPS), draw.one(_FIELDS)
    strict = draw.chance(0.5)

    def data() -> tuple[list[Row], list[dict[str, object]]]:
        rows, changes = _rows(draw, 12, 20), list[dict[str, object]]()
        ids = [row[0] for row in rows] + [2000 + i for i in range(6)]
        for _ in range(draw.number(10, 18)):
            kind = draw.either("set", "set", "add", "delete")
            change: dict[str, object] = {"do": kind, "id": draw.one(ids)}
            if kind != "delete":
                change[field] = draw.number(1, 999)
            if kind == "set" and draw.chance(0.6):
                change[group] = draw.word()
            changes.append(change)
        return rows, changes

    def applied(rows: list[Row], changes: list[dict[str, object]]) -> tuple[list[list[object]], int]:
        now, skipped = {row[0]: list[object](row) for row in rows}, 0
        for change in changes:
            id = change["id"]
            assert isinstance(id, int)
            if change["do"] == "set" and not strict:
                now.setdefault(id, [id, "new", "none", 0])
            if id not in now:
                skipped += 1
            elif change["do"] == "delete":
                del now[id]
            else:
                row, number = now[id], change[field]
                row[2] = change.get(group, row[2])
                old = row[3]
                assert isinstance(old, int)
                assert isinstance(number, int)
                row[3] = number + (old if change["do"] == "add" else 0)
        return [now[id] for id in sorted(now)], skipped

    visible, hidden = data(), data()
    result, skipped = applied(*hidden)
    columns = f"id integer primary key, name text, {group} text, {field} integer"
    header = ("id", "name", group, field)
    program = f"""
import json, sqlite3, sys
skipped = 0
with sqlite3.connect(sys.argv[1]) as database:
    for line in open(sys.argv[2]):
        change = json.loads(line)
        id = change["id"]
        if change["do"] == "set" and {not strict}:
            database.execute("insert or ignore into {table} values (?, 'new', 'none', 0)", (id,))
        if database.execute("select 1 from {table} where id = ?", (id,)).fetchone() is None:
            skipped += 1
        elif change["do"] == "delete":
            database.execute("delete from {table} where id = ?", (id,))
        else:
            base = "{field}" if change["do"] == "add" else "0"
            database.execute("update {table} set {field} = " + base + " + ? where id = ?", (change["{field}"], id))
            if "{group}" in change:
                database.execute("update {table} set {group} = ? where id = ?", (change["{group}"], id))
print("skipped", skipped)
"""
    make = _database("other.db", {table: columns})
    hidden_name = f"{draw.word()}-{draw.number(1000, 9999)}.sh"
    missing = (
        "A change of an id that is not in the table is skipped."
        if strict
        else "set of an id that is not in the table first adds a row with this id, the name new, the "
        + group
        + " none; other changes of such ids are skipped."
    )
    return DrawnTask(
        instruction=f"Write a Python program {name}, run as `python3 {name} DATABASE CHANGES`, as in `python3 {name} "
        f"data.db changes.jsonl`, which applies changes to the table {table} ({', '.join(header)}) of a SQLite file. "
        f"Each line of CHANGES is a JSON object with the keys do and id. With do = set, it has the key {field} and may "
        f"have the key {group}: they are the new values. With do = add, its {field} is added to that of the row. With "
        f"do = delete, the row is deleted. {missing} Apply the changes in order and print `skipped N` with the number "
        "of skipped changes at the end. It is run on other files too; do not change data.db yourself.",
        files={
            f"{table}.csv": _csv(header, visible[0]),
            "changes.jsonl": lines(json.dumps(change) for change in visible[1]),
        },
        setup=_database("data.db", {table: columns}),
        solution=write_file(name, program),
        checks=run_case(
            f"bash {hidden_name}",
            files={
                hidden_name: f"{make}python3 {name} other.db other.jsonl\n",
                f"{table}.csv": _csv(header, hidden[0]),
                "other.jsonl": lines(json.dumps(change) for change in hidden[1]),
            },
            stdout=f"skipped {skipped}",
            then=rows_case("other.db", f"select id, name, {group}, {field} from {table} order by id", result),  # type: ignore[arg-type]
        ),
    )


FAMILY = Family(
    name="queries",
    summary="Look up, filter, join, group and convert data in CSV, JSON and SQLite files.",
    kinds={
        1: (_lookup_csv, _lookup_json, _column_csv),
        2: (_sum_csv, _filter_json, _query_database),
        3: (_group_csv, _convert, _join),
        4: (_load, _orders),
        5: (_pivot, _changes),
    },
)
