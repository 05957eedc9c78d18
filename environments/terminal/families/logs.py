"""Log analysis: count, rank, correlate and summarize the entries of logs of servers and programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from .family import Draw, DrawnTask, Family, file_case, lines, run_case, write_file

_LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")
_STATUSES = (200, 200, 200, 201, 204, 301, 400, 403, 404, 500, 502, 503)
_MONTHS = ("Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec")


@dataclass(frozen=True, slots=True)
class _Entry:
    day: int
    second: int
    level: str
    component: str
    text: str

    @property
    def clock(self) -> str:
        return f"{self.second // 3600:02}:{self.second // 60 % 60:02}:{self.second % 60:02}"


@dataclass(frozen=True, slots=True)
class _Request:
    address: str
    second: int
    method: str
    path: str
    status: int
    size: int


def _entries(draw: Draw, low: int, high: int) -> list[_Entry]:
    components, day = draw.words(5), draw.number(1, 27)
    seconds = sorted({draw.number(0, 86399) for _ in range(draw.number(low, high))})
    return [_Entry(day, second, draw.one(_LEVELS), draw.one(components), draw.sentence(2, 5)) for second in seconds]


def _application(entries: Sequence[_Entry], month: str) -> str:
    return lines(
        f"{month}-{entry.day:02} {entry.clock} {entry.level} [{entry.component}] {entry.text}" for entry in entries
    )


def _requests(draw: Draw, low: int, high: int) -> list[_Request]:
    addresses = [f"10.{draw.number(0, 255)}.{draw.number(0, 255)}.{draw.number(1, 254)}" for _ in range(12)]
    paths = [f"/{draw.word()}{draw.either('', '.html', '/' + draw.word(), '/index')}" for _ in range(8)]
    seconds = sorted(draw.number(0, 86399) for _ in range(draw.number(low, high)))
    return [
        _Request(
            addresses[draw.number(0, draw.number(2, 11))],
            second,
            draw.either("GET", "GET", "POST", "PUT"),
            paths[draw.number(0, draw.number(2, 7))],
            draw.one(_STATUSES),
            draw.number(100, 9999),
        )
        for second in seconds
    ]


def _access(draw: Draw, requests: Sequence[_Request]) -> str:
    date = f"{draw.number(1, 27):02}/{draw.one(_MONTHS)}/{draw.number(2015, 2025)}"
    return lines(
        f"{request.address} - - "
        f"[{date}:{request.second // 3600:02}:{request.second // 60 % 60:02}:{request.second % 60:02} +0000] "
        f'"{request.method} {request.path} HTTP/1.1" {request.status} {request.size}'
        for request in requests
    )


def _month(draw: Draw) -> str:
    return f"{draw.number(2015, 2025)}-{draw.number(1, 12):02}"


def _level(draw: Draw) -> DrawnTask:
    log, out, level = f"{draw.word()}.log", draw.output(), draw.one(_LEVELS)
    share = draw.number(1, 8) / 10
    entries = [
        _Entry(entry.day, entry.second, level, entry.component, entry.text) if draw.chance(share) else entry
        for entry in _entries(draw, 30, 200)
    ]
    month = _month(draw)
    found = [entry for entry in entries if entry.level == level]
    counts = draw.chance(0.6)
    return DrawnTask(
        instruction=draw.either(
            f"Write the number of lines with the level {level} in {log} to {out}.",
            f"How many lines of {log} contain {level}? Write the number to {out}.",
        )
        if counts
        else f"Write all lines of {log} with the level {level} to {out}.",
        files={log: _application(entries, month)},
        solution=f"grep {'-c ' if counts else ''}{level} {log} > {out}\n",
        checks=file_case(out, str(len(found)), "words") if counts else file_case(out, _application(found, month)),
    )


def _at_time(draw: Draw) -> DrawnTask:
    log, out, month = f"{draw.word()}.log", draw.output(), _month(draw)
    entries = _entries(draw, 20, 80)
    entry = draw.one(entries)
    return DrawnTask(
        instruction=draw.either(
            f"Write the line of {log} with the time {entry.clock} to {out}.",
            f"Which line of {log} has the time {entry.clock}? Write it to {out}.",
        ),
        files={log: _application(entries, month)},
        solution=f"grep {entry.clock} {log} > {out}\n",
        checks=file_case(out, _application([entry], month)),
    )


def _of_address(draw: Draw) -> DrawnTask:
    log, out, requests = f"{draw.word()}.log", draw.output(), _requests(draw, 120, 220)
    what = draw.number(0, 2)
    if what == 0:
        address = requests[0].address
        question, found, program = (
            f"requests of the address {address}",
            [r for r in requests if r.address == address],
            f'$1 == "{address}"',
        )
    elif what == 1:
        status = draw.either(200, 404, 500, 503)
        question, found, program = (
            f"requests with the status {status}",
            [r for r in requests if r.status == status],
            f"$9 == {status}",
        )
    else:
        hour = draw.number(0, 23)
        question = f"requests before {hour:02}:30:00"
        found, program = [r for r in requests if r.second < hour * 3600 + 1800], f'substr($4, 14) < "{hour:02}:30:00"'
    total = draw.chance(0.5)
    value = sum(r.size for r in found) if total else len(found)
    return DrawnTask(
        instruction=f"{log} is the access log of a web server; the last two fields of a line are the status and the "
        f"size of the response. Write the {'sum of the sizes of' if total else 'number of'} all {question} to {out}.",
        files={log: _access(draw, requests)},
        solution=f"awk '{program} {{ n += {'$10' if total else '1'} }} END {{ print n + 0 }}' {log} > {out}\n",
        checks=file_case(out, str(value), "words"),
    )


def _component(draw: Draw) -> DrawnTask:
    log, out, month, entries = f"{draw.word()}.log", draw.output(), _month(draw), _entries(draw, 60, 160)
    component, level = entries[0].component, draw.one(_LEVELS)
    found = [entry for entry in entries if entry.component == component and entry.level == level]
    if not found:
        return _component(draw)
    is_last = draw.chance(0.5)
    entry = found[-1 if is_last else 0]
    return DrawnTask(
        instruction=f"Find the {'last' if is_last else 'first'} line of {log} with the level {level} and the component "
        f"{component} (in brackets). Write its message, which is the text after the component, to {out}.",
        files={log: _application(entries, month)},
        solution=f"grep -F '{level} [{component}]' {log} | {'tail' if is_last else 'head'} -n 1 | sed 's/.*\\] //' > "
        f"{out}\n",
        checks=file_case(out, entry.text),
    )


def _top(draw: Draw) -> DrawnTask:
    log, out, requests, top = f"{draw.word()}.log", draw.output(), _requests(draw, 120, 220), draw.number(3, 6)
    what, field, of = draw.either(("addresses", "$1", 0), ("paths", "$7", 1))
    errors = draw.chance(0.5)
    keys = [request.path if of else request.address for request in requests if not errors or request.status >= 500]
    ranked = sorted(Counter(keys).items(), key=lambda item: (-item[1], item[0]))[:top]
    return DrawnTask(
        instruction=f"Find the {top} {what} with the most requests "
        f"{'that have a status of 500 or above ' if errors else ''}in the access log {log}. Write a line "
        f"{'PATH' if of else 'ADDRESS'} COUNT for each to {out}, the most frequent first. Sort those with the same "
        "count by bytes (LC_ALL=C).",
        files={log: _access(draw, requests)},
        solution=f"awk '{'$9 >= 500 ' if errors else ''}{{ print {field} }}' {log} | LC_ALL=C sort | uniq -c | "
        f"LC_ALL=C sort -k1,1nr -k2,2 | head -n {top} | awk '{{ print $2, $1 }}' > {out}\n",
        checks=file_case(out, lines(f"{key} {count}" for key, count in ranked)),
    )


def _hours(draw: Draw) -> DrawnTask:
    log, out, requests = f"{draw.word()}.log", draw.output(), _requests(draw, 100, 200)
    if draw.chance(0.5):
        counts = Counter(request.second // 3600 for request in requests)
        return DrawnTask(
            instruction=f"Count the requests of each hour in the access log {log}. Write a line HOUR COUNT for each "
            f"hour that has requests to {out}, in order, with two digits for the hour, such as 07 12.",
            files={log: _access(draw, requests)},
            solution=f"cut -d: -f2 {log} | sort | uniq -c | awk '{{ print $2, $1 }}' > {out}\n",
            checks=file_case(out, lines(f"{hour:02} {counts[hour]}" for hour in sorted(counts))),
        )
    counts_by, sizes = Counter[str](), Counter[str]()
    for request in requests:
        counts_by[request.method] += 1
        sizes[request.method] += request.size
    return DrawnTask(
        instruction=f"Write a line METHOD COUNT BYTES for each HTTP method of the access log {log} to {out}, sorted by "
        "method: the number of its requests and the sum of the sizes of their responses, which are the last field of "
        "each line.",
        files={log: _access(draw, requests)},
        solution=f"""awk '{{ sub(/"/, "", $6); n[$6]++; size[$6] += $10 }}
