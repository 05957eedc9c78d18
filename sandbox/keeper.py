"""Runs one program and leaves nothing of it behind: a script of its own, never imported.

    python -I -S keeper.py [--announce]

Standard input brings the order (see `_read_order`) and is then the life line: when it ends, because whoever holds the
other end let go or died, everything that was started is killed. The keeper ends as its program ended, by the same exit
code or signal, after killing whatever the program left running. With ``--announce`` it writes a line to standard output
as soon as the program runs, and the program's own standard output goes nowhere.

On Linux the keeper adopts orphans, so that also those who left the session are found; elsewhere whoever started the
keeper kills its process group afterwards. Only modules that load quickly are used: `subprocess` alone would cost more
than everything here.
"""

import ctypes
import os
import resource
import select
import signal
import sys
from contextlib import suppress

_LINUX = sys.platform == "linux"
_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_ROUNDS = 200  # of killing; each sees what the last one overlooked


def main() -> None:
    announce = "--announce" in sys.argv[1:]
    _close_inherited()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # it may die by its program's signal, and once is enough to dump
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)
    _prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)  # the life line may have been copied into a forked process
    woken = _wake_on_signals()
    order = _read_order()
    if order is None:
        return
    child = _start(*order, silent=announce)
    if announce:
        os.write(1, b"running\n")
    status = _wait(child, woken)
    _kill_descendants()
    if status is not None:
        _end_like(status)
    if not _LINUX:
        os.killpg(0, signal.SIGKILL)
    os.kill(os.getpid(), signal.SIGKILL)  # not the group: who entered a box with us must still wait for us


def _wake_on_signals() -> int:
    """Return the end of a pipe that gets a byte, its number, for each signal."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM):
        signal.signal(number, lambda *_: None)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    return reader


def _read_order() -> tuple[str, list[str], dict[str, str]] | None:
    """Read the length and a line end, then, NUL-separated, the folder to start in, the number of arguments, the
    arguments, and the environment as ``KEY=value``. None when the life line ends before.

    It comes over a pipe and not as arguments because everybody on the machine may read the arguments of a process.
    """
    content = b""
    length = None
    while length is None or len(content) < length:
        piece = os.read(0, 1 << 16)
        if not piece:
            return None
        content += piece
        if length is None and b"\n" in content:
            head, _, content = content.partition(b"\n")
            length = int(head)
    folder, count, *rest = [os.fsdecode(part) for part in content.split(b"\0")]
    argv, settings = rest[: int(count)], rest[int(count) :]
    return folder, argv, dict(setting.split("=", 1) for setting in settings)


def _start(folder: str, argv: list[str], env: dict[str, str], *, silent: bool) -> int:
    """Start the program and return its pid; where that fails, say why and exit as a shell does."""
    reader, writer = os.pipe()  # closed by a successful exec
    child = os.fork()
    if child == 0:
        try:
            _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGXFSZ):
                signal.signal(number, signal.SIG_DFL)
            nothing = os.open(os.devnull, os.O_RDWR)
            os.dup2(nothing, 0)
            if silent:
                os.dup2(nothing, 1)
            os.chdir(folder)
            os.execvpe(argv[0], argv, env)
        except OSError as error:
            os.write(writer, f"{error.errno} {argv[0]}: {error.strerror}".encode(errors="replace"))
        finally:
            os._exit(127)
    os.close(writer)
    problem = os.read(reader, 4096)
    os.close(reader)
    if problem:
        code, _, text = problem.partition(b" ")
        os.write(2, text + b"\n")
        os._exit(127 if int(code) == 2 else 126)
    return child


def _wait(child: int, woken: int) -> int | None:
    """Return the wait status of `child` when it has ended; None when everything is to end now."""
    while True:
        ready, _, _ = select.select([0, woken], [], [])
        if 0 in ready and not os.read(0, 1 << 16):
            return None
        if woken in ready:
            numbers = os.read(woken, 4096)
            if (status := _reap(child)) is not None:
                return status
            if signal.SIGTERM in numbers:
                return None


def _reap(wanted: int = 0) -> int | None:
    """Collect everybody who has ended, and return the status of `wanted` if it is among them."""
    found = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == wanted:
            found = status


def _kill_descendants() -> None:
    if not _LINUX:
        return
    for _ in range(_ROUNDS):
        _reap()
        family = _descendants()
        if not family:
            return
        for number in (signal.SIGSTOP, signal.SIGKILL):  # who is stopped starts nobody while the others die
            for pid in family:
                with suppress(OSError):  # it is gone, or became another user
                    os.kill(pid, number)
            family |= _descendants()
        select.select([], [], [], 0.005)


def _descendants() -> set[int]:
    """Everybody below this process who is not dead yet."""
    children: dict[int, list[int]] = {}
    dead = set()
    for entry in os.scandir("/proc"):
        if entry.name.isdecimal():
            pid = int(entry.name)
            try:
                file = os.open(f"/proc/{pid}/stat", os.O_RDONLY)
                content = os.read(file, 4096)
                os.close(file)
            except OSError:
                continue
            # The name in the second field may hold anything, also brackets.
            state, parent = content.rpartition(b")")[2].split()[:2]
            children.setdefault(int(parent), []).append(pid)
            if state in b"ZX":
                dead.add(pid)
    family: set[int] = set()
    waiting = [os.getpid()]
    while waiting:
        for pid in children.get(waiting.pop(), ()):
            family.add(pid)
            waiting.append(pid)
    return family - dead


def _end_like(status: int) -> None:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        if -code not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
    os._exit(code if code >= 0 else 128 - code)


def _close_inherited() -> None:
    highest = max(int(entry.name) for entry in os.scandir("/dev/fd"))
    os.closerange(3, highest + 1)


def _prctl(option: int, value: int) -> None:
    if _LINUX:
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)


if __name__ == "__main__":
    main()
