"""Verify the result of a task: run its tests, in a sandbox of their own or in that of the agent, and read the reward.

The agent's processes are ended first. A sandbox of the tests' own sees only the artifacts, which are unpacked with the
rights of the agent's user. The tests run as root where the sandbox has root, in a folder that only root can enter, so
that programs of the agent, which the tests run as another user, can neither read the tests nor write the reward.
"""

from __future__ import annotations

import io
import math
import re
import tarfile
from pathlib import Path

import msgspec

from envkit import clock
from envkit.errors import UnsupportedError
from envkit.protocols import Sandbox
from envkit.types import GRADER_HOME, SandboxUser

from ..tasks import Verdict
from ..tools.limits import cut_middle
from .tasks import WORK, TerminalTask

_MAX_REWARD = 1 << 16
_MAX_LOG = 4000
SETUP_S = 60.0
"""Maximum seconds of a command that moves artifacts or tests."""
_HARNESS = Path(__file__).with_name("harness.py")
_KILL = "import os; os.kill(-1, 9)"
_RUN = r"""
IFS= read -r line < "$0"
case "$line" in *"$(printf '\r')") echo "$0 has CR LF line ends; convert it to LF" >&2 ;; esac
exec "$(command -v bash || echo sh)" -c '"$0"' "$0"
"""
"""Runs the tests as Harbor does: by a shell, which also runs a file whose first line is no ``#!``."""
_MAX_SUMMARY = 2 << 10
_SUMMARY = re.compile(r"=+ ([^=]+) in [\d.]+s[^=]*=+")
_COUNT = re.compile(r"\b\d+ (passed|failed|errors?|skipped|xfailed|xpassed|deselected|warnings?)\b")


class VerifierError(Exception):
    """The tests of a task wrote no valid reward. That is a fault of the task, and not a reward of 0."""


class RewardFileError(Exception):
    """The tests wrote no reward, or one that cannot be read; this says nothing about the agent's work."""


async def end_processes(sandbox: Sandbox, task: TerminalTask) -> None:
    """End all processes of the agent, including those that it has put into the background."""
    if task.profile == "strict":
        await sandbox.exec(["python3", "-I", "-c", _KILL], cwd="/")
    await sandbox.shell().close()


async def run_tests(sandbox: Sandbox, task: TerminalTask) -> Verdict:
    """Run the tests of a task in a sandbox, in which the agent's processes have ended.

    Raises:
        VerifierError: The tests wrote no valid reward.
    """
    verifier = task.verifier
    user = await _prepare(sandbox, task, await clock.to_thread(pack_tests, verifier.tests))
    folder, logs = places(task)
    env = {**verifier.env, "ENVKIT_LOGS": logs} if task.is_portable else dict(verifier.env)
    cwd = "/" if task.is_portable or not task.workdir else task.workdir
    result = await sandbox.exec(
        ["sh", "-c", _RUN, f"{folder}/test.sh"],
        cwd=cwd,
        env=env,
        user=user,
        timeout_s=verifier.timeout_s,
        max_output_bytes=1 << 18,
    )
    log = cut_middle("\n".join(filter(None, [result.stdout.strip(), result.stderr.strip()])), _MAX_LOG)
    if result.timed_out:
        return Verdict(reward=0.0, log=f"{log}\nthe tests did not end within {verifier.timeout_s:g} s")
    found: list[bytes | None] = []
    for name in ("reward.json", "reward.txt") if verifier.reads == "reward" else ():
        path = f"{logs}/verifier/{name}"
        shown = await sandbox.exec(["cat", "--", path], cwd="/", user=user, max_output_bytes=_MAX_REWARD)
        found.append(shown.stdout_bytes if shown.exit_code == 0 else None)
    try:
        return Verdict(reward=read_reward(*found) if found else pytest_reward(result.stdout), log=log)
    except RewardFileError as error:
        if result.is_out_of_memory:
            return Verdict(reward=0.0, log=f"{log}\nthe tests were ended, because the memory is full")
        problem = f"{error}; the tests ended with exit code {result.exit_code}: {log}"
        raise VerifierError(f"{task.name}: {problem}") from None