END {{ for (m in n) print m, n[m], size[m] }}' {log} | LC_ALL=C sort > {out}
""",
        checks=file_case(out, lines(f"{method} {counts_by[method]} {sizes[method]}" for method in sorted(sizes))),
    )


def _levels(draw: Draw) -> DrawnTask:
    folder, out, month = draw.word(), draw.output(), _month(draw)
    logs = {f"{name}.log": _entries(draw, 20, 50) for name in draw.words(3)}
    level = draw.one(_LEVELS[2:])
    counts = Counter(entry.component for entries in logs.values() for entry in entries if entry.level == level)
    return DrawnTask(
        instruction=f"The logs {folder}/*.log have lines such as "
        f"`{_application([next(iter(logs.values()))[0]], month).strip()}`. Write a line COMPONENT COUNT to {out} for "
        f"each component (in brackets) that has lines with the level {level}: the number of these lines in all logs. "
        "Sort by component.",
        files={f"{folder}/{name}": _application(entries, month) for name, entries in logs.items()},
        solution=f"cat {folder}/*.log | awk '$3 == \"{level}\" {{ print $4 }}' | tr -d '[]' | LC_ALL=C sort | uniq -c "
        f"| awk '{{ print $2, $1 }}' > {out}\n",
        checks=file_case(out, lines(f"{key} {counts[key]}" for key in sorted(counts))),
    )


def _durations(draw: Draw) -> DrawnTask:
    script = draw.script("sh")
    begin, end = draw.either(("start", "end"), ("begin", "done"), ("open", "close"), ("login", "logout"))

    def log() -> tuple[str, list[str]]:
        events, found = list[tuple[int, str]](), list[str]()
        for id in draw.some(range(100, 1000), draw.number(12, 24)):
            first = draw.number(0, 80000)
            events.append((first, f"{begin} {id}"))
            if draw.chance(0.8):
                last = first + draw.number(1, 6000)
                events.append((last, f"{end} {id}"))
                found.append(f"{id} {last - first}")
        day = f"{draw.number(2015, 2025)}-{draw.number(1, 12):02}-{draw.number(1, 28):02}"
        text = [f"{day}T{_Entry(0, second, '', '', '').clock} {event}" for second, event in sorted(events)]
        return lines(text), sorted(found, key=lambda item: (-int(item.split()[1]), item))

    visible, (hidden, found) = log(), log()
    program = f"""
