"""docs/architecture.md follows the tree.

Its rule: a word in backticks that begins with a folder of the product and a slash is a path. If it ends in a slash, it
is a package. In the row of a package in a table, the other words in backticks outside parentheses are its modules.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("envkit", "environments", "cheats/envkit_cheats", "sandbox", "trainer_bridge")
TEXT = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
PATHS = re.findall(rf"`((?:{'|'.join(FOLDERS)})/[^`]*)`", TEXT)


def packages(folder: Path) -> Iterator[Path]:
    yield folder
    for inner in folder.iterdir():
        if (inner / "__init__.py").is_file() and not inner.is_symlink():
            yield from packages(inner)


def test_each_package_is_named_exactly_once() -> None:
    named = [path for path in PATHS if path.endswith("/")]
    found = [package for folder in FOLDERS for package in packages(ROOT / folder)]
    assert sorted(named) == sorted(f"{package.relative_to(ROOT)}/" for package in found)


def test_every_path_that_is_named_exists() -> None:
    assert [path for path in PATHS if not (ROOT / path).exists()] == []


def test_the_row_of_each_package_names_exactly_its_modules() -> None:
    rows = re.findall(r"^\| `([\w/]+/)` \| (.*) \|$", TEXT, flags=re.MULTILINE)
    named = {package: re.findall(r"`([^`]*)`", re.sub(r"\([^)]*\)", "", about)) for package, about in rows}
    found = {package: [file.stem for file in (ROOT / package).glob("[!_]*.py")] for package in named}
    assert {package: sorted(names) for package, names in named.items()} == {
        package: sorted(names) for package, names in found.items()
    }
