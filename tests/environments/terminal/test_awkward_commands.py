"""Commands that end the shell, block it, or use up a resource: the episode goes on, and the next command works."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import anyio
import pytest

from envkit import clock
from envkit.environments.terminal.screen import ScreenTools
from envkit.environments.tools import ToolEnv, bash, submit
from envkit.sandbox.docker.images import OFFLINE_BASE
from envkit.types import Options
from envkit.wiring.sandboxes.tool_pool import open_tool_pool

from .screens import SPEC

Way = Literal["bash", "screen"]

EDITOR = r"""
import os, termios, tty
before = termios.tcgetattr(0)
tty.setraw(0)
os.write(1, b"\x1b[?1049h\x1b[H\x1b[2Jpress q")
while (key := os.read(0, 1)) != b"q":
    os.write(1, b"\x1b[2;1Hpressed " + key)
os.write(1, b"\x1b[?1049l")
termios.tcsetattr(0, termios.TCSADRAIN, before)
"""
FETCH = """
import time, urllib.request
for attempt in range(50):
    try:
        print("status", urllib.request.urlopen("http://127.0.0.1:8000").status)
        break
    except OSError:
        time.sleep(0.1)
"""
TIMED_OUT = r"\[stopped after 2 s, the time limit of a command\]"
NEW_SHELL = r"\[the shell has ended; the next (command starts|keys go to) a new one, without its folder and variables\]"
BUSY = r"\[no prompt after 1 s: a program still runs, or waits for input\]"


@dataclass(frozen=True)
class Case:
    """A command, what its result contains in each way, and what ends it in a terminal."""

    command: str
    bash: str
    screen: str
    keys: Sequence[str] = ()
    then: str = ""


CASES = {
    "waits for input": Case("cat", r"^\[exit code 0\]$", BUSY, ["typed\n", "C-d"]),
    "full-screen editor": Case("python3 editor.py", r"termios\.error", r"^press q$", ["x", "q"]),
    "background server": Case("python3 -m http.server 8000 >/dev/null 2>&1 &", r"^\[exit code 0\]$", r"\$$"),
    "its client": Case("python3 fetch.py", r"^status 200$", r"^status 200$"),
    "100 MB": Case(
        "yes $(printf %099d) | head -c 100000000",
        r"[\d,]{10,} bytes of output dropped",
        r"[\d,]{7,} earlier lines are not shown \([\d,]{10,} bytes of output were skipped\)",
    ),
    "binary output": Case("head -c 3000 /dev/urandom", r"\[exit code 0\]$", r"\$$", ["reset\n"]),
    "exit": Case("exit 3", NEW_SHELL, NEW_SHELL),
    "exec": Case("exec sleep 1000", TIMED_OUT, BUSY, ["C-c"]),
    "kill": Case("kill -9 -1", rf"{NEW_SHELL}|^\[exit code 0\]$", rf"{NEW_SHELL}|\$$"),
    "closed stdin": Case("exec <&-", r"^\[exit code 0\]$", r"\$", ["\n"]),
    "closed stdout": Case("exec >&- 2>&-", r"\[exit code 0\]", r"exec", ["exit\n"], then="exit"),
    "stty": Case("stty -echo", r"Inappropriate ioctl", r"\$$", ["stty echo\n"]),
    "full disk": Case("dd if=/dev/zero of=big bs=1M count=500; rm big", r"No space left", r"No space left"),
    "fork bomb": Case(":(){ :|:& };:", r"exit code 0", r"", ["kill -9 -1\n"], then="kill -9 -1"),
}


class Awkward(ToolEnv):
    episode_timeout_s = 600.0
    max_output = 4000
    max_turns = 500

    def __init__(self, way: Way, **more: Any) -> None:
        self.screen = ScreenTools()
        self.tools = self.screen.tools if way == "screen" else (bash, submit)
        super().__init__(**more)

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.write("editor.py", EDITOR.encode())
        await self.sandbox.write("fetch.py", FETCH.encode())
        return "work"

    async def close(self) -> None:
        await self.screen.close()
        await super().close()


async def problems(way: Way, kind: str) -> dict[str, str]:
    """Play all cases in one episode. Return what was wrong by the name of the case."""
    found = {}
    async with open_tool_pool(kind) as pool:
        env = Awkward(way, sandboxes=pool, command_timeout_s=2.0 if way == "bash" else 60.0)
        env.spec = replace(SPEC, image=OFFLINE_BASE) if kind == "docker" else SPEC

        async def use(command: str, wait_s: float = 1.0) -> str:
            arguments: dict[str, object] = {"command": command}
            if way == "screen":
                arguments = {"keys": command, "wait_s": wait_s}
            step = await env.step(json.dumps({"name": env.tools[0].__name__, "arguments": arguments}))
            assert not step.ended, step
            return step.observation.text

        await env.reset(seed=1, options={})
        for name, case in CASES.items():
            result = await use(f"{case.command}\n" if way == "screen" else case.command, 60 if name == "100 MB" else 1)
            if not re.search(case.screen if way == "screen" else case.bash, result, re.MULTILINE):
                found[name] = result
            for keys in case.keys if way == "screen" else [case.then] if case.then else ():
                await use(keys)
            again = "echo alive $((1 + 1))\n" if way == "screen" else "echo alive $((1 + 1)); ls"
            following = await use(again)
            if "the shell ha" in following:  # it ended only now, so the command was not run
                following = await use(again)
            if "\nalive 2\n" not in f"\n{following}\n" or (way == "bash" and "editor.py" not in following):
                found[f"after {name}"] = following
        await env.close()
        assert pool.counts().losses == {}
    return found


@pytest.mark.parametrize("way", ["bash", "screen"])
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("local", marks=pytest.mark.bwrap),
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
    ],
)
def test_after_each_awkward_command_the_episode_goes_on_and_the_next_command_works(kind: str, way: Way) -> None:
    async def main() -> dict[str, str]:
        with anyio.fail_after(120):
            return await problems(way, kind)

    assert clock.run(main) == {}
