"""Unified diffs: their reverse, and the diff between two texts."""

from __future__ import annotations

import difflib
import re

_HUNK = re.compile(r"@@ -(\d+(?:,(\d+))?) \+(\d+(?:,(\d+))?) @@(.*)", re.DOTALL)
_SWAPPED = {
    "new file mode ": "deleted file mode ",
    "deleted file mode ": "new file mode ",
    "old mode ": "new mode ",
    "new mode ": "old mode ",
    "rename from ": "rename to ",
    "rename to ": "rename from ",
}
_SIGNS = {"-": "+", "+": "-"}


def reverse(diff: str) -> str:
    """Return the diff that undoes a unified diff, as ``git diff`` or ``diff -u`` write it.

    Raises:
        ValueError: The diff is binary or copies a file, or a hunk has fewer lines than its header announces.
    """
    lines = _lines(diff)
    found: list[str] = []
    position = 0
    while position < len(lines):
        line = lines[position]
        position += 1
        hunk = _HUNK.match(line)
        if hunk:
            old, new = (int(hunk[group] or 1) for group in (2, 4))
            found.append(f"@@ -{hunk[3]} +{hunk[1]} @@{hunk[5]}")
            end = _end_of_hunk(lines, position, old, new)
            found += _reversed_lines(lines[position:end])
            position = end
        elif line.startswith("--- ") and position < len(lines) and lines[position].startswith("+++ "):
            found += [f"--- {_path(lines[position], 'b/', 'a/')}", f"+++ {_path(line, 'a/', 'b/')}"]
            position += 1
        elif line.startswith(("GIT binary patch", "Binary files ", "copy from ")):
            raise ValueError(f"the diff cannot be reversed, because of the line {line.strip()[:80]!r}")
        else:
            found.append(_reversed_header(line))
    return "".join(_in_order(found))


def between(path: str, old: str | None, new: str | None) -> str:
    """Return the diff between two texts of a file; None stands for a file that does not exist."""
    if old == new:
        return ""
    before, after = (_lines(text or "") for text in (old, new))
    names = ("/dev/null" if old is None else f"a/{path}", "/dev/null" if new is None else f"b/{path}")
    lines = difflib.unified_diff(before, after, *names)
    body = "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)
    mode = "new file mode 100644\n" if old is None else "deleted file mode 100644\n" if new is None else ""
    return f"diff --git a/{path} b/{path}\n{mode}{body}" if mode else body


def _lines(text: str) -> list[str]:
    """Return the lines of a text with their ends. Unlike `str.splitlines`, only a line feed ends a line."""
    return re.findall(r"[^\n]*\n|[^\n]+", text)


def _end_of_hunk(lines: list[str], position: int, old: int, new: int) -> int:
    """Return the position after a hunk whose lines begin at `position`, with `old` and `new` lines of the two sides."""
    while old > 0 or new > 0:
        if position == len(lines):
            raise ValueError("the diff ends within a hunk")
        sign = lines[position][:1]
        old -= sign in (" ", "-", "\n")
        new -= sign in (" ", "+", "\n")
        if sign not in ("\\", " ", "-", "+", "\n"):
            raise ValueError(f"a hunk has the line {lines[position].strip()[:80]!r}")
        position += 1
    while position < len(lines) and lines[position].startswith("\\"):
        position += 1
    return position


def _reversed_lines(lines: list[str]) -> list[str]:
    """Return the lines of a hunk with removed and added lines swapped, the removed ones first."""
    found: list[str] = []
    removed: list[str] = []
    added: list[str] = []
    current = found
    for line in lines:
        if line[:1] in _SIGNS:
            current = added if line[0] == "-" else removed
            current.append(_SIGNS[line[0]] + line[1:])
        elif line.startswith("\\"):
            current.append(line)
        else:
            found += [*removed, *added, line]
            removed, added, current = [], [], found
    return [*found, *removed, *added]


def _path(line: str, prefix: str, other: str) -> str:
    """Return the path of a line such as ``+++ b/file``, with `prefix` replaced by `other`."""
    path = line[4:]
    return other + path[len(prefix) :] if path.startswith(prefix) else path


def _reversed_header(line: str) -> str:
    if index := re.match(r"index (\w+)\.\.(\w+)(.*)", line, re.DOTALL):
        return f"index {index[2]}..{index[1]}{index[3]}"
    if names := re.fullmatch(r"diff --git a/(.*) b/(.*)\n", line):
        return f"diff --git a/{names[2]} b/{names[1]}\n"
    for start, other in _SWAPPED.items():
        if line.startswith(start):
            return other + line[len(start) :]
    return line


def _in_order(lines: list[str]) -> list[str]:
    """Return the lines with the old mode before the new one, and the old name before the new one, as git requires."""
    for position in range(len(lines) - 1):
        for first, second in (("old mode ", "new mode "), ("rename from ", "rename to ")):
            if lines[position].startswith(second) and lines[position + 1].startswith(first):
                lines[position], lines[position + 1] = lines[position + 1], lines[position]
    return lines
