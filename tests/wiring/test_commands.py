"""Commands build the images of tasks once; an error names the line of the Dockerfile."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit import clock
from envkit.environments.terminal import Terminal, commands
from envkit.environments.terminal.formats import read_task
from envkit.environments.terminal.images import image_of
from envkit.environments.terminal.tasks import TerminalTask
from envkit.environments.tools import write_call
from envkit.errors import SandboxError
from envkit.runs.display import SilentDisplay
from envkit.wiring.commands import run
from envkit.wiring.environments import find
from envkit.wiring.sandboxes.backends import open_tool_pool
from tests.environments.terminal.formats.folders import harbor
from tests.sandbox.containers import docker, image

pytestmark = pytest.mark.docker

BASE = "ARG BASE=no/such:image\nFROM ${BASE}\n"


@pytest.fixture
def task(tmp_path: Path) -> Iterator[TerminalTask]:
    files = {"environment/Dockerfile": BASE + "COPY . /data/\nRUN test -e /data/kept && test ! -e /data/left-out\n"}
    ignored = {"environment/.dockerignore": "# a comment\nleft-*\n", "environment/left-out": "", "environment/kept": ""}
    found = read_task(harbor(tmp_path / "a", files={**files, **ignored}))
    yield found
    if docker("images", "--quiet", image_of(found)):
        docker("rmi", image_of(found))


def build(folder: Path) -> list[tuple[str, str, str]]:
    """Return image, time of the build and tasks of each image of a folder."""
    spec = find("Terminal-v0")
    (table,) = run(spec, "build", commands.build, {"tasks": folder}, display=SilentDisplay()).parts
    return [(row[0], row[1], row[2]) for row in table[1:]]


async def touched(folder: Path) -> float | None:
    """Return the grade of an episode that makes the file ``done`` where the shell starts."""
    async with open_tool_pool("docker") as pool:
        env = Terminal(sandboxes=pool, tasks=str(folder))
        await env.reset(seed=0, options={})
        await env.step(write_call("bash", command="touch done"))
        await env.step(write_call("submit"))
        try:
            return await env.grade()
        finally:
            await env.close()


def test_an_image_is_built_once_on_the_base_that_is_here(task: TerminalTask) -> None:
    first, second = build(task.folder), build(task.folder)

    assert [(tag, names) for tag, _, names in first] == [(image_of(task), "a")]
    assert first[0][1].endswith(" s")
    assert second[0][1] == "exists"


def test_an_error_names_the_line_of_the_dockerfile_and_has_its_output(tmp_path: Path) -> None:
    content = f"# a comment\n{BASE}\nRUN true && \\\n    true\nRUN echo made-it-here; false\n"
    broken = harbor(tmp_path, files={"environment/Dockerfile": content})

    with pytest.raises(
        SandboxError, match=re.escape("line 7 of the Dockerfile, `RUN echo made-it-here; false`")
    ) as error:
        build(broken)
    assert "returned a non-zero code: 1" in str(error.value)


def test_a_built_image_decides_where_programs_start(tmp_path: Path) -> None:
    base, folder = f"envkit-test/found:{os.getpid()}", tmp_path / "a"
    content = f'FROM {image()}\nENV APP=/srv/app\nWORKDIR $APP/src\nENTRYPOINT ["sh"]\nUSER 1234\n'
    subprocess.run(["docker", "build", "--quiet", "--tag", base, "-"], input=content.encode(), check=True)
    test = "test -e done && test $PWD = /srv/app/src; echo $((1 - $?)) > /logs/verifier/reward.txt\n"
    files = {
        "environment/Dockerfile": f"FROM {base}\nRUN true\n",
        "solution/solve.sh": "touch done\n",
        "tests/test.sh": test,
    }
    task = read_task(harbor(folder, files=files))
    try:
        assert build(folder)
        assert clock.run(touched, folder) == 1.0
    finally:
        docker("rmi", image_of(task), base)


def test_a_build_that_takes_too_long_is_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commands, "TIMEOUT_S", 1.0)
    slow = harbor(tmp_path, files={"environment/Dockerfile": f"{BASE}RUN sleep 60\n"})

    with pytest.raises(
        SandboxError, match=r"line 3 of the Dockerfile, `RUN sleep 60`, failed \(after the timeout of 1 s\)"
    ):
        build(slow)
