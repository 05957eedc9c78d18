"""Checks in processes of their own: the same episodes in each, and nothing left behind.

``python -m envkit.wiring.env_check.apart FILE`` plays what it reads from its standard input and writes into FILE.
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
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from threading import Event
from typing import Any

from envkit import clock, registry
from envkit.errors import ConfigError, EnvkitError
from envkit.types import JSON, Options
from envkit.wiring.env_check.episodes import EnvUnderTest, difference
from envkit.wiring.env_check.verdicts import FailedCheckError, SkippedCheckError
from envkit.wiring.envs import find

_TIMEOUT_S = 120.0
_ENDING_S = 2.0
"""Seconds that processes have to end after close."""
_OWN_PROCESSES = ("multiprocessing.resource_tracker", "multiprocessing.forkserver")
"""What Python itself leaves running until it ends."""
_SUBREAPER = 36


def play_apart(env: EnvUnderTest, seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Play the same episodes in two processes at once, whose hashes of texts differ.

    Returns:
        For each its episodes, the processes and the files that were left.

    Raises:
        SkippedCheckError: The environment cannot be imported elsewhere.
        FailedCheckError: A process failed.
    """
    spec = find(env.env_id)
    plain = replace(spec, options=dict(spec.options), terse=dict(spec.terse))
    try:
        request = pickle.dumps((plain, env.options, list(seeds)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise SkippedCheckError(f"another process cannot import it ({error}); register it as 'module:Class'") from None
    with tempfile.TemporaryDirectory(prefix="check-env-") as folder:
        places = [Path(folder, name) for name in ("1", "2")]
        runs = [_start(place, hash_seed=place.name) for place in places]
        try:
            for run, _ in runs:
                assert run.stdin is not None
                with run.stdin, suppress(BrokenPipeError):
                    run.stdin.write(request)
            for run, _ in runs:
                run.wait(_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            raise FailedCheckError(
                f"{len(seeds)} episodes in a new process took longer than {_TIMEOUT_S:g} s"
            ) from None
        finally:
            for run, _ in runs:
                run.kill()
                run.wait()
        return [_result(place, log) for place, (_, log) in zip(places, runs, strict=True)]


def _start(place: Path, *, hash_seed: str) -> tuple[subprocess.Popen[bytes], Path]:
    (place / "tmp").mkdir(parents=True)
    variables = {
        **os.environ,
        "PYTHONHASHSEED": hash_seed,
        "PYTHONPATH": os.pathsep.join(entry or str(Path.cwd()) for entry in sys.path),
        "TMPDIR": str(place / "tmp"),
    }
    log = place / "log"
    with log.open("wb") as output:
        command = [sys.executable, "-m", __name__, str(place / "result")]
        run = subprocess.Popen(command, env=variables, stdin=subprocess.PIPE, stdout=output, stderr=output)
    return run, log


def _result(place: Path, log: Path) -> dict[str, Any]:
    try:
        result: dict[str, Any] = json.loads((place / "result").read_text())
    except FileNotFoundError:
        last = log.read_text(errors="replace").strip().splitlines()[-1:] or ["no message"]
        raise FailedCheckError(f"a new process that played it ended: {last[0]}") from None
    if "missing" in result:
        raise SkippedCheckError(
            f"another process cannot import it ({result['missing']}); register it as 'module:Class'"
        )
    if "error" in result:
        raise FailedCheckError(f"in a new process, {result['error']}")
    return result


def same_in_two_processes(results: Sequence[dict[str, Any]]) -> str:
    one, two = (result["episodes"] for result in results)
    for played, other in zip(one, two, strict=True):
        found = difference(played, other)
        if found is not None:
            raise FailedCheckError(
                f"two processes play the same seed differently ({found}); draw every chance from the seed of reset, "
                "such as by random.Random(stable_hash(seed)): hash() and global generators differ between processes"
            )
    return f"{len(one)} episodes, {sum(len(played[2]) for played in one)} steps"


def nothing_is_left_behind(results: Sequence[dict[str, Any]]) -> str:
    for result in results:
        if result["processes"]:
            raise FailedCheckError(f"after close, this still ran: {result['processes'][0]}; end it in close")
        if result["files"]:
            raise FailedCheckError(f"after close, this file was left: {result['files'][0]}; remove it in close")
    return "no process and no file after close"


def main() -> None:
    with suppress(OSError, AttributeError):  # so that daemons become children of ours, too
        ctypes.CDLL(None).prctl(_SUBREAPER, 1)
    written = _written_files()
    result: dict[str, JSON]
    try:
        spec, options, seeds = pickle.load(sys.stdin.buffer)
        with suppress(ConfigError):  # its package has registered it
            registry.register(spec.id, spec.entry_point, options=spec.options, expert=spec.expert)
        registry.load(spec.entry_point)
        result = {"episodes": _episodes(spec.id, options, seeds)}
    except (ImportError, AttributeError) as error:
        result = {"missing": str(error)}
    except EnvkitError as error:
        result = {"error": str(error)}
    left = _left_processes()
    temporary = Path(os.environ["TMPDIR"])
    mine = {path for path in written if path.is_relative_to(Path.cwd()) and "__pycache__" not in path.parts}
    files = [str(path) for path in sorted({*mine, *temporary.rglob("*")}) if path.is_file()]
    for pid in left:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    Path(sys.argv[1]).write_text(json.dumps({**result, "processes": list(left.values()), "files": files}))


def _written_files() -> set[Path]:
    """Return a set that grows by every file that this process opens for writing."""
    written: set[Path] = set()

    def note(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" and isinstance(arguments[0], str) and (arguments[2] or 0) & (os.O_WRONLY | os.O_RDWR):
            written.add(Path(arguments[0]).absolute())

    sys.addaudithook(note)
    return written


def _episodes(env_id: str, options: Options, seeds: Sequence[int]) -> list[JSON]:
    env = EnvUnderTest(env_id, options)
    episodes: list[JSON] = []
    for seed in seeds:
        with env.opened() as instance:
            episodes.append(env.record(instance, seed).as_json())
    return episodes


def _left_processes() -> dict[int, str]:
    """Return our descendants that do not end within `_ENDING_S`, with their command lines."""
    until = clock.stopwatch() + _ENDING_S
    while (left := dict(_descendants(os.getpid()))) and clock.stopwatch() < until:
        Event().wait(0.02)
    return left


def _descendants(parent: int) -> Iterator[tuple[int, str]]:
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it may end meanwhile
            state, above = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
            if int(above) == parent and state != "Z" and not any(name in command for name in _OWN_PROCESSES):
                yield int(entry.name), command
                yield from _descendants(int(entry.name))


if __name__ == "__main__":
    main()
