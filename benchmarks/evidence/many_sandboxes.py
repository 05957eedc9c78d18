"""Many sandboxes at once: the memory of each, the response times, and how long it takes to stop all.

    python benchmarks/evidence/many_sandboxes.py

Runs `benchmarks/bench_many_sandboxes.py`. The exit status is 1 if a claim does not hold, a sandbox was lost, or
processes are left at the end.
"""

from __future__ import annotations

import sys
from functools import partial

from record import ROOT, Evidence, parser, run

NAME = "many-sandboxes"
STALE_AFTER = (
    "sandbox",
    "benchmarks/bench_many_sandboxes.py",
    "benchmarks/servers/processes.py",
    "benchmarks/waiting.py",
)
TWIN = "tests/project/test_benchmarks.py::test_many_sandboxes_answer_and_end"


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--docker", type=int, default=200, help="number of containers")
    arguments.add_argument("--local", type=int, default=1000, help="number of bubblewrap sandboxes")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    sizes = ["--docker", str(asked.docker), "--local", str(asked.local)]
    command = [sys.executable, "benchmarks/bench_many_sandboxes.py", *sizes]
    part = f"{asked.docker} containers, {asked.local} sandboxes of bubblewrap"
    return int(evidence.part(part, partial(run, command, ROOT))["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