def places(task: TerminalTask) -> tuple[str, str]:
    """Return the folders of the tests and of their logs in the verifier's sandbox."""
    return (f"{GRADER_HOME}/tests", f"{GRADER_HOME}/logs") if task.is_portable else ("/tests", "/logs")


async def _prepare(sandbox: Sandbox, task: TerminalTask, archive: bytes) -> SandboxUser:
    """Write the tests, remove stale rewards, and return the user that runs the tests."""
    tests, logs = places(task)
    script = (
        f"umask 077; rm -rf {tests} {logs}/verifier && mkdir -p {tests} {logs}/verifier"
        f" && tar -xpf - --no-same-owner -C {tests} && chmod -R u+rwX {tests} && chmod u+x {tests}/test.sh"
    )
    user: SandboxUser = "root"
    if task.is_portable:
        script = f"chown 0:0 {GRADER_HOME} && {script}"
        await sandbox.exec(["chmod", "u+rwx,go+rx", WORK], cwd="/")  # root may not enter private folders
    try:
        done = await sandbox.exec(["sh", "-c", script], cwd="/", user=user, stdin=archive, timeout_s=SETUP_S)
    except UnsupportedError:  # this machine's sandboxes have one user
        user = "grader"
        script = script.removeprefix(f"chown 0:0 {GRADER_HOME} && ")
        done = await sandbox.exec(["sh", "-c", script], cwd="/", user=user, stdin=archive, timeout_s=SETUP_S)
    if done.exit_code != 0:
        raise VerifierError(f"{task.name}: the tests cannot be written: {cut_middle(done.stderr, 500)}")
    return user


def pack_tests(tests: Path) -> bytes:
    """Return a folder of tests as a tar archive, with the harness if they have a check and no harness."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode="w") as tar:
        for path in sorted(tests.iterdir()):
            if path.name != "__pycache__":
                tar.add(path, path.name)
        if (tests / "check.py").is_file() and not (tests / _HARNESS.name).exists():
            tar.add(_HARNESS, _HARNESS.name)
    return content.getvalue()


def read_reward(json_content: bytes | None, txt_content: bytes | None) -> float:
    """Return the reward that tests have written.

    Args:
        json_content: Content of ``reward.json``, an object of finite numbers: its reward is that of the key ``reward``,
            or of the only key. None if there is no such file.
        txt_content: Content of ``reward.txt``, a finite number, which counts if there is no ``reward.json``. None if
            there is no such file.

    Raises:
        RewardFileError: Neither file exists, or the one that counts is malformed.
    """
    try:
        if json_content is not None:
            name, form, content = "reward.json", "an object of numbers", json_content
            rewards = msgspec.json.decode(content, type=dict[str, float])
            if "reward" not in rewards and len(rewards) != 1:
                raise RewardFileError(f"{name}: needs a key `reward`, or only one key; got {list(rewards)}")
            reward = rewards["reward"] if "reward" in rewards else next(iter(rewards.values()))
        elif txt_content is not None:
            name, form, content = "reward.txt", "a number", txt_content
            reward = float(content.decode())
        else:
            raise RewardFileError("the tests wrote neither reward.json nor reward.txt")
    except ValueError as error:  # msgspec's errors are ValueErrors
        raise RewardFileError(f"{name}: must be {form}, got {content[:40]!r}: {error}") from None
    if not math.isfinite(reward):
        raise RewardFileError(f"{name}: must be a finite number, got {content[:40]!r}")
    return reward


def pytest_reward(output: str) -> float:
    """Return 1.0 if the last summary of pytest near the end of an output counts only tests that passed."""
    lines = map(str.strip, output[-_MAX_SUMMARY:].splitlines())
    summaries = [words for line in lines if (found := _SUMMARY.fullmatch(line)) and (words := _COUNT.findall(found[1]))]
    if not summaries:
        raise RewardFileError("the tests printed no summary of pytest")
    return float(set(summaries[-1]) - {"warning", "warnings"} == {"passed"})
