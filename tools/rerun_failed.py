"""Run the tests that failed in the last run of pytest once more, one by one: ``rerun_failed.py``.

Their names are in pytest's cache. If at most three tests failed and each of them passes now, the exit code is 0,
and the tests are printed as flaky and written to ``.reports/flaky.txt``. Otherwise the exit code is 1.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

AT_MOST = 3


def main() -> int:
    names = json.loads(Path(".pytest_cache/v/cache/lastfailed").read_text())
    failed = sorted(re.sub(r"@[^]]+$", "", name) for name in names)  # xdist adds the test's group
    if not 0 < len(failed) <= AT_MOST:
        print(f"{len(failed)} tests failed. Only 1 to {AT_MOST} are run again.", file=sys.stderr)
        return 1
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "--junitxml=.reports/again.xml"]
    if subprocess.run([*command, *failed], check=False).returncode != 0:
        return 1
    lines = [f"flaky: {name} (failed at first, passed when it was run again)" for name in failed]
    print("\n".join(lines), file=sys.stderr)
    reports = Path(".reports")
    reports.mkdir(exist_ok=True)
    (reports / "flaky.txt").write_text("".join(f"{line}\n" for line in lines))
    return 0


if __name__ == "__main__":
    sys.exit(main())
