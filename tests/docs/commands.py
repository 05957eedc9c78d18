"""The commands and the Python programs that the documents print in blocks of code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))

_PROGRAM = re.compile(
    r"(\w+=\S* )*([\w./-]*/)?(apt|apt-get|bash|cd|chmod|cp|curl|docker|envkit|export|git|kill|make|mkdir|pip|printf"
    r"|python3?|ray|sh|source|ssh|sudo|systemctl|tensorboard|timeout)( |$)"
)
"""The start of a line that is a command; other lines are output or a file."""
_BLOCK = re.compile(
    r"^```(?P<language>\w*)\n(?P<fenced>.*?)^```$|(?<=\n\n)(?P<indented>(?:^    [^\n]+\n)+)", re.MULTILINE | re.DOTALL
)
_COMMENT = re.compile(r"\s+# .*$")
_SHELLS = frozenset(("", "sh", "bash", "shell", "console"))


@dataclass(frozen=True, slots=True)
class Printed:
    """A command, or a Python program, that a page prints.

    Attributes:
        key: Its key in the table: the command itself, or ``python: `` and the program's first line after imports.
        text: The command or program.
        place: Page and line, for messages.
    """

    key: str
    text: str
    place: str


def printed() -> Iterator[Printed]:
    """Yield the commands and programs of all pages, in order; a command may occur more than once."""
    for page in PAGES:
        yield from printed_in(page.read_text(encoding="utf-8"), str(page.relative_to(ROOT)))


def printed_in(text: str, name: str) -> Iterator[Printed]:
    """Yield the commands and programs of a page or a part of one, in order; `name` is for messages."""
    for block in _BLOCK.finditer(text):
        place = f"{name}, line {text.count(chr(10), 0, block.start()) + 1}"
        content = block["fenced"] if block["indented"] is None else re.sub("^    ", "", block["indented"], flags=re.M)
        if block["language"] == "python" and not _is_file(text, block.start()):
            yield Printed(f"python: {_first_line(content)}", content, place)
        elif (block["language"] or "") in _SHELLS:
            yield from (Printed(command, command, place) for command in _commands(content))


def _commands(block: str) -> Iterator[str]:
    lines = re.sub(r"\s*\\\n\s*", " ", block).splitlines()
    if any(line.startswith("$ ") for line in lines):  # the other lines are output
        lines = [line.removeprefix("$ ") for line in lines if line.startswith("$ ")]
    for line in lines:
        if _PROGRAM.match(command := _COMMENT.sub("", line).strip()):
            yield command


def _first_line(program: str) -> str:
    lines = [line for line in program.splitlines() if line.strip()]
    return next((line for line in lines if not line.startswith(("import ", "from "))), lines[0])


def _is_file(text: str, start: int) -> bool:
    """Return whether a block shows a file of the page's example, which ``tests/docs/test_docs.py`` installs."""
    return re.search(r"^`[\w.]+`:\n\n\Z", text[:start], flags=re.M) is not None
