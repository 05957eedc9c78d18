"""The code of a worker process, which runs commands one after another with a user's rights.

A worker drops all other rights after its fork, so it need not switch the user for each command. It is a subreaper: it
becomes the parent of processes that a command leaves behind, and can therefore detect them.

A request consists of its length (four bytes) and these fields, separated by NUL: the path of the terminal to open
(empty for no terminal); the working directory; ``1`` if the caller wants the command's pid; the descriptor numbers
under which the command gets the attached files, separated by spaces; the number of arguments; the arguments; the
environment variables. The worker replies with `ANSWER` records.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
import time
from _socket import CMSG_SPACE, MSG_CMSG_CLOEXEC, SCM_RIGHTS, SOL_SOCKET, socket

from .. import linux
from . import process_tree

TYPE_CHECKING = False
if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable
    from typing import Any
else:
    import _signal as signal

ANSWER = struct.Struct(">iii")
"""A reply: kind (`STARTED` or `ENDED`), pid or exit code, and whether processes of the command are left (1 or 0)."""
STARTED, ENDED = 1, 2
MAX_FILES = 8
ROOM_TIMEOUT_S = 2.0
"""How long to retry the start of a grader's program at the process limit, while the agent kills other programs."""
PATH = b"/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

_RETRY_S = 0.005
# The descriptors of a command have numbers below this one.
_FIRST_FREE = 10
# Signals to reset to their defaults before a program starts. Python ignores some signals, and programs inherit that.
_RESET = tuple(number for number in range(1, 32) if number not in (signal.SIGKILL, signal.SIGSTOP))


class WorkerRequest:
    """A decoded request. `content` is the request without its length; see the format in the module docstring."""

    def __init__(self, content: bytes) -> None:
        parts = content.split(b"\0")
        self.terminal, self.folder = parts[0], parts[1]
        self.wants_pid = parts[2] == b"1"
        self.targets = [int(number) for number in parts[3].split()]
        count = int(parts[4])
        self.argv = parts[5 : 5 + count]
        self.env = dict(setting.split(b"=", 1) for setting in parts[5 + count :])


def encode_request(
    argv: list[bytes],
    env: dict[bytes, bytes],
    folder: bytes,
    targets: Iterable[int],
    terminal: bytes = b"",
    wants_pid: bool = False,
) -> bytes:
    """Encode a request to run a command in a worker.

    The command gets the files that are sent with the request as the descriptors `targets`, or opens `terminal` instead.

    Raises:
        ValueError: An argument or a variable contains NUL.
    """
    numbers = " ".join([str(number) for number in targets]).encode()
    head = [terminal, folder, b"1" if wants_pid else b"0", numbers, str(len(argv)).encode()]
    parts = head + argv + [name + b"=" + value for name, value in env.items()]
    content = b"\0".join(parts)
    if content.count(b"\0") != len(parts) - 1:
        raise ValueError("arguments and environment variables cannot contain NUL")
    return struct.pack(">I", len(content)) + content


def serve(fd: int, user: linux.User, parent: int) -> None:
    """Run as a worker of the process `parent`: serve requests from socket `fd` until it is closed. Never returns."""
    isolate(user, parent, fd)
    linux.adopt_orphans()
    channel = socket(fileno=fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, _FIRST_FREE))
    os.close(fd)
    filler = os.open(os.devnull, os.O_RDONLY)
    os.dup2(filler, 0)  # Commands without input inherit /dev/null as standard input.
    while filler < _FIRST_FREE - 1:
        filler = os.dup(filler)
    while True:
        content, files = _receive(channel)
        _run(channel, WorkerRequest(content), files, 0.0 if user.preemptible else ROOM_TIMEOUT_S)


def isolate(user: linux.User, parent: int, *kept: int, hidden: bool = False) -> None:
    """Isolate this forked child from the agent process: switch to `user` and close all files except `kept`.

    The child ends when the agent process, whose pid is `parent`, ends. If `hidden`, the user's programs cannot send
    signals to the child.
    """
    # Leave the agent's process group. A signal to that group could end this child before it kills its descendants.
    os.setpgid(0, 0)
    linux.close_others(*kept)
    linux.limit_resources()
    user.become(hidden)
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGTERM, lambda *_: _leave())
    linux.die_with_parent(signal.SIGTERM)
    if os.getppid() != parent:
        _leave()