awk '{{ split(substr($1, 12), t, ":"); s = t[1] * 3600 + t[2] * 60 + t[3] }}
$2 == "{begin}" {{ at[$3] = s }}
$2 == "{end}" {{ print $3, s - at[$3] }}' "$1" | LC_ALL=C sort -k2,2nr -k1,1
"""
    return DrawnTask(
        instruction=f"The lines of jobs.log are `TIME {begin} ID` and `TIME {end} ID`, all of one day. Write a script "
        f"{script}, run as `bash {script} LOG`, as in `bash {script} jobs.log`, which prints a line ID SECONDS for "
        "each id that has both: the seconds between them. The longest comes first; equal ones are sorted by id. Ids "
        f"without `{end}` are left out. The script is run on other logs too.",
        files={"jobs.log": visible[0]},
        solution=write_file(script, program),
        checks=run_case(f"bash {script} other.log", files={"other.log": hidden}, stdout=lines(found)),
    )


def _rates(draw: Draw) -> DrawnTask:
    script, first = draw.script("sh"), draw.either(400, 500)
    visible, hidden = _requests(draw, 60, 100), _requests(draw, 100, 200)
    counts, errors, sizes = Counter[str](), Counter[str](), Counter[str]()
    for request in hidden:
        path = request.path
        counts[path] += 1
        errors[path] += request.status >= first
        sizes[path] = max(sizes[path], request.size)
    found = [f"{path} {counts[path]} {errors[path] * 100 // counts[path]}% {sizes[path]}" for path in sorted(counts)]
    program = f"""
