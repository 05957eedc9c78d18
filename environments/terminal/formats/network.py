"""Find tests that need the network, such as those that first install pytest: without network they fail."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from ..tasks import TerminalTask

_COMMENT = re.compile(r"(^|\s)#.*")
_LOCAL = re.compile(r"(https?://)?(localhost|127(\.\d+){3}|0\.0\.0\.0|\[::1?\])([:/?].*)?", re.IGNORECASE)
_URL = re.compile(r"(?:https?|ftp|git|ssh)://[^\s\"'|;)]+|git@[\w.-]+:[^\s\"'|;)]+", re.IGNORECASE)
_OFFLINE = re.compile(r"\s(--no-index|--offline|--no-download)\b")
_START = (
    r"(?:^|[;&|({`]|\b(?:then|do|else|if|elif|while|until|sudo|exec|time|command|nohup|env|timeout\s+\S+|xargs)\s"
    r"|(?<!\S)!\s|(?<!\S)-\w*c\s+[\"'])\s*(?:\w+=\S*\s+)*(?:sudo\s+)?(?:/\S+/)?"
)
"""What precedes the name of a command in a line of a shell script."""
_OPTIONS = r"(?:\s+-\S+)*\s+"
_INSTALLERS = "|".join(
    (
        rf"(?:apt|apt-get){_OPTIONS}(?:update|install|upgrade|dist-upgrade)\b",
        rf"apk{_OPTIONS}(?:add|update|upgrade)\b",
        rf"(?:dnf|yum|conda|mamba|gem|brew){_OPTIONS}(?:install|update)\b",
        rf"(?:pip[\d.]*|pipx|python[\d.]*\s+-m\s+pip){_OPTIONS}(?:install|download)\b",
        rf"uv{_OPTIONS}(?:pip{_OPTIONS}(?:install|sync)|add|sync|run|tool{_OPTIONS}(?:install|run)|python{_OPTIONS}install)\b",
        r"uvx\b",
        rf"(?:npm|pnpm|yarn){_OPTIONS}(?:install|i|ci|add)\b",
        r"npx\b",
        rf"cargo{_OPTIONS}(?:install|fetch|add)\b",
        rf"go{_OPTIONS}(?:get|install|mod{_OPTIONS}download)\b",
    )
)
_INSTALL = re.compile(f"{_START}(?P<command>(?:{_INSTALLERS})[^;&|]*)")
_FETCH = re.compile(rf"{_START}(?P<command>(?:curl|wget|git{_OPTIONS}(?:clone|fetch|pull|submodule))\b[^;&|]*)")


@dataclass(frozen=True, slots=True)
class NetworkUse:
    """A command of the tests that needs the network.

    Attributes:
        file: Script with the command.
        line: Number of its line, from 1.
        command: The command.
    """

    file: Path
    line: int
    command: str


def network_uses(task: TerminalTask) -> list[NetworkUse]:
    """Return the commands in the shell scripts of the tests that fetch or install something from another host.

    Commands in other programs, and hosts that only a variable names, are not found.
    """
    folders = {step.verifier.tests: None for step in task.steps}
    files = dict.fromkeys(file for folder in folders for file in sorted(folder.rglob("*.sh")) if file.is_file())
    return [use for file in files for use in _uses(file)]


def _uses(file: Path) -> Iterator[NetworkUse]:
    for number, line in _lines(file.read_text(encoding="utf-8", errors="replace")):
        for match in _INSTALL.finditer(line):
            if not _OFFLINE.search(match["command"]):
                yield NetworkUse(file, number, match["command"].strip())
        for match in _FETCH.finditer(line):
            urls = _URL.findall(match["command"])
            if any(not _LOCAL.fullmatch(url) for url in urls):
                yield NetworkUse(file, number, match["command"].strip())


def _lines(text: str) -> Iterator[tuple[int, str]]:
    """Yield lines without comments, and the number of each; a line that ends with a backslash goes on in the next."""
    start, whole = 0, ""
    for number, line in enumerate(text.splitlines(), 1):
        start = start or number
        part = _COMMENT.sub("", line)
        if part.endswith("\\"):
            whole += part[:-1] + " "
            continue
        yield start, whole + part
        start, whole = 0, ""
    if whole:
        yield start, whole
