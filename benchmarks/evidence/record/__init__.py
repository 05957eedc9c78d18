"""Evidence: measurements that take too long for a test, stored with machine and commit in ``docs/evidence/NAME.json``.

The programs in this folder measure in parts. Each part is stored as soon as it is complete, so an interrupted run can
continue. At the start, parts are removed if a later commit changed one of the paths in `STALE_AFTER`. Each program has
three constants that `tools/evidence_status.py` and the tests read:

    NAME          name of its evidence file, without ``.json``
    STALE_AFTER   files and folders of the repository; a later change to one of them makes the figures stale
    TWIN          a test that makes a short version of the measurement, as ``FILE::FUNCTION``

Programs can import modules that the tests share, as ``tests.FOLDER.MODULE``.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from envkit import clock

ROOT = Path(__file__).resolve().parents[3]
FOLDER = ROOT / "docs" / "evidence"

if str(ROOT) not in sys.path:
    sys.path.append(str(ROOT))


def parser(doc: str | None, name: str) -> argparse.ArgumentParser:
    """Return a parser with the arguments of every program: ``--folder`` and ``--fresh``."""
    made = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    made.add_argument("--folder", type=Path, default=FOLDER, help=f"where {name}.json is written")
    made.add_argument("--fresh", action="store_true", help="measure parts again that are already stored")
    return made


class Evidence:
    """One file of evidence.

    Args:
        name: Name of the file, without ``.json``.
        stale_after: Files and folders of the repository; a later change to one of them makes the figures stale.
        folder: Folder of the file.
        fresh: Whether to measure again the parts that are already stored.
    """

    def __init__(self, name: str, *, stale_after: Sequence[str], folder: Path = FOLDER, fresh: bool = False) -> None:
        self._file = folder / f"{name}.json"
        commit = _git("rev-parse", "HEAD")
        old = {} if fresh or not self._file.exists() else json.loads(self._file.read_text())
        self._parts: dict[str, Any] = old["parts"] if old and _unchanged(old["commit"], stale_after) else {}
        self._facts = {
            "command": " ".join([Path(sys.argv[0]).name, *sys.argv[1:]]),
            "commit": commit,
            "has_uncommitted_changes": bool(_git("status", "--porcelain", "--untracked-files=no", ":!docs/evidence")),
            "machine": _machine(),
            "stale_after": list(stale_after),
        }

    def has(self, name: str) -> bool:
        """Return whether the figures of a part are stored."""
        return name in self._parts

    def part(self, name: str, measure: Callable[[], Any]) -> Any:
        """Return the stored figures of a part; if there are none, measure and store them.

        Args:
            name: Name of the part.
            measure: Returns JSON-compatible figures. They are stored with the date and load average at the start.
        """
        if name not in self._parts:
            load = os.getloadavg()[0]
            date = datetime.now(UTC).isoformat(timespec="seconds")
            self._parts[name] = {"date": date, "load_before": round(load, 2), "figures": measure()}
            self._write()
        return self._parts[name]["figures"]

    def _write(self) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        new = self._file.with_suffix(".new")
        new.write_text(json.dumps({**self._facts, "parts": self._parts}, indent=1) + "\n")
        new.replace(self._file)


def run(command: Sequence[str | Path], folder: Path) -> dict[str, Any]:
    """Run a command in `folder`, show its output, and return ``exit_code``, ``seconds`` and ``lines``."""
    print(*command, flush=True)
    begin = clock.stopwatch()
    lines: list[str] = []
    with subprocess.Popen(
        command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            print(line, end="", flush=True)
            lines.append(line.rstrip())
    return {"exit_code": process.returncode, "seconds": round(clock.stopwatch() - begin), "lines": lines}


def _unchanged(commit: str, paths: Sequence[str]) -> bool:
    """Return whether no commit after `commit` changed `paths`; uncommitted changes do not count."""
    command = ["git", "diff", "--quiet", commit, "HEAD", "--", *paths]
    return subprocess.run(command, cwd=ROOT, check=False, stderr=subprocess.DEVNULL).returncode == 0


def _machine() -> dict[str, Any]:
    memory_gib = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    return {
        "cores": os.cpu_count(),
        "memory_gib": round(memory_gib),
        "kernel": platform.release(),
        "python": platform.python_version(),
    }


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout.strip()
