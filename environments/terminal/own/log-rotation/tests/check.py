"""Rotates logs that the agent has not seen: one after the other, at the same time, and while the lock is held."""

import fcntl
import gzip
import os
import subprocess
import time

from harness import AGENT, WORK, as_agent, private_folder, read, require, run, write


def rotate(log, keep, code=0):
    result = run([WORK / "rotate", log, keep], cwd=log.parent, timeout_s=20)
    require(result.returncode == code, f"rotate {keep} has exit code {result.returncode}: {result.stderr[-500:]}")


def lock_of(log):
    return log.with_name(log.name + ".lock")


def archives(log):
    """Return the contents of the archives, newest first."""
    with as_agent():
        names = {file.name for file in log.parent.iterdir()} - {log.name, lock_of(log).name}
        expected = [f"{log.name}.{number}.gz" for number in range(1, len(names) + 1)]
        require(names == set(expected), f"there are other files than archives: {sorted(names)}")
        return [gzip.decompress((log.parent / name).read_bytes()).decode() for name in expected]


def check_one_by_one(log):
    write(log, "zero\n", mode=0o640)
    with as_agent():
        inode = log.stat().st_ino
    for number in range(1, 13):
        with as_agent(), log.open("a") as file:
            file.write(f"line {number} of the log\n" * 40)
        rotate(log, 11 if number < 12 else 4)
        require(read(log) == "", "the log is not empty after its rotation")
    with as_agent():
        require(log.stat().st_ino == inode, "the log is another file after its rotation")
        modes = {
            file.name: file.stat().st_mode & 0o777 for file in log.parent.iterdir() if not file.name.endswith("lock")
        }
    require(set(modes.values()) == {0o640}, f"the permissions differ: {modes}")
    wanted = [f"line {number} of the log\n" * 40 for number in (12, 11, 10, 9)]
    require(archives(log) == wanted, "the archives differ from the rotated contents")
    rotate(log, 2)
    require(archives(log) == wanted, "an empty log was rotated")
    write(log, "more\n", mode=0o640)
    for keep in ("0", "51", "x", "-1", ""):
        rotate(log, keep, code=2)
    require(read(log) == "more\n" and archives(log) == wanted, "a wrong number of archives has changed something")


def check_lock(log):
    probe = log.parent.with_name(f"{log.parent.name}-probe") / log.name
    write(probe, "probe\n")
    began = time.monotonic()
    rotate(probe, 1)
    least_s = max(0.7, 12 * (time.monotonic() - began))  # a busy machine starts six programs later
    write(log, "waits\n")
    write(lock_of(log), "")
    with as_agent():
        lock = os.open(lock_of(log), os.O_RDWR)
    fcntl.flock(lock, fcntl.LOCK_EX)
    user = {"user": AGENT, "group": AGENT, "extra_groups": []} if os.geteuid() == 0 else {}
    waiting = [subprocess.Popen([WORK / "rotate", str(log), "9"], stdin=subprocess.DEVNULL, **user) for _ in range(6)]
    time.sleep(least_s)
    require(read(log) == "waits\n" and archives(log) == [], "a run did not wait for the lock")
    require(all(process.poll() is None for process in waiting), "a run ended before the lock was free")
    os.close(lock)
    require([process.wait(20) for process in waiting] == [0] * 6, "a run has failed after the wait")
    require(read(log) == "" and archives(log) == ["waits\n"], "six runs at the same time lost or repeated a line")


def verify():
    require(archives_of_app() == ["one\ntwo\nthree\n"], "app.log.1.gz is wrong")
    folder = private_folder()
    for number, name in enumerate(("plain.log", "a 'b' $c; *.log", "-dash.log")):
        if number:
            check_one_by_one(folder / f"one-by-one {number}" / name)
        check_lock(folder / f"lock{number}" / name)


def archives_of_app():
    require(read(WORK / "app.log") == "", "app.log is not empty")
    found = run(["gzip", "-dc", "app.log.1.gz"])
    return [found.stdout]
