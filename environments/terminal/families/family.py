"""What a family of generated tasks is, how its tasks are drawn, and the cases that check them."""

from __future__ import annotations

import random
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeVar

from envkit.types import JSON, stable_hash

T = TypeVar("T")
MAX_DIFFICULTY = 5
Case = Mapping[str, JSON]
Form = Literal["exact", "lines", "sorted", "words", "json"]
"""How a text is compared; see `envkit.environments.terminal.cases`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnTask:
    """A generated task of one step, played in ``/workspace``.

    Attributes:
        instruction: What the agent is asked.
        files: Files of ``/workspace`` by relative path.
        setup: Shell script that the agent's user runs once in ``/workspace`` after the files are written. It is removed
            before the episode.
        services: Shell script that starts processes when an episode begins; empty for none.
        solution: Shell script that solves the task in ``/workspace``.
        checks: What must be true at the end: cases that `envkit.environments.terminal.cases` interprets.
        programs: Programs that the task needs besides ``sh``, ``bash``, ``python3`` and the coreutils. Their Debian
            packages have the same names.
    """

    instruction: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    setup: str = ""
    services: str = ""
    solution: str
    checks: Sequence[Case]
    programs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """A family of tasks.

    Attributes:
        name: Name of the family.
        summary: What its tasks ask for, in one sentence.
        kinds: Functions that draw a task, by difficulty, 1 to `MAX_DIFFICULTY`. One of them is chosen at random.
    """

    name: str
    summary: str
    kinds: Mapping[int, Sequence[Callable[[Draw], DrawnTask]]]

    def task(self, seed: int, difficulty: int) -> DrawnTask:
        """Return the task of a seed and a difficulty, the same in every process.

        Raises:
            ValueError: There is no such difficulty.
        """
        if difficulty not in self.kinds:
            raise ValueError(f"difficulty must lie in 1 to {MAX_DIFFICULTY}, got {difficulty}")
        draw = Draw(stable_hash("terminal", self.name, seed, difficulty))
        return draw.one(self.kinds[difficulty])(draw)


class Draw:
    """Random choices that are the same in every process and version of Python."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed).random

    def chance(self, probability: float) -> bool:
        return self._random() < probability

    def number(self, low: int, high: int) -> int:
        """Return an integer from `low` to `high`, both included."""
        return low + int(self._random() * (high - low + 1))

    def one(self, items: Sequence[T]) -> T:
        return items[int(self._random() * len(items))]

    def either(self, *items: T) -> T:
        return self.one(items)

    def some(self, items: Sequence[T], count: int) -> list[T]:
        """Return `count` different items in random order."""
        rest = list(items)
        return [rest.pop(int(self._random() * len(rest))) for _ in range(count)]

    def word(self) -> str:
        """Return an English word of 3 to 8 lower-case letters."""
        return self.one(WORDS)

    def words(self, count: int) -> list[str]:
        """Return `count` different words."""
        return self.some(WORDS, count)

    def sentence(self, low: int = 3, high: int = 8) -> str:
        """Return `low` to `high` words, which may be equal, separated by spaces."""
        return " ".join(self.word() for _ in range(self.number(low, high)))

    def output(self, suffix: str = ".txt") -> str:
        """Return a name for a file that the agent has to write."""
        return self.either("answer", "result", "output", "report", "summary", f"{self.word()}-{self.word()}") + suffix

    def script(self, suffix: str) -> str:
        """Return a name for a program that the agent has to write."""
        return f"{self.word()}-{self.word()}.{suffix}"

    def paths(self, low: int, high: int, suffixes: Sequence[str]) -> Iterator[str]:
        """Yield `low` to `high` paths of files, with different names, in a few folders."""
        folders = ["", *(f"{word}/" for word in self.words(3)), f"{self.word()}/{self.word()}/"]
        for name in self.words(self.number(low, high)):
            yield f"{self.one(folders)}{name}.{self.one(suffixes)}"


def file_case(path: str, content: JSON, form: Form = "lines") -> list[Case]:
    """Return the case of a file's content; in form ``json``, the parsed content is compared with the value."""
    return [{"kind": "file", "path": path, "content": content, "form": form}]


def absent_case(*paths: str) -> list[Case]:
    """Return the cases that there is nothing at some paths."""
    return [{"kind": "absent", "path": path} for path in paths]


def tree_case(path: str, entries: Mapping[str, JSON]) -> list[Case]:
    """Return the case of a folder's files: content, or ``{"link": target}`` of links, or None for empty folders."""
    return [{"kind": "tree", "path": path, "entries": dict(entries)}]


