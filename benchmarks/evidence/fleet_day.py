"""Simulate days of 1,000 sandboxes that fail at random, and check that each sandbox and each lease ends exactly once.

    python benchmarks/evidence/fleet_day.py

The simulation runs on virtual time, and takes about half a minute of CPU time per day. Each day has another seed. The
exit status is 1 if a check fails.
"""

from __future__ import annotations

import json
import os
import sys
from functools import partial
from typing import Any

from record import Evidence, parser

from tests.sim.fleet_day import NODES, SANDBOXES_PER_NODE, live, problems

NAME = "fleet-day"
STALE_AFTER = ("sandbox/pool", "tests/sandbox/fake/backend.py", "envkit/restarts.py", "envkit/clock.py", "tests/sim")
TWIN = "tests/sim/test_fleet_day.py::test_each_sandbox_and_lease_ends_once_and_the_counts_are_reproducible"


def day(hours: float, seed: int) -> dict[str, Any]:
    """Simulate `hours` of virtual time, and return the outcomes of leases and sandboxes."""
    users = NODES * SANDBOXES_PER_NODE
    began_s = sum(os.times()[:2])
    lived = live(hours, users, seed)
    return {
        "virtual_hours": hours,
        "users": users,
        "leases": dict(lived.leases),
        "starts": lived.starts,
        "failed_starts": lived.failed_starts,
        "losses": lived.losses,
        "longest_call_s": round(lived.longest_call_s, 1),
        "cpu_s": round(sum(os.times()[:2]) - began_s, 1),
        "problems": problems(lived, users),
    }


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--days", type=int, default=3, help="number of days, each with another seed")
    arguments.add_argument("--hours", type=float, default=24, help="virtual hours per day")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    are_whole = []
    for seed in range(asked.days):
        name = f"day-{seed}-of-{asked.hours:g}-hours"
        figures = evidence.part(name, partial(day, asked.hours, seed))
        print(name, json.dumps(figures), flush=True)
        are_whole.append(not figures["problems"])
    return 0 if all(are_whole) else 1


if __name__ == "__main__":
    sys.exit(main())
