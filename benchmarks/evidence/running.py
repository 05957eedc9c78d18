"""Running a program for evidence, and recording its exit code, duration and output."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from envkit import clock


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
