"""Checks that replay the recorded episodes in a second process, which must play them in the same way and clean up.

``python -m envkit.checks.second_process FILE`` is the second process. It reads pickled seeds and actions from standard
input and plays them. The JSON file that it writes contains the episodes, or why they could not be played, and the
processes and files that were left behind.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from threading import Event
from typing import Any

from envkit import clock, registry
from envkit.checks.recorded import (
    SEEDED,
    EnvUnderTest,
    FailedCheckError,
    PlayedEpisode,
    SkippedCheckError,
    require_same,
)
from envkit.errors import ConfigError, EnvkitError
from envkit.types import JSON

_TIMEOUT_S = 120.0
_ENDING_S = 2.0
"""Seconds within which child processes must end after close."""
_OWN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""Processes that Python itself keeps running until it exits."""
_SUBREAPER = 36
_IMPORTABLE = "register it as 'module:Class'"


def same_in_two_processes(env: EnvUnderTest) -> str:
    for played, other in zip(env.episodes, _play_apart(env)["episodes"], strict=True):
        require_same(played.as_json(), other, "two processes play the same seed differently", SEEDED)
    return f"{len(env.episodes)} episodes here and in a new process"


def nothing_is_left_behind(env: EnvUnderTest) -> str:
    result = _play_apart(env)
    if result["processes"]:
        raise FailedCheckError(f"after close, a process still ran: {result['processes'][0]}; end it in close")
    if result["files"]:
        raise FailedCheckError(f"after close, a temporary file was left: {result['files'][0]}; remove it in close")
    return "no process and no temporary file after close"


@lru_cache(maxsize=1)
def _play_apart(env: EnvUnderTest) -> dict[str, Any]:
    """Play the recorded episodes in a new process with another hash seed; return them, and what it left behind."""
    try:
        request = pickle.dumps((env.spec, env.options, [(played.seed, played.actions) for played in env.episodes]))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SkippedCheckError(f"another process cannot import the environment ({error}); {_IMPORTABLE}") from None
    with tempfile.TemporaryDirectory(prefix="check-env-") as folder:
        result, log, temporary = (Path(folder, name) for name in ("result", "log", "tmp"))
        temporary.mkdir()
        variables = {
            **os.environ,
            "PYTHONHASHSEED": "2" if os.environ.get("PYTHONHASHSEED") == "1" else "1",
            "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
            "TMPDIR": str(temporary),
        }
        words = [sys.executable, "-m", __name__, str(result)]
        try:
            with log.open("wb") as output:
                subprocess.run(
                    words, env=variables, input=request, stdout=output, stderr=output, timeout=_TIMEOUT_S, check=False
                )
        except subprocess.TimeoutExpired:
            raise FailedCheckError(
                f"{len(env.seeds)} episodes in a new process exceeded the timeout of {_TIMEOUT_S:g} s"
            ) from None
        if not result.exists():
            last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
            raise FailedCheckError(f"a new process crashed while playing the environment: {last[0]}")
        found: dict[str, Any] = json.loads(result.read_text())
    if "missing" in found:
        raise SkippedCheckError(f"another process cannot import the environment ({found['missing']}); {_IMPORTABLE}")
    if "error" in found:
        raise FailedCheckError(f"in a new process, {found['error']}")
    return found


def main() -> None:
    # Become the parent of daemons that the environment starts, so that `_descendants` finds them.
    with suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    result: dict[str, JSON]
    try:
        spec, options, recorded = pickle.load(sys.stdin.buffer)
        # Registering fails if importing the environment's package has registered it already.
        with suppress(ConfigError):
            registry.register(**{one.name: getattr(spec, one.name) for one in fields(spec)})
        registry.load(spec.entry_point)
        env = EnvUnderTest(spec.id, options, [seed for seed, _ in recorded])
        episodes: list[JSON] = []
        for seed, actions in recorded:
            with env.opened() as instance:
                episodes.append(env.replay(instance, PlayedEpisode(seed, [], actions)).as_json())
        result = {"episodes": episodes}
    except (ImportError, AttributeError) as error:
        result = {"missing": str(error)}
    except EnvkitError as error:
        result = {"error": str(error)}
    left = _left_processes()
    files = [str(path) for path in sorted(Path(os.environ["TMPDIR"]).rglob("*")) if path.is_file()]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Path(sys.argv[1]).write_text(json.dumps({**result, "processes": list(left.values()), "files": files}))


def _left_processes() -> dict[int, str]:
    """Return the ids and command lines of child processes that are still running after `_ENDING_S` seconds."""
    until = clock.stopwatch() + _ENDING_S
    while (left := dict(_descendants(os.getpid()))) and clock.stopwatch() < until:
        Event().wait(0.02)
    return left


def _descendants(parent: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # the process may end at any moment
            state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(above) == parent and state != "Z" and not any(name in command for name in _OWN_PROCESSES):
                yield int(entry.name), command
                yield from _descendants(int(entry.name))


if __name__ == "__main__":
    main()
