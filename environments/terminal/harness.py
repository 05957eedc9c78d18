"""Runs the check of a terminal task and writes its reward; it also has functions for such checks.

The verifier copies this file into the tests of a task, next to ``check.py``, whose function ``verify`` raises
`AssertionError` (see `require`) unless the task is solved. ``test.sh`` runs this file with ``python3 -I``, as root
where the sandbox has root. Programs and files of the agent are used with the rights of the agent's user. It needs only
the standard library of Python 3.9.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence
    from typing import Any

WORK = Path("/workspace")
AGENT = 1000
"""User and group id of the agent's programs; those of the agent's user in the sandboxes of envkit."""
MAX_OUTPUT = 16 << 20
"""Maximum bytes of a program's output and of a file that is read."""
_STARTS_PROGRAMS = re.compile("exec|fork|spawn|popen|proc_open|system|clone|syscall|^_*dl|wordexp|mprotect|ptrace")
"""Matches the functions of the C library with which a program can run another one, or code that was not compiled."""
_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"


def require(condition: object, problem: str) -> None:
    """Fail the check with a message, which is kept in the verifier's log, unless `condition` is true."""
    if not condition:
        raise AssertionError(problem)


@contextlib.contextmanager
def as_agent() -> Iterator[None]:
    """Access files with the rights of the agent's user in the block."""
    if os.geteuid() != 0:
        yield
        return
    groups = os.getgroups()
    os.setgroups([])
    os.setegid(AGENT)
    os.seteuid(AGENT)
    try:
        yield
    finally:
        os.seteuid(0)
        os.setegid(0)
        os.setgroups(groups)


def read(path: str | Path) -> str:
    """Return the text of a regular file that the agent's user can read.

    Raises:
        AssertionError: There is no such file, it is a link or special file, or it is larger than `MAX_OUTPUT`.
    """
    with as_agent():
        try:
            number = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError as error:
            raise AssertionError(f"{path} cannot be read: {error.strerror}") from None
        with os.fdopen(number, "rb") as file:
            require(stat.S_ISREG(os.fstat(number).st_mode), f"{path} is not a regular file")
            content = file.read(MAX_OUTPUT + 1)
    require(len(content) <= MAX_OUTPUT, f"{path} is larger than {MAX_OUTPUT} bytes")
    return content.decode(errors="replace")


