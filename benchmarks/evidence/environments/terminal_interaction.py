"""Measure what a turn of a terminal episode takes beside the command's own time.

Each turn runs ``echo``, whose own time is negligible. The turns go through the bash tool or type keys in a terminal,
in a sandbox of this process or of an ``envkit serve`` that runs beside it. Also measured: the time and the memory of a
command that prints 100 MB in a terminal, and the time of the same command in a terminal without envkit.

    python benchmarks/evidence/environments/terminal_interaction.py

Requires bubblewrap and, for Docker, the image ``envkit/base:bookworm``. Takes about a minute.
"""

from __future__ import annotations

import os
import pty
import resource
import statistics
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.environments.terminal.screen import Screen
from envkit.environments.tools import bash
from envkit.http.client.sandbox_client import SandboxClient
from envkit.protocols import Sandbox
from tests.e2e.fleet.fleet import serving
from tests.environments.terminal.screens import SPEC, TARGET_S, sandbox_of, turn_times

NAME = "terminal-interaction"
STALE_AFTER = (
    "environments/terminal/emulator.py",
    "environments/terminal/screen.py",
    "environments/tools/shell_tools.py",
    "envkit/http/client/remote_sandbox.py",
    "envkit/http/sandboxes/streams.py",
    "sandbox/agent/exec",
    "sandbox/agent_client",
)
TWIN = (
    "tests/environments/terminal/test_screen.py::"
    "test_a_turn_in_a_terminal_takes_at_most_some_milliseconds_beside_the_command"
)
TURNS = 300
FLOOD = "yes \"$(printf '%099d')\" | head -c 100000000"
PLACES = ("local", "served", "docker")


@asynccontextmanager
async def opened(place: str) -> AsyncIterator[Sandbox]:
    """Lease a sandbox of this process (``local``, ``docker``), or of a server with local sandboxes (``served``)."""
    if place != "served":
        async with sandbox_of(place) as sandbox:
            yield sandbox
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        serving("local", Path(folder), "envs.sandboxes=1", "envs.warm=0") as gateway,
    ):
        async with SandboxClient(gateway.url) as client, client.lease(SPEC) as sandbox:
            yield sandbox


async def turns(way: str, place: str, count: int) -> dict[str, Any]:
    """Return the milliseconds of a turn through the bash tool or in a terminal (`way`), in a sandbox at `place`."""
    async with opened(place) as sandbox:
        screen = Screen()
        use: Callable[[str], Awaitable[str]] = partial(bash, sandbox=sandbox, timeout_s=20)
        if way == "screen":
            use = lambda command: screen.type_keys(f"{command}\n", sandbox, 200, 20)  # noqa: E731
        times = await turn_times(use, count)
        await screen.close()
    cuts = statistics.quantiles(times, n=100)
    figures: dict[str, Any] = {"turns": count, "median_ms": round(1e3 * statistics.median(times), 2)}
    figures |= {"p90_ms": round(1e3 * cuts[89], 2), "p99_ms": round(1e3 * cuts[98], 2)}
    if (way, place) == ("screen", "served"):
        figures["target_ms"] = 1e3 * TARGET_S
    return figures


async def flood(place: str) -> dict[str, Any]:
    """Return the seconds and the additional memory that 100 MB of output in a terminal take."""
    async with opened(place) as sandbox:
        screen = Screen()
        await screen.type_keys("true\n", sandbox, 200, 20)
        before, began = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, clock.stopwatch()
        text = await screen.type_keys(f"{FLOOD}\n", sandbox, 200, 120)
        seconds = clock.stopwatch() - began
        after = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        following = await screen.type_keys("echo next\n", sandbox, 200, 20)
        await screen.close()
    assert following.splitlines()[-2:] == ["next", "~$"]
    return {
        "seconds": round(seconds, 1),
        "additional_memory_mib": round((after - before) / 1024, 1),
        "characters_returned": len(text),
        "first_line": text.partition("\n")[0],
    }


def plain_terminal() -> dict[str, Any]:
    """Return the seconds that 100 MB of output take in a terminal of this machine without envkit."""
    began, size = clock.stopwatch(), 0
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("bash", ["bash", "-c", FLOOD])
    with suppress(OSError):  # the terminal is closed
        while piece := os.read(terminal, 1 << 16):
            size += len(piece)
    os.waitpid(pid, 0)
    os.close(terminal)
    return {"seconds": round(clock.stopwatch() - began, 1), "bytes": size}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--turns", type=int, default=TURNS)
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for way in ("bash", "screen"):
        for place in PLACES:
            part = f"{way}, {place}"
            print(part, evidence.part(part, partial(clock.run, partial(turns, way, place, asked.turns))), flush=True)
    print("100 MB, plain terminal", evidence.part("100 MB, plain terminal", plain_terminal), flush=True)
    for place in PLACES:
        part = f"100 MB, screen, {place}"
        print(part, evidence.part(part, partial(clock.run, partial(flood, place))), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