def modes_case(modes: Mapping[str, str]) -> list[Case]:
    """Return the case of permission bits, in octal digits, such as ``640``, by path."""
    return [{"kind": "modes", "modes": dict(modes)}]


def run_case(
    command: str,
    *,
    files: Mapping[str, str] | None = None,
    remove: Sequence[str] = (),
    modes: Mapping[str, str] | None = None,
    stdin: str = "",
    stdout: str | None = None,
    form: Form = "lines",
    exit: int | None = 0,
    then: Sequence[Case] = (),
    timeout_s: float = 10.0,
) -> list[Case]:
    """Return the case of a command that runs in a copy of the folder, on hidden files; see its checks in `cases`.

    The command is split into words as by a shell, which does not run.
    """
    case: Case = {
        "kind": "run",
        "argv": [*shlex.split(command)],
        "files": dict(files or {}),
        "remove": list(remove),
        "modes": dict(modes or {}),
        "stdin": stdin,
        "stdout": stdout,
        "form": form,
        "exit": exit,
        "then": [dict(case) for case in then],
        "timeout_s": timeout_s,
    }
    return [case]


def git_case(path: str, command: str, stdout: str, form: Form = "lines") -> list[Case]:
    """Return the case of the output of a command of git, such as ``log -1``, in the repository at `path`."""
    return [{"kind": "git", "path": path, "argv": [*shlex.split(command)], "stdout": stdout, "form": form}]


def archive_case(path: str, format: Literal["tar", "tar.gz", "zip"], members: Mapping[str, str]) -> list[Case]:
    """Return the case of an archive's files with their content."""
    return [{"kind": "archive", "path": path, "format": format, "members": dict(members)}]


def rows_case(path: str, query: str, rows: Sequence[Sequence[JSON]]) -> list[Case]:
    """Return the case of the rows that a query returns from a SQLite file."""
    return [{"kind": "rows", "path": path, "query": query, "rows": [list(row) for row in rows]}]


def python(program: str) -> str:
    """Return a shell command that runs a program of Python, for solutions and setups."""
    return f"python3 - <<'PYTHON'\n{program.strip()}\nPYTHON\n"


def write_file(path: str, content: str) -> str:
    """Return a shell command that writes a file, for solutions and setups."""
    return f"cat > {path} <<'CONTENT'\n{content.strip()}\nCONTENT\n"


def under(folder: str, items: Mapping[str, T]) -> dict[str, T]:
    """Return the items with the name of a folder in front of their paths."""
    return {f"{folder}/{path}": item for path, item in items.items()}


def lines(items: Iterable[object]) -> str:
    """Return a text with one item per line."""
    return "".join(f"{item}\n" for item in items)


_POOL = """
acorn amber anchor apple apron arrow aspen autumn badge bamboo banjo barley basil beacon beaver birch bishop bison
blossom bobbin bonnet boulder bramble brick bridge bronze brook bucket buckle butter button cabin cable cactus camel
candle canoe canvas carbon carrot castle cedar cellar chalk cherry chisel cider cinder citrus clover cobalt comet copper
coral cotton cradle crayon cricket crystal cumin curtain cypress dahlia daisy dapper denim desert diamond dolphin domino
drum eagle ebony ember emerald falcon fabric feather fennel fern ferry fiddle flannel flint forest fossil fountain fox
garden garlic gecko ginger glacier goblet granite grape gravel guitar hammer harbor harvest hazel heron hickory honey
hornet indigo iris island ivory jacket jasmine jasper jungle kayak kettle kiwi ladder lagoon lantern lark laurel lemon
lentil lily linen lizard lobster lotus lumber magnet mango maple marble meadow melon mint mirror mitten monsoon mosaic
moss mustard needle nettle nickel nutmeg oak oasis olive onion opal orbit orchard otter paddle panther papaya parsley
pebble pelican pepper pewter pigeon pillow pine planet plum pocket pollen poplar prairie prism pumpkin quartz quiver
rabbit radish raven reef ribbon river robin rocket saddle saffron sage salmon sandal sapphire satchel scarlet shadow
shelter sierra silver sphinx spruce squash starling summit sunset swallow tadpole tango teapot thistle thunder timber
topaz tulip tunnel turnip turtle valley vanilla velvet violet walnut walrus willow window winter yonder zebra zenith
zephyr
"""
WORDS = tuple(_POOL.split())
