"""The project is written in the field's terms and in plain English: words that a reader would stumble over are banned.

To ban a word, add a row to `PHRASES` (free words in any text, code included) or to `PARTS` (parts of names that Python
code binds: ``box_id`` and ``BoxClient`` have the part ``box``).
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]

PHRASES = {
    # banned: (write instead, reason)
    r"worlds?": ("environment", "one word per thing"),
    r"boxe?s?": ("sandbox", "one word per thing; only Sokoban has boxes"),
    r"roster": ("scheduler", "the field's term"),
    r"shelf|shelves": ("warm pool, or cache", "the field's term"),
    r"spares?": ("warm sandbox", "the field's term"),
    r"lonely": ("orphan", "the field's term"),
    r"blam(?:e|es|ed|ing)": ("find the cause, or hold responsible", "machines blame nobody"),
    r"(?:is|are|was|were|be|been) told": ("gets, receives, is notified", "programs send and receive"),
    r"(?-i:[Ii]s none)": ("is not set, or no ...", "a negated noun has to be read twice"),
    r"whoever": ("name the subject: the caller, the client, the user", "a clause without a head"),
    r"likewise": ("also, or repeat the verb", "the reader has to look back"),
    r"so many": ("a number of, up to, that many", "it names no number"),
    r"come again": ("retry later", "the field's term"),
    r"lets? go|letting go": ("release", "the field's term"),
}
PARTS = {
    "box": "sandbox",
    "boxes": "sandboxes",
    "world": "environment",
    "worlds": "environments",
    "told": "received, output, reply",
    "said": "message, output, text",
    "heard": "received",
    "shelf": "warm_pool, cache",
    "roster": "scheduler",
    "ticket": "request",
    "lonely": "orphan",
    "spare": "warm",
    "spares": "warm",
    "stays": "detached",
}

FOLDERS = (
    "envkit",
    "environments",
    "sandbox",
    "trainer_bridge",
    "tests",
    "docs",
    "benchmarks",
    "tools",
    "docker",
    "examples",
)
ENDINGS = frozenset({".py", ".md", ".toml", ".yaml"})
SOKOBAN = re.compile(r"sokoban|rooms?\b|push", re.IGNORECASE)
"""A line with one of these words may speak of a box, since Sokoban has boxes."""
SOKOBAN_FILES = re.compile(
    r"(tests/)?environments/(sokoban|boards)/|environments/(board|catalog)\.py|tests/environments/test_options|docs/(games|adr/0006[\w-]*)\.md|.*(sokoban|gym_sokoban|games|test_benchmarks|levels|solver|peers|parity|pictures)"
)
"""Files about Sokoban and its boxes."""

_PHRASE = re.compile(
    r"(?<![\w./$-])(?:"
    + "|".join(f"(?P<p{n}>{words})" for n, words in enumerate(PHRASES)).replace(" ", r"(?:\s|#)+")
    + r")(?![\w/-]|\.\w|=[\dN])",  # keywords of libraries are allowed, such as box=None
    re.IGNORECASE,
)
_WORDS = re.compile("|".join(PHRASES).replace(" ", r"(?:\s|#)+"))
"""What `_PHRASE` finds, in lower case, and within words too; the search is faster without groups and conditions."""
_PART = re.compile(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])")
_MAY_HAVE_PART = re.compile(
    rf"(?:(?<![a-z])(?i:{'|'.join(PARTS)})|{'|'.join([*map(str.title, PARTS), *map(str.upper, PARTS)])})(?![a-z])"
)
"""Occurs in each text with a name that has a banned part; most texts without it need not be parsed."""


def sources() -> Iterator[Path]:
    """Yield the texts of the project, without this file and without links to folders that are listed themselves."""
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "Makefile", "pyproject.toml"))
    for folder in FOLDERS:
        for path in sorted(ROOT.joinpath(folder).rglob("*")):
            linked = folder == "envkit" and path.relative_to(ROOT / folder).parts[0] in FOLDERS
            if path.suffix in ENDINGS and path != Path(__file__) and not linked:
                yield path


def findings(path: Path, text: str) -> Iterator[str]:
    """Yield a line for people for each banned word: where it is, what to write instead, and why."""
    name, lines = path.relative_to(ROOT).as_posix(), text.splitlines()

    def is_allowed(word: str, line: int) -> bool:
        if word.lower() in {"box", "boxes"} and (SOKOBAN_FILES.match(name) or SOKOBAN.search(lines[line - 1])):
            return True
        return name == "CHANGELOG.md" and lines[line - 1].lstrip().startswith("|")  # the table of old names

    candidates = (_PHRASE.match(text, one.start()) for one in _WORDS.finditer(text.lower()))
    for match in filter(None, candidates):
        line, word = text.count("\n", 0, match.start()) + 1, " ".join(match[0].split())
        instead, reason = list(PHRASES.values())[int((match.lastgroup or "p0")[1:])]
        if not is_allowed(word, line):
            yield f"{name}:{line}: {word!r}: write {instead} ({reason})"
    if path.suffix == ".py" and _MAY_HAVE_PART.search(text):
        for line, bound in bound_names(ast.parse(text)):
            for part in sorted({part.lower() for part in _PART.findall(bound)} & PARTS.keys()):
                if not is_allowed(part, line):
                    yield f"{name}:{line}: {bound!r} has the part {part!r}: write {PARTS[part]}"


def bound_names(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Yield line and name of each function, class, parameter, variable and attribute that a module defines."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.lineno, node.name
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr


def test_no_text_of_the_project_has_a_banned_word() -> None:
    found = [line for path in sources() for line in findings(path, path.read_text(encoding="utf-8"))]
    assert not found, f"{len(found)} banned words:\n" + "\n".join(found)
