"""Run all tests as on four fresh machines: as root and as an ordinary user, with filled and with empty caches.

    python benchmarks/evidence/clones/fresh_machine.py [--only NAME] [--args="-k lake"]

Each run clones HEAD and calls ``make test`` there. The ordinary user is a new one, whose home contains only pip's
settings. If that user cannot reach root's Python, the system's Python of the same version is used. The sums are those
of pytest's reports; tests that passed when they were run again count as passed. It requires root. A run takes 20 to 40
minutes. The exit status is 1 if a test failed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from xml.etree import ElementTree

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser, run

NAME = "fresh-machine"
STALE_AFTER = (
    "docker",
    "sandbox/bubblewrap",
    "tests/conftest.py",
    "tools/cached_venv.py",
)  # what depends on the machine
TWIN = "tests/project/test_fresh_machine.py::test_the_sums_are_those_of_the_reports"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_REPORTS = ("parallel.xml", "alone.xml", "again.xml")
_NEEDED = ("PIP_", "ENVKIT_REQUIRE", "WORKERS")


@dataclass(frozen=True, slots=True)
class Machine:
    """A machine to imitate: who runs the tests, in a clone in which folder, and with which cache."""

    is_root: bool
    folder: str
    above: Path
    name: str = "envkit"
    has_cache: bool = False


MACHINES = {
    "root": Machine(True, "beside the checkout", ROOT.parent, has_cache=True),
    "user-tmp": Machine(False, "below /tmp", Path("/tmp")),
    "user-space": Machine(False, "path with a space and an umlaut", Path("/var/tmp"), name="Büro 2/envkit"),
    "root-empty": Machine(True, "beside the checkout", ROOT.parent),
}


@contextmanager
def new_user(home: Path) -> Iterator[str]:
    """Add an ordinary user for the duration of the block."""
    name = f"envkit-{os.getpid()}"
    subprocess.run(["useradd", "--create-home", "--home-dir", home, "--shell", "/bin/sh", name], check=True)
    try:
        settings = Path("~/.config/pip").expanduser()
        if settings.is_dir():
            shutil.copytree(settings, home / ".config" / "pip")
            subprocess.run(["chown", "-R", f"{name}:", home / ".config"], check=True)
        yield name
    finally:
        subprocess.run(["userdel", "--force", name], check=False, capture_output=True)


def python_of(user: str) -> str:
    """Return a Python that `user` can run: ours, or else the system's of the same version."""
    ours = Path(sys.executable).resolve()
    is_reachable = subprocess.run(["runuser", "-u", user, "--", "test", "-x", ours], check=False).returncode == 0
    found = str(ours) if is_reachable else shutil.which(f"python3.{sys.version_info.minor}", path=_PATH)
    if found is None:
        sys.exit(f"only root can run {ours}; install python3.{sys.version_info.minor} for all users")
    return found


def tested(machine: Machine, arguments: str) -> dict[str, Any]:
    """Run ``make test`` in a new clone, and return who ran it where, and the sums."""
    commit = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    user = "root" if machine.is_root else "ordinary user"
    about = {"commit": commit.strip(), "user": user, "folder": machine.folder}
    with TemporaryDirectory(dir=machine.above, prefix="envkit-clone-") as place:
        Path(place).chmod(0o755)
        clone = Path(place, machine.name)
        clone.parent.mkdir(exist_ok=True)
        subprocess.run(["git", "clone", "--quiet", ROOT, clone], check=True)
        make = ["make", "test", f"ARGS={arguments}"]
        if machine.is_root:
            command = make if machine.has_cache else ["env", f"ENVKIT_CACHE={place}/cache", *make]
            done = run(command, clone)
        else:
            with new_user(Path(place, "home")) as name:
                subprocess.run(
                    ["chown", "-R", f"{name}:", clone.parent if clone.parent != Path(place) else clone], check=True
                )
                kept = [f"{key}={value}" for key, value in os.environ.items() if key.startswith(_NEEDED)]
                env = ["env", "-i", f"HOME={place}/home", f"PATH={_PATH}", "LANG=C.UTF-8", *kept]
                done = run(["runuser", "-u", name, "--", *env, *make, f"PYTHON={python_of(name)}"], clone)
        times = {"exit_code": done["exit_code"], "seconds": done["seconds"]}
        return {**about, "cache": "filled" if machine.has_cache else "empty", **times, **sums(clone / ".reports")}


def sums(reports: Path) -> dict[str, Any]:
    """Return the numbers of tests by outcome in pytest's reports, the reasons of skips, and the failures."""
    outcomes: dict[str, str] = {}
    reasons: Counter[str] = Counter()
    for name in _REPORTS:
        if (reports / name).exists():
            for case in ElementTree.parse(reports / name).iter("testcase"):
                key = re.sub(r"@[^]]+$", "", f"{case.get('classname')}.{case.get('name')}")  # xdist adds the group
                skipped = case.find("skipped")
                is_failed = case.find("failure") is not None or case.find("error") is not None
                outcomes[key] = "failed" if is_failed else "passed" if skipped is None else "skipped"
                if skipped is not None:
                    reasons[(skipped.get("message") or "").removeprefix("Skipped: ")] += 1
    counts: Mapping[str, int] = Counter(outcomes.values())
    return {
        **{outcome: counts.get(outcome, 0) for outcome in ("passed", "failed", "skipped")},
        "reasons": dict(reasons.most_common()),
        "failures": sorted(key for key, outcome in outcomes.items() if outcome == "failed"),
    }


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=MACHINES, action="append", help="only this run; repeatable")
    arguments.add_argument("--args", default="", help="arguments of pytest, for a trial")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    found = {name: evidence.part(name, partial(tested, MACHINES[name], asked.args)) for name in asked.only or MACHINES}
    if failed := [name for name, figures in found.items() if figures["exit_code"]]:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
