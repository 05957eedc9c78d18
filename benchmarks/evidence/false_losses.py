"""Check that no healthy sandbox is declared lost while all processors are busy.

    python benchmarks/evidence/false_losses.py --minutes 30

Runs `benchmarks/bench_false_losses.py`; half of the sandboxes are containers and half use bubblewrap. The exit status
is 1 if a sandbox was lost or a program failed.
"""

from __future__ import annotations

import sys
from functools import partial

from record import ROOT, Evidence, parser, run

NAME = "false-losses"
STALE_AFTER = ("sandbox", "benchmarks/bench_false_losses.py", "benchmarks/servers/processes.py")
TWIN = "tests/project/test_benchmarks.py::test_sandboxes_on_busy_processors_are_watched"


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--minutes", type=float, default=30, help="duration in minutes")
    arguments.add_argument("--docker", type=int, default=100, help="number of containers")
    arguments.add_argument("--local", type=int, default=100, help="number of bubblewrap sandboxes")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    sizes = ["--minutes", str(asked.minutes), "--docker", str(asked.docker), "--local", str(asked.local)]
    command = [sys.executable, "benchmarks/bench_false_losses.py", *sizes]
    part = f"{asked.docker} containers, {asked.local} sandboxes of bubblewrap, {asked.minutes:g} minutes"
    return int(evidence.part(part, partial(run, command, ROOT))["exit_code"])


if __name__ == "__main__":
    sys.exit(main())
