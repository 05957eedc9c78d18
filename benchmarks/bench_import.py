"""The CPU time that ``import envkit`` adds to the start of Python, compared with ``import gymnasium``."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys

from settings import parsed, parser

PROGRAMS = {
    "bare interpreter": "pass",
    "import envkit": "import envkit",
    "import gymnasium": "import gymnasium",
    "envkit.make": "import envkit; envkit.make('FrozenLake-v0').close()",
}


def cpu_s(program: str) -> float:
    """Return the CPU seconds, user and system, of a new interpreter that runs `program`."""
    process = subprocess.Popen([sys.executable, "-c", program])
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        sys.exit(f"{program!r} failed")
    return usage.ru_utime + usage.ru_stime


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--runs", type=int, default=9, help="rounds of which the median counts")
    settings = parsed(arguments, runs=1)
    # Each round runs all programs, so that other load affects all of them. The first round is a warm-up.
    rounds = [{name: cpu_s(program) for name, program in PROGRAMS.items()} for _ in range(settings.runs + 1)][1:]
    median = {name: statistics.median(each[name] for each in rounds) for name in PROGRAMS}
    bare = median.pop("bare interpreter")
    for name, seconds in median.items():
        print(f"{name:30} adds {1000 * (seconds - bare):6.0f} ms of CPU")
    ratio = (median["import envkit"] - bare) / (median["import gymnasium"] - bare)
    print(f"import envkit / import gymnasium: {ratio:.2f}")


if __name__ == "__main__":
    main()
