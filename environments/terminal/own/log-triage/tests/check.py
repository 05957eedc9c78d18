"""Compares the reports of the visible log and of one that the agent has not seen with recomputed ones."""

import random
from collections import Counter, defaultdict

from harness import WORK, private_folder, read, require, run, write

VISIBLE = 3
HIDDEN = 8086
AGENTS = ("agent/1.0", "probe [v2] 500 12", 'odd \\"quoted\\" 503', "Mozilla/5.0 (X11; Linux)")
MONTHS = {1: "Jan", 3: "Mar", 11: "Nov"}


def log_and_report(seed):
    """Return the log of a seed, and the report that it should give."""
    pick = random.Random(seed).random
    addresses = [f"{10 + int(pick() * 190)}.0.{int(pick() * 3)}.{int(pick() * 250)}" for _ in range(12)]
    day, month = 10 + int(pick() * 15), sorted(MONTHS)[int(pick() * 3)]
    requests, sizes, lines = Counter(), Counter(), []
    minutes = defaultdict(lambda: [0, 0])
    for number in range(40):
        hour, minute = 8 + number // 12, (number * 5) % 60
        share = (0.0, 0.05, 0.1, 0.4)[int(pick() * 4)]
        for index in range(15 + int(pick() * 20)):
            address = addresses[int(pick() * pick() * len(addresses))]
            status = (500, 502, 503, 599)[int(pick() * 4)] if pick() < share else (200, 304, 404, 499)[int(pick() * 4)]
            size = "-" if pick() < 0.1 else str(int(pick() * 5000))
            time = f"{day}/{MONTHS[month]}/2024:{hour:02}:{minute:02}:{index % 60:02} +0000"
            agent = AGENTS[int(pick() * len(AGENTS))]
            line = f'{address} - - [{time}] "GET /p/{index}?q=500 HTTP/1.1" {status} {size} "-" "{agent}"'
            if pick() < 0.02:
                lines.append(line[: int(pick() * 60) + 8])
                continue
            lines.append(line)
            requests[address] += 1
            sizes[address] += 0 if size == "-" else int(size)
            seen = minutes[f"2024-{month:02}-{day}T{hour:02}:{minute:02}"]
            seen[0] += status >= 500
            seen[1] += 1
    for index in range(0, len(lines) - 60, 7):
        lines[index], lines[index + 40] = lines[index + 40], lines[index]
    busiest = sorted(requests, key=lambda address: (-requests[address], address))[:5]
    report = [f"client {address} {requests[address]} {sizes[address]}" for address in busiest]
    for minute, (errors, total) in sorted(minutes.items()):
        if total >= 20 and 10 * errors >= total:
            report.append(f"burst {minute} {errors} {total}")
    return "\n".join(lines) + "\n", report


def verify():
    _, report = log_and_report(VISIBLE)
    require(read(WORK / "report.txt").splitlines() == report, "report.txt is wrong")
    for seed in (HIDDEN, HIDDEN + 1):
        log, report = log_and_report(seed)
        file = private_folder() / "some.log"
        write(file, log)
        result = run([WORK / "triage", file])
        require(result.returncode == 0, f"triage failed: {result.stderr[-500:]}")
        require(result.stdout.splitlines() == report, f"the report of another log is wrong: {result.stdout[:500]}")
