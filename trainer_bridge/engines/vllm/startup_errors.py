"""Finds in the log of a vLLM server why it did not start."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_CAUSES: Mapping[str, str] = {
    r"Failed to load plugin|weight transfer.*envkit_file|envkit_file.*(not|un)": (
        "vLLM could not load envkit's weight plug-in"
    ),
    r"out of memory|MemoryError|No available memory|Cannot allocate memory|larger than the available"
    r"|Free memory on device|DefaultCPUAllocator": (
        "it ran out of memory; lower the variable VLLM_CPU_KVCACHE_SPACE (GiB) on a CPU or "
        "engine.gpu_memory_utilization on a GPU, or use a smaller model"
    ),
    r"No module named '?vllm": "the package vllm is not installed for this interpreter",
    r"[Aa]ddress already in use": "another program took the port",
    r"unrecognized arguments|error: argument|invalid choice": "vLLM does not accept an argument; see engine.arguments",
}
"""Causes by the regular expression that finds them in a log, the most specific first."""
_PREFIX = r"^(?:\([^)]*\) )?(?:[A-Z]+ [^\]]*\] )?"
"""The prefix of a line of vLLM's log: process, level, time and source."""
_ERROR = re.compile(_PREFIX + r"((?:\w+\.)*\w*(?:Error|Exception|error)\b: .+)$")
_FOLLOWED = "Engine core initialization failed"
"""Part of the error that follows the cause, which an earlier line contains."""
_MAX_LINE = 400


def why_not_started(log: Path, returncode: int | None) -> str:
    """Return why a server ended before it was ready, in one line, from its log.

    Args:
        log: Its standard output and error.
        returncode: Its exit code, or the negative number of a signal; None if it was ended because it took too long.
    """
    lines = [line.rstrip() for line in log.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()]
    decisive = _decisive(lines)
    for pattern, cause in _CAUSES.items():
        if line := next((line for line in lines if re.search(pattern, line)), None):
            return f"{cause} ({_shown(line)})"
    if returncode == -9:
        return "it was killed, probably because the machine ran out of memory"
    return decisive or (_shown(lines[-1]) if lines else "its log is empty")


def _decisive(lines: list[str]) -> str | None:
    errors = [found[1] for line in lines if (found := _ERROR.match(line)) and _FOLLOWED not in line]
    return errors[0][:_MAX_LINE] if errors else None


def _shown(line: str) -> str:
    return re.sub(_PREFIX, "", line)[:_MAX_LINE]