awk '{{ n[$7]++; if ($9 >= {first}) bad[$7]++; if ($10 > most[$7]) most[$7] = $10 }}
END {{ for (path in n) print path, n[path], int(bad[path] * 100 / n[path]) "%", most[path] }}' "$1" | LC_ALL=C sort
"""
    return DrawnTask(
        instruction="access.log is the log of a web server; the last two fields of a line are the status and the size "
        f"of the response. Write a script {script}, run as `bash {script} LOG`, as in `bash {script} access.log`, "
        f"which prints a line PATH COUNT ERRORS% LARGEST for each requested path, such as {visible[0].path} 40 12% "
        f"8123: the number of its requests, the percentage of those with a status of {first} or above, rounded down, "
        "and the largest size. Sort the lines by path, by bytes (LC_ALL=C). The script is run on other logs too.",
        files={"access.log": _access(draw, visible)},
        solution=write_file(script, program),
        checks=run_case(
            f"bash {script} other.log", files={"other.log": _access(draw, hidden)}, stdout=lines(sorted(found))
        ),
    )


def _guesses(draw: Draw) -> DrawnTask:
    script, least, window = draw.script("py"), draw.number(3, 5), draw.either(30, 60, 120)

    def log() -> str:
        addresses = [f"10.0.{draw.number(0, 255)}.{draw.number(1, 254)}" for _ in range(5)]
        users, events = draw.words(4), list[tuple[int, str]]()
        for second in sorted({draw.number(0, 2999) for _ in range(draw.number(60, 90))}):
            address = addresses[draw.number(0, draw.number(0, 4))]
            word = "accepted" if draw.chance(0.25) else "failed"
            events.append((second, f"{word} user={draw.one(users)} from={address}"))
        return lines(f"{_Entry(0, 36000 + second, '', '', '').clock} sshd: {event}" for second, event in sorted(events))

    def alerts(text: str) -> list[str]:
        failed: dict[str, list[int]] = {}
        found = []
        for line in text.splitlines():
            clock, _, word, user, address = line.split()
            hours, minutes, seconds = map(int, clock.split(":"))
            now = hours * 3600 + minutes * 60 + seconds
            recent = [time for time in failed.get(address, []) if now - time <= window]
            if word == "failed":
                recent.append(now)
            elif len(recent) >= least:
                found.append(f"{clock} {address.removeprefix('from=')} {user.removeprefix('user=')} {len(recent)}")
                recent = []
            failed[address] = recent if word == "failed" or len(recent) < least else []
        return found

    visible, hidden = log(), log()
    if not alerts(hidden):
        return _guesses(draw)
    program = f"""
