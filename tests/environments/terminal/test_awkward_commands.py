"""Commands typed in a terminal that end the shell, block it, or use up a resource: the next command works.

The contract of all sandboxes (``tests/contract/programs/test_shell.py``) shows the same of the shell of the bash tool.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.environments.terminal import Terminal
from envkit.environments.terminal.formats import write_task
from envkit.environments.tools import write_call
from envkit.sandbox.docker.images import OFFLINE_BASE
from envkit.wiring.sandboxes.backends import open_tool_pool

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
NEW_SHELL = r"\[the shell has ended; the next keys go to a new one, without its folder and variables\]"
BUSY = r"\[no prompt after 0\.4 s: a program still runs, or waits for input\]"


@dataclass(frozen=True)
class Case:
    """A command.

    Attributes:
        command: The command.
        screen: Pattern of what the terminal shows.
        keys: Keys that end it.
    """

    command: str
    screen: str
    keys: Sequence[str] = ()


CASES = {
    "waits for input": Case("cat", BUSY, ["typed\n", "C-d"]),
    "full-screen editor": Case("python3 editor.py", r"^press q$", ["x", "q"]),
    "background server": Case("python3 -m http.server 8000 >/dev/null 2>&1 &", r"\$$"),
    "its client": Case("python3 fetch.py", r"^status 200$"),
    "20 MB": Case("yes $(printf %099d) | head -c 20000000", r"[\d,]{10,} bytes of output were skipped"),
    "binary output": Case("head -c 20000 /bin/bash", r"", ["reset\n"]),
    "exit": Case("exit 3", NEW_SHELL),
    "exec": Case("exec sleep 1000", BUSY, ["C-c"]),
    "kill": Case("kill -9 -1", rf"{NEW_SHELL}|\$$"),
    "closed stdin": Case("exec <&-", r"\$", ["\n"]),
    "closed stdout": Case("exec >&- 2>&-", r"exec", ["exit\n"]),
    "stty": Case("stty -echo", r"\$$", ["stty echo\n"]),
    "full disk": Case("dd if=/dev/zero of=big bs=1M count=500; rm big", r"No space left"),
    "fork bomb": Case(":(){ :|:& };:", r"", ["kill -9 -1\n"]),
}


CHECK = """
from harness import read, require
def verify(): require(read("/workspace/done") == "1\\n", "not done")
"""


def write_awkward(folder: Path) -> Path:
    """Write a task with the programs of the cases, and return its folder."""
    path = folder / "awkward"
    write_task(
        path,
        name="awkward",
        instruction="Write 1 to the file done.",
        files={"editor.py": EDITOR, "fetch.py": FETCH},
        solution="echo 1 > done",
        check={"check.py": CHECK},
    )
    return path


async def problems(folder: Path, kind: str) -> dict[str, str]:
    """Play all cases in one episode, then solve its task. Return what was wrong by the name of the case."""
    found = {}
    options: dict[str, Any] = {"command_timeout_s": 60.0, "max_turns": 500}
    if kind == "docker":
        options |= {"image": OFFLINE_BASE}
    async with open_tool_pool(kind) as pool:
        env = Terminal(sandboxes=pool, tasks=str(write_awkward(folder)), mode="screen", **options)

        async def use(command: str, wait_s: float = 20.0) -> str:
            step = await env.step(write_call("type_keys", keys=command, wait_s=wait_s))
            assert not step.ended, step
            return step.observation.text

        async def surely(command: str) -> str:
            """Repeat a command that was not run, because it was noticed only then that the shell had ended."""
            result = await use(command)
            return await use(command) if "the shell ha" in result else result

        await env.reset(seed=1, options={})
        for name, case in CASES.items():
            result = await use(f"{case.command}\n", 0.4 if case.screen == BUSY else 60)
            if not re.search(case.screen, result, re.MULTILINE):
                found[name] = result
            for keys in case.keys:
                await use(keys, 20 if keys == case.keys[-1] else 0.4)
            following = await surely("echo alive $((1 + 1))\n")
            if "\nalive 2\n" not in f"\n{following}\n":
                found[f"after {name}"] = following
        await surely("echo 1 > done\n")
        await env.step(write_call("submit"))
        if await env.grade() != 1.0:
            found["grade"] = env.grader_output
        await env.close()
        assert pool.counts().losses == {}
    return found


@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("local", marks=pytest.mark.bwrap),
        pytest.param("docker", marks=[pytest.mark.docker, pytest.mark.slow]),
    ],
)
def test_after_each_awkward_command_the_episode_goes_on_and_the_next_command_works(kind: str, tmp_path: Path) -> None:
    async def main() -> dict[str, str]:
        with anyio.fail_after(300):
            return await problems(tmp_path, kind)

    assert clock.run(main) == {}
