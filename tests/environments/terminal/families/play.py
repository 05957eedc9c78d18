"""Plays generated tasks in a temporary folder, without a sandbox: as the agent's user where the tests run as root."""

import os
import shutil
import signal
import subprocess
import tempfile
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from multiprocessing import get_context
from pathlib import Path

from envkit.environments.terminal import cases, harness
from envkit.environments.terminal.families.family import DrawnTask

ENV = {"PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}


@cache
def _small_process() -> ProcessPoolExecutor:
    """A process without torch: to start programs as another user, Python forks, which takes longer in a large one."""
    return ProcessPoolExecutor(1, mp_context=get_context("spawn"))


def play(task: DrawnTask, *scripts: str) -> str:
    """Run shell scripts in the task's folder and return the problem that its checks find; empty if it is solved."""
    return _small_process().submit(_play_here, task, scripts).result()


def _play_here(task: DrawnTask, scripts: tuple[str, ...]) -> str:
    folder = Path(tempfile.mkdtemp(prefix="task-", dir="/tmp"))
    try:
        return _play(task, folder, scripts)
    finally:
        shutil.rmtree(folder)


def _play(task: DrawnTask, folder: Path, scripts: tuple[str, ...]) -> str:
    user = {"user": harness.AGENT, "group": harness.AGENT, "extra_groups": []} if os.geteuid() == 0 else {}
    if user:
        os.chown(folder, harness.AGENT, harness.AGENT)
    for path, content in task.files.items():
        harness.write(folder / path, content)
    parts = (f"(\n{part}\n)" for part in (task.setup or ":", *scripts))
    script = "\n".join(("set -e", "umask 022", next(parts), task.services, *parts))
    env = {**ENV, "HOME": str(folder)}
    process = subprocess.Popen(["sh", "-c", script], cwd=folder, env=env, start_new_session=True, **user)  # type: ignore[call-overload]
    try:
        process.wait(30)
    finally:
        os.killpg(process.pid, signal.SIGKILL) if task.services else None
    try:
        for case in task.checks:
            cases.check(case, folder)
    except AssertionError as error:
        return str(error) or "failed"
    return f"the script ended with {process.returncode}" if process.returncode and scripts else ""
