"""``docker/with-daemon`` provides a daemon to its command, and stops it afterwards, whatever the command did to it."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = pytest.mark.bwrap

WITH_DAEMON = Path(__file__).parents[2] / "docker" / "with-daemon"

PROGRAMS = {
    "docker": """grep -qs dockerd "/proc/$(cat /run/docker.pid)/cmdline" """,
    # Like the real one, it starts no containerd while a process exists that a pid file calls its own.
    "dockerd": """
        echo started >>$TMPDIR/starts
        mkdir -p /run/docker/containerd && cd /run/docker/containerd
        [ -e containerd.pid ] && kill -0 $(cat containerd.pid) && { echo it is still running; exit 1; }
        trap 'kill $!; wait $!; rm -f containerd.pid /run/docker.pid; exit' TERM
        containerd &
        until [ -s containerd.pid ]; do sleep 0.01; done  # a signal that comes before its trap would be lost
        echo $$ >/run/docker.pid
        wait""",
    "containerd": "trap 'kill $!; exit' TERM; echo $$ >/run/docker/containerd/containerd.pid; sleep 1000 & wait",
    "containerd-shim-runc-v2": "sleep 1000 & wait",
}

FIRST_PROCESS = """
import json, subprocess, sys
from pathlib import Path

before, *command = sys.argv[1:]
daemon = before and subprocess.Popen(before)
while before and subprocess.call(["docker", "version"], stderr=subprocess.DEVNULL):
    pass
done = subprocess.run(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
words = [path.read_text().split(chr(0)) for path in Path("/proc").glob("[0-9]*/cmdline") if path.parent.name != "1"]
print(json.dumps([done.returncode, done.stdout, [" ".join(each).strip() for each in words if each != [""]]]))
"""
"""As in many a container, it waits for nobody but its own children: all others stay, once dead."""


@dataclass
class Run:
    """The result of a command.

    Attributes:
        code: Exit code.
        output: Its output.
        left: Command lines of the processes that are left.
        starts: Number of daemons that were started.
    """

    code: int
    output: str
    left: list[str]
    starts: int


def under(folder: Path, *command: str, before: str = "") -> Run:
    """Run a command under the script, as root of an isolated machine with fake Docker programs.

    Args:
        before: A program that starts first; the command runs once Docker answers.
    """
    for name, script in PROGRAMS.items():
        (folder / name).write_text(f"#!/bin/sh\n{script}\n")
        (folder / name).chmod(0o755)
    words = ["bwrap", "--unshare-all", "--uid", "0", "--gid", "0", "--as-pid-1", "--die-with-parent", "--ro-bind"]
    words += ["/", "/", "--dev", "/dev", "--proc", "/proc", "--tmpfs", "/run", "--bind", str(folder), str(folder)]
    words += ["--clearenv", "--setenv", "PATH", f"{folder}:/usr/bin:/bin:/usr/sbin", "--setenv", "TMPDIR", str(folder)]
    words += ["--", sys.executable, "-c", FIRST_PROCESS, before, str(WITH_DAEMON), *command]
    done = subprocess.run(words, input=b"typed\n", stdout=subprocess.PIPE, timeout=60, check=True)
    starts = (folder / "starts").read_text().count("started")
    assert {path.name for path in folder.iterdir()} == {*PROGRAMS, "starts"}
    code, output, left = json.loads(done.stdout)
    return Run(code, output, left, starts)


def test_a_command_gets_a_daemon_that_it_may_restart_and_its_exit_code_is_returned(tmp_path: Path) -> None:
    run = under(tmp_path, "sh", "-c", "docker version && echo $ENVKIT_DOCKERD_PIDFILE && cat && exit 7")
    assert run == Run(7, "/var/run/docker.pid\ntyped\n", [], 1)


def test_an_existing_daemon_is_kept_and_may_not_be_restarted(tmp_path: Path) -> None:
    run = under(tmp_path, "sh", "-c", "docker version && echo ${ENVKIT_DOCKERD_PIDFILE-none}", before="dockerd")
    assert (run.code, run.output, run.starts) == (0, "none\n", 1)
    assert f"/bin/sh {tmp_path}/dockerd" in run.left


def test_the_last_daemon_is_stopped_even_if_the_command_started_it(tmp_path: Path) -> None:
    restart = """
        old=$(cat $ENVKIT_DOCKERD_PIDFILE); kill $old
        while docker version; do sleep 0.05; done
        setsid dockerd &
        until docker version; do sleep 0.05; done
        [ $old != $(cat $ENVKIT_DOCKERD_PIDFILE) ]"""
    assert under(tmp_path, "sh", "-c", f"exec 2>/dev/null; {restart}") == Run(0, "", [], 2)


AWAITED = "until tr '\\0' ' ' </proc/$!/cmdline | grep -q '^/bin/sh .*containerd-shim'; do sleep 0.05; done"
"""Waits until the last started program is the shim, which is a script here."""


def test_a_container_without_a_daemon_is_stopped(tmp_path: Path) -> None:
    shim = "containerd-shim-runc-v2 -namespace moby -address /var/run/docker/containerd/containerd.sock"
    assert under(tmp_path, "sh", "-c", f"setsid {shim} & {AWAITED}") == Run(0, "", [], 1)


def test_a_termination_signal_reaches_the_command(tmp_path: Path) -> None:
    command = "trap 'docker version && echo ended; kill $!; exit 3' TERM; sleep 1000 & kill $PPID; wait"
    assert under(tmp_path, "bash", "-c", command) == Run(3, "ended\n", [], 1)