import re, sys
failed = {{}}
for line in open(sys.argv[1]):
    word, user, address = re.search(r"sshd: (\\w+) user=(\\S+) from=(\\S+)", line).groups()
    now = int(line[:2]) * 3600 + int(line[3:5]) * 60 + int(line[6:8])
    times = failed.setdefault(address, [])
    if word == "failed":
        times.append(now)
        continue
    count = sum(now - time <= {window} for time in times)
    if count >= {least}:
        print(line[:8], address, user, count)
        times.clear()
"""
    return DrawnTask(
        instruction=f"auth.log has failed and accepted logins of one day, in order. Write a Python program {script}, "
        f"run as `python3 {script} LOG`, as in `python3 {script} auth.log`, which finds guessed passwords: an accepted "
        f"login with at least {least} failed logins from the same address (of any users) in the {window} seconds "
        f"before it (exactly {window} seconds before counts). Print a line TIME ADDRESS USER FAILED for each: the "
        "time, address and user of the accepted login and the number of these failed logins. Failed logins that were "
        "counted for a printed line, and all earlier ones of the address, do not count again. The program is run on "
        "other logs too.",
        files={"auth.log": visible},
        solution=write_file(script, program),
        checks=run_case(f"python3 {script} other.log", files={"other.log": hidden}, stdout=lines(alerts(hidden))),
    )


def _trace(draw: Draw) -> DrawnTask:
    script, (front, back) = draw.script("py"), draw.words(2)
    limit = draw.number(20, 60) * 10

    def logs() -> tuple[str, str, list[str]]:
        requests, calls, found = list[str](), list[tuple[int, str]](), list[str]()
        for second in sorted({draw.number(0, 99999) for _ in range(draw.number(16, 26))}):
            id, path = f"{draw.number(0, 16**8 - 1):08x}", f"/{draw.word()}"
            status = draw.either(200, 200, 404, 500, 503)
            requests.append(f"{second} id={id} path={path} status={status}")
            mine = list(zip(draw.some(range(1, 500), draw.number(0, 4)), draw.words(4), strict=False))
            calls += [
                (second + draw.number(0, 99), f"service={service} id={id} took={took}ms") for took, service in mine
            ]
            total = sum(took for took, _ in mine)
            if status >= 500 or total > limit:
                found.append(f"{path} {status} {total} {max(mine)[1] if mine else '-'}")
        return lines(requests), lines(f"{second} {call}" for second, call in sorted(calls)), found

    visible, (requests, calls, found) = logs(), logs()
    program = f"""
import sys
def read(path):
    return [dict(part.split("=") for part in line.split()[1:]) for line in open(path)]
calls = {{}}
for call in read(sys.argv[2]):
    calls.setdefault(call["id"], []).append((int(call["took"][:-2]), call["service"]))
for request in read(sys.argv[1]):
    mine = calls.get(request["id"], [])
    total = sum(took for took, _ in mine)
    if int(request["status"]) >= 500 or total > {limit}:
        print(request["path"], request["status"], total, max(mine)[1] if mine else "-")
"""
    return DrawnTask(
        instruction=f"{front}.log has the requests of a web server, {back}.log the calls of other services for these "
        f"requests; id connects them. Write a Python program {script}, run as `python3 {script} REQUESTS CALLS`, as in "
        f"`python3 {script} {front}.log {back}.log`, which prints a line PATH STATUS TOTAL SLOWEST for each request "
        f"with a status of 500 or above or whose calls took more than {limit} ms in total, in the order of the "
        "requests. TOTAL is the sum of ms of its calls (0 without calls), SLOWEST is the service of its slowest call "
        "(- without calls). The program is run on other logs too.",
        files={f"{front}.log": visible[0], f"{back}.log": visible[1]},
        solution=write_file(script, program),
        checks=run_case(
            f"python3 {script} a.log b.log", files={"a.log": requests, "b.log": calls}, stdout=lines(found)
        ),
    )


FAMILY = Family(
    name="logs",
    summary="Count, rank, correlate and summarize the entries of logs of servers and programs.",
    kinds={
        1: (_level, _at_time),
        2: (_of_address, _component),
        3: (_top, _hours, _levels),
        4: (_durations, _rates),
        5: (_guesses, _trace),
    },
)
