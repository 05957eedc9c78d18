"""Programs of envkit in processes of their own that need not import torch again.

`Program` and `run` are used as `subprocess.Popen` and `subprocess.run`. They fork `envkit ...`, `python -m envkit ...`
and `python -c ...` from a process in which the slow modules are imported, which saves a second of processor time, or
four with torch. A user starts a new process, though: so are the printed commands of docs/ tested, and whatever depends
on how Python starts (its options, a locale, modules that must not be imported, memory, Ctrl-C while it imports). All
forks have one hash seed, so where the order of sets might matter, set PYTHONHASHSEED: the program is then started anew.
"""

from __future__ import annotations

import json
import os
import re
import select
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SCRIPT = str(Path(sys.executable).with_name("envkit"))
_ADDRESS = "ENVKIT_TEST_PROGRAMS"
_READ_AT_IMPORT = re.compile(
    "PYTHON(?!PATH$|DONTWRITEBYTECODE$)|OMP_(?!WAIT_POLICY$)|MKL_|OPENBLAS_|HF_|TORCH(?!INDUCTOR_CACHE_DIR$)"
    "|TRANSFORMERS_|CUDA_|LANG|LC_"
)
"""Environment variables that a forked program would not follow: if they differ, it is started anew.

Importing envkit and torch sets the two that are left out, in the processes of pytest too.
"""
_started_with: dict[str, str] = {}


def start_server() -> None:
    """Start the process that forks the programs of this test run, unless one of its processes has."""
    _started_with.update(_fixed(os.environ))
    if _ADDRESS in os.environ:
        return
    address = f"\0envkit-programs-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen(64)
        subprocess.Popen(
            [sys.executable, "-m", "tests.programs.fork_server", str(listener.fileno())],
            pass_fds=[listener.fileno()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            cwd=Path(__file__).parents[2],
            start_new_session=True,
        )
    os.environ[_ADDRESS] = address[1:]


class Program(subprocess.Popen[Any]):
    """A program of envkit; takes the arguments of `subprocess.Popen` that tests need."""

    _line: socket.socket | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, *rest: Any) -> None:
        close_fds, pass_fds, cwd, env, _, _, shell = rest[:7]
        pipes, (*_, new_session, group) = rest[7:13], rest
        words = [str(word) for word in args]
        variables = dict(os.environ if env is None else env)
        is_plain = close_fds and not (preexec_fn or pass_fds or shell) and group == -1
        is_ours = rest[14:18] == (None, None, None, -1)  # groups, user and umask
        if not (is_plain and is_ours and _can_fork(words, variables)):
            super()._execute_child(args, executable, preexec_fn, *rest)  # type: ignore[misc]
            return
        request = {"argv": words, "cwd": str(cwd or Path.cwd()), "env": variables, "new_session": bool(new_session)}
        content = json.dumps(request).encode()
        files = [one if one != -1 else number for number, one in enumerate((pipes[0], pipes[3], pipes[5]))]
        self._line = socket.socket(socket.AF_UNIX)
        self._line.connect(f"\0{os.environ[_ADDRESS]}")
        socket.send_fds(self._line, [len(content).to_bytes(4, "little")], files)
        self._line.sendall(content)
        self.pid = _read_number(self._line)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._line is None:
            found: int | None = super()._internal_poll(*args, **kwargs)  # type: ignore[misc]
            return found
        return self.returncode if self.returncode is not None or not self._has_ended(0) else self._take()

    def _wait(self, timeout: float | None) -> int:
        if self._line is None:
            found: int = super()._wait(timeout)  # type: ignore[misc]
            return found
        if self.returncode is None and not self._has_ended(timeout):
            assert timeout is not None
            raise subprocess.TimeoutExpired(self.args, timeout)
        return self._take() if self.returncode is None else self.returncode

    def _has_ended(self, timeout_s: float | None) -> bool:
        assert self._line is not None
        return bool(select.select([self._line], [], [], timeout_s)[0])

    def _take(self) -> int:
        assert self._line is not None
        with self._line:
            self.returncode = os.waitstatus_to_exitcode(_read_number(self._line))
        return self.returncode


def run(
    words: Sequence[str | Path],
    *,
    input: str | None = None,
    timeout: float | None = None,
    check: bool = False,
    **how: Any,
) -> subprocess.CompletedProcess[str]:
    """Run a program to its end with its output as text, as `subprocess.run(..., capture_output=True, text=True)`."""
    pipe = subprocess.PIPE
    settings = {"stdin": None if input is None else pipe, "stdout": pipe, "stderr": pipe, "text": True, **how}
    with Program(words, **settings) as program:
        try:
            output, errors = program.communicate(input, timeout)
        except BaseException:
            program.kill()
            raise
    done = subprocess.CompletedProcess(words, program.returncode, output, errors)
    if check:
        done.check_returncode()
    return done


def _read_number(line: socket.socket) -> int:
    content = line.recv(4, socket.MSG_WAITALL)
    if len(content) < 4:
        raise ChildProcessError("the process that forks the programs of tests has ended")
    return int.from_bytes(content, "little")


def _can_fork(words: Sequence[str], variables: Mapping[str, str]) -> bool:
    if words[0] != SCRIPT and not (words[0] == sys.executable and (words[1] == "-c" or words[1:3] == ["-m", "envkit"])):
        return False
    return _ADDRESS in os.environ and _fixed(variables) == _started_with


def _fixed(variables: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in variables.items() if _READ_AT_IMPORT.match(name)}
