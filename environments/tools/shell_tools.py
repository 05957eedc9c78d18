"""Tools for work in a sandbox: a shell, a viewer and an editor of files, and the end of the episode."""

from __future__ import annotations

import shlex

from envkit.errors import MissingFileError
from envkit.protocols import Sandbox
from envkit.types import ExecResult

_MAX_FILE = 4 << 20
"""Maximum bytes of a file to view or edit."""

_MAX_LINES = 5000
"""Maximum number of lines that are shown at once."""


async def bash(command: str, sandbox: Sandbox, timeout_s: float) -> str:
    """Run a command in a shell and return its output and exit code. The shell keeps its folder and variables.

    Args:
        command: The command, of one or several lines. Its standard input is empty.
    """
    return format_result(await sandbox.shell().run(command, timeout_s=timeout_s), timeout_s)


def format_result(result: ExecResult, timeout_s: float) -> str:
    """Return the output of a command, and how it ended, for a model."""
    parts = []
    if result.truncated_bytes:
        parts.append(f"... {result.truncated_bytes:,} bytes of output dropped ...")
    parts += [text.rstrip("\n") for text in (result.stdout, result.stderr) if text.strip("\n")]
    if result.timed_out:
        parts.append(f"[stopped after {timeout_s:g} s, the time limit of a command]")
    else:
        parts.append(f"[exit code {result.exit_code}]")
    if result.is_out_of_memory:
        parts.append("[a process was killed because the memory is full]")
    if result.is_shell_lost:
        parts.append("[the shell has ended; the next command starts a new one, without its folder and variables]")
    return "\n".join(parts)


async def view_file(path: str, sandbox: Sandbox, first_line: int = 1, last_line: int | None = None) -> str:
    """Show a text file with line numbers.

    Args:
        path: Path of the file, relative to the folder of the shell.
        first_line: Number of the first line to show, counted from 1.
        last_line: Number of the last line to show; null for the last line of the file.
    """
    if not path.startswith("/"):
        path = await _absolute(sandbox, path)
    text = (await sandbox.read(path, max_bytes=_MAX_FILE)).decode(errors="replace")
    lines = text.removesuffix("\n").split("\n") if text else []
    last = len(lines) if last_line is None else min(last_line, len(lines))
    if not lines:
        return f"{path} is empty"
    if not 1 <= first_line <= last:
        raise ValueError(f"there are no lines {first_line} to {last_line or last}; {path} has {len(lines)} lines")
    last = min(last, first_line + _MAX_LINES - 1)
    width = len(str(last))
    numbered = [f"{number:{width}}  {lines[number - 1]}" for number in range(first_line, last + 1)]
    return "\n".join([*numbered, f"[lines {first_line} to {last} of {len(lines)}]"])


async def edit_file(path: str, old: str, new: str, sandbox: Sandbox) -> str:
    """Replace a text that occurs exactly once in a file.

    Args:
        path: Path of the file, relative to the folder of the shell. Links are followed.
        old: The exact text to replace, with its white space. Empty to create a new file.
        new: The text to write instead.
    """
    path = await _absolute(sandbox, path)
    try:
        content = (await sandbox.read(path, max_bytes=_MAX_FILE)).decode()
    except MissingFileError:
        if old:
            raise
        await sandbox.write(path, new.encode())
        return f"created {path}"
    if not old:
        raise ValueError(f"{path} exists; the old text must not be empty")
    count = content.count(old)
    if count != 1:
        remedy = "check its white space" if count == 0 else "include more of the lines around it"
        if count == 0 and "\r\n" in content and "\r" not in old:
            remedy = "the lines of the file end with CR LF, \\r\\n"
        raise ValueError(f"the old text occurs {count} times in {path}, and must occur once; {remedy}")
    stat = await sandbox.exec(["stat", "-c", "%a", "--", path])  # the new file keeps the mode of the old one
    mode = int(stat.stdout, 8) & 0o777 if stat.exit_code == 0 else None
    await sandbox.write(path, content.replace(old, new).encode(), mode=mode)
    line = content[: content.index(old)].count("\n") + 1
    return f"edited {path} at line {line}"


async def _absolute(sandbox: Sandbox, path: str) -> str:
    """Return the path of a file as the shell of the sandbox sees it, with links followed."""
    if "\0" in path or not path:
        raise ValueError(f"{path!r} is not the path of a file")
    word = f'"$HOME"{shlex.quote(path[1:])}' if path.startswith("~/") else shlex.quote(path)
    # Without the parent folder of a new file, readlink prints nothing.
    script = f'set -- {word}; case $1 in /*) ;; *) set -- "$PWD/$1" ;; esac; readlink -f -- "$1" || printf "%s" "$1"'
    found = await sandbox.shell().run(f"({script})")
    return found.stdout.removesuffix("\n") if found.exit_code == 0 and found.stdout else path


async def submit(answer: str = "") -> str:
    """Submit the work and end the episode.

    Args:
        answer: The answer, if the task asks for one.
    """
    return answer