def _run(channel: socket, request: WorkerRequest, files: list[int], timeout_s: float) -> None:
    left = 0
    try:
        pid = _start_with_retries(request, files, timeout_s)
    except OSError as error:
        pid = 0
        _report_error(request, files, error)
        code = 127 if error.errno == errno.ENOENT and error.filename != request.folder else 126
    finally:
        for fd in files:
            os.close(fd)
    if pid:
        if request.wants_pid:
            channel.send(ANSWER.pack(STARTED, pid, 0))
        code, left = _wait(pid)
    channel.send(ANSWER.pack(ENDED, code, left))


def _wait(child: int) -> tuple[int, int]:
    """Wait for `child`; return its exit code, and whether other children of this worker are alive (1 or 0)."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == child:
            break
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return process_tree.exit_code(status), 0
    return process_tree.exit_code(status), 1


def _start_with_retries(request: WorkerRequest, files: list[int], timeout_s: float) -> int:
    deadline = time.monotonic() + timeout_s
    while True:
        try:
            return _start(request, files)
        except BlockingIOError:  # The sandbox has reached its process limit. Retry, because processes may end.
            if time.monotonic() >= deadline:
                raise
        time.sleep(_RETRY_S)


def _start(request: WorkerRequest, files: list[int]) -> int:
    """Start the command in a new session and return its pid."""
    if not request.argv or not request.argv[0]:
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), b"")
    os.chdir(request.folder)
    program = _find(request.argv[0], request.env.get(b"PATH", PATH))
    if request.terminal:
        actions: list[Any] = [(os.POSIX_SPAWN_OPEN, 0, request.terminal, os.O_RDWR, 0)]
        actions += [(os.POSIX_SPAWN_DUP2, 0, number) for number in (1, 2)]
    else:
        actions = [(os.POSIX_SPAWN_DUP2, fd, number) for fd, number in zip(files, request.targets)]
    return os.posix_spawn(
        program, request.argv, request.env, file_actions=actions, setsid=True, setsigmask=(), setsigdef=_RESET
    )


def _find(name: bytes, path: bytes) -> bytes:
    """Return the path of the program `name`. Like a shell, search the folders in `path`, a value of ``PATH``."""
    if b"/" in name:
        return name
    refused = None
    for folder in path.split(b":"):
        program = os.path.join(folder or b".", name)
        if os.path.isfile(program):
            if os.access(program, os.X_OK):
                return program
            refused = program
    number = errno.EACCES if refused else errno.ENOENT
    raise OSError(number, os.strerror(number), name)


def _report_error(request: WorkerRequest, files: list[int], error: OSError) -> None:
    """Write to the command's standard error why the command could not be started."""
    name = error.filename if error.filename is not None else request.argv[0]
    text = os.fsencode(name) + b": " + os.fsencode(error.strerror or "cannot be started") + b"\n"
    try:
        if request.terminal:
            files.append(os.open(request.terminal, os.O_WRONLY | os.O_NOCTTY))
        os.write(files[request.targets.index(2)] if request.targets else files[-1], text)
    except (OSError, ValueError, IndexError):
        pass


def _receive(channel: socket) -> tuple[bytes, list[int]]:
    """Wait for the next request; return its content and the descriptors of its attached files."""
    piece, attached, _, _ = channel.recvmsg(1 << 16, CMSG_SPACE(4 * MAX_FILES), MSG_CMSG_CLOEXEC)
    files: list[int] = []
    for level, kind, content in attached:
        if level == SOL_SOCKET and kind == SCM_RIGHTS:
            files += struct.unpack("%di" % (len(content) // 4), content[: len(content) // 4 * 4])
    content = piece
    while piece and (len(content) < 4 or len(content) < 4 + int(struct.unpack_from(">I", content)[0])):
        piece = channel.recv(1 << 18)
        content += piece
    if not piece:
        _leave()
    return content[4:], files


def _leave() -> None:
    process_tree.kill_descendants()
    os._exit(0)