def run(
    argv: Sequence[str | Path],
    *,
    stdin: str = "",
    cwd: str | Path = WORK,
    timeout_s: float = 10.0,
    env: Mapping[str, str] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a program as the agent's user and return its result. Afterwards, its process group is killed.

    Raises:
        AssertionError: It exceeds `timeout_s`, or prints more than `MAX_OUTPUT` bytes. If it cannot be started, the
            result has the exit code 126 or 127.
    """
    words = _command(argv, cwd)
    with tempfile.TemporaryFile() as given, tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        given.write(stdin.encode())
        given.seek(0)
        process = subprocess.Popen(words, stdin=given, stdout=out, stderr=err, **_options(env))
        try:
            code = process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{argv[0]} did not end within {timeout_s:g} s") from None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        texts = []
        for file in (out, err):
            file.seek(0)
            content = file.read(MAX_OUTPUT + 1)
            require(len(content) <= MAX_OUTPUT, f"{argv[0]} printed more than {MAX_OUTPUT} bytes")
            texts.append(content.decode(errors="replace"))
    return subprocess.CompletedProcess(words, code, texts[0], texts[1])


def start(argv: Sequence[str | Path], *, cwd: str | Path = WORK, env: Mapping[str, str] | None = None) -> None:
    """Start a server as the agent's user, in the background. It is killed at the end of the check."""
    with Path(os.devnull).open("r+b") as null:
        subprocess.Popen(_command(argv, cwd), stdin=null, stdout=null, stderr=null, **_options(env))


def private_folder() -> Path:
    """Return a new folder that the agent's user can use and that the agent has never seen, for copies of its files."""
    folder = Path(tempfile.mkdtemp(prefix="check-", dir="/tmp"))
    if os.geteuid() == 0:
        os.chown(folder, AGENT, AGENT)
    return folder


def compile_c(source: str | Path, *options: str) -> Path:
    """Compile a C file of the agent; return a program that the agent's user can run, but not change.

    The program must do the work itself: inline assembly and functions that start other programs are refused.

    Raises:
        AssertionError: It does not compile, or is refused.
    """
    folder = private_folder()
    write(folder / "main.c", read(source))
    for step in (["-S", "main.c"], ["-c", "main.c"], ["-o", "program", "main.o"]):
        built = run(["gcc", "-std=gnu11", "-O1", "-g", *options, *step], cwd=folder)
        require(built.returncode == 0, f"{source} does not compile: {built.stderr[-500:]}")
    require("#APP" not in read(folder / "main.s"), f"{source} has inline assembly")
    called = [line.split()[-1] for line in run(["nm", "-u", "main.o"], cwd=folder).stdout.splitlines()]
    refused = sorted(filter(_STARTS_PROGRAMS.search, called))
    require(not refused, f"{source} calls {', '.join(refused)}; the program must do its work itself")
    with as_agent():
        content = (folder / "program").read_bytes()
    program = Path(tempfile.mkdtemp(dir="/tmp")) / "program"
    program.write_bytes(content)
    for path in (program, program.parent):
        path.chmod(0o755)
    return program


def copy_work(target: Path, source: str | Path = WORK) -> None:
    """Copy a folder of the agent into an existing folder, with the rights of the agent's user. Links stay links."""
    with as_agent():
        shutil.copytree(source, target, symlinks=True, dirs_exist_ok=True)


def write(path: str | Path, content: str | bytes, mode: int = 0o644) -> None:
    """Write a file with the rights of the agent's user, in place of one that is there; missing folders are created."""
    with as_agent():
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):
            Path(path).unlink()
        number = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
        with os.fdopen(number, "wb") as file:
            os.fchmod(number, mode)
            file.write(content.encode() if isinstance(content, str) else content)


def end_agent() -> None:
    """Kill all processes of the agent's user."""
    if os.geteuid() == 0:
        kill = "import os; os.kill(-1, 9)"
        subprocess.run([sys.executable, "-I", "-c", kill], check=False, **_options(None))


def _command(argv: Sequence[str | Path], cwd: str | Path) -> list[str]:
    """Return a command that enters `cwd` with the rights of the agent's user; root may have no right to do so."""
    nice = "nice -n 5 " if os.geteuid() == 0 else ""  # so that a fork bomb cannot starve the check that kills it
    return ["/bin/sh", "-c", f'cd "$0" && exec {nice}"$@"', str(cwd), *map(str, argv)]


def _options(env: Mapping[str, str] | None) -> dict[str, Any]:
    user = {"user": AGENT, "group": AGENT, "extra_groups": []} if os.geteuid() == 0 else {}
    return {"cwd": "/", "env": _environment(env), "start_new_session": True, **user}


def _environment(more: Mapping[str, str] | None) -> dict[str, str]:
    # Programs such as git and valgrind read files in HOME, which must not be those of the agent.
    return {"PATH": _PATH, "LANG": "C.UTF-8", "HOME": str(private_folder()), **(more or {})}


def main(verify: Callable[[], None]) -> None:
    """Run `verify` and write the reward, whatever happens."""
    reward = "0"
    try:
        end_agent()  # Harbor leaves the agent's processes running
        verify()
        reward = "1"
    except AssertionError as error:
        print(f"not solved: {error}")
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        try:
            end_agent()
        except OSError as error:  # the agent's programs may have used up the limit of processes
            reward = "0"
            print(f"not solved: processes of the agent cannot be ended: {error}")
        folder = Path(os.environ.get("ENVKIT_LOGS", "/logs"), "verifier")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reward.txt").write_text(f"{reward}\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parent))
    import check  # type: ignore[import-not-found]

    main(check.verify)
