"""Checks a generated task: interprets the cases that its family has drawn.

A generated task has this file as ``tests/check.py``, next to ``harness.py`` and ``cases.json``, a list of cases. A case
is an object with a ``kind`` (see `KINDS`); its paths are relative to the agent's folder. The functions of
`envkit.environments.terminal.families.family` make cases. It needs only the standard library of Python 3.9.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import stat
from pathlib import Path

if __package__:
    from . import harness
else:
    import harness  # type: ignore[import-not-found,no-redef]

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping
    from typing import Any

    Case = Mapping[str, Any]

_SHOWN = 200
_MEMBERS = """
import json, sys, tarfile, zipfile
path, limit, found = sys.argv[1], 16 << 20, {}
if zipfile.is_zipfile(path):
    with zipfile.ZipFile(path) as archive:
        for member in archive.infolist():
            if not member.is_dir():
                with archive.open(member) as file:
                    found[member.filename] = file.read(limit).decode(errors="replace")
    kind = "zip"
else:
    kind = "tar.gz" if open(path, "rb").read(2) == b"\\x1f\\x8b" else "tar"
    with tarfile.open(path) as archive:
        for member in archive:
            if not member.isdir():
                file = archive.extractfile(member)
                name = member.name[2:] if member.name.startswith("./") else member.name
                found[name] = file.read(limit).decode(errors="replace") if file else None
print(json.dumps([kind, found]))
"""
_ROWS = """
import json, sqlite3, sys
with sqlite3.connect(sys.argv[1]) as database:
    print(json.dumps(database.execute(sys.argv[2]).fetchall()))
"""
_GIT = ("git", "--no-pager", "--no-replace-objects", "-c", "core.hooksPath=/dev/null", "-c", "core.fsmonitor=false")
_GIT_ENV = {"GIT_CONFIG_NOSYSTEM": "1", "GIT_CONFIG_GLOBAL": "/dev/null", "GIT_OPTIONAL_LOCKS": "0"}


def check(case: Case, folder: Path) -> None:
    """Check one case in a folder of the agent.

    Raises:
        AssertionError: The case does not hold.
    """
    KINDS[case["kind"]](case, folder)


def verify() -> None:
    """Check all cases of ``cases.json`` in the agent's folder."""
    for case in json.loads(Path(__file__).with_name("cases.json").read_text()):
        check(case, harness.WORK)


def _file(case: Case, folder: Path) -> None:
    """Check the content of a regular file; see `_value` for the forms in which it is compared."""
    _compare(case["path"], harness.read(folder / case["path"]), case["content"], case["form"])


def _absent(case: Case, folder: Path) -> None:
    """Check that there is nothing at a path."""
    with harness.as_agent():
        harness.require(not os.path.lexists(folder / case["path"]), f"{case['path']} exists")


def _tree(case: Case, folder: Path) -> None:
    """Check that a folder has exactly the given files, links and empty folders.

    The entries are the content of a file, an object with the target of a link, or null for a folder, by path.
    """
    root = folder / case["path"]
    found: dict[str, Any] = {}
    with harness.as_agent(), _as_assertion():
        harness.require(root.is_dir() and not root.is_symlink(), f"{case['path']} is not a folder")
        for parent, folders, files in os.walk(root, onerror=_fail):
            for name in folders + files:
                path = Path(parent, name)
                relative = path.relative_to(root).as_posix()
                if path.is_symlink():
                    found[relative] = {"link": str(path.readlink())}
                elif name in files:
                    found[relative] = True
                elif not any(path.iterdir()):
                    found[relative] = None
    entries = case["entries"]
    harness.require(
        sorted(found) == sorted(entries),
        f"{case['path']} lacks {_shown(sorted(set(entries) - set(found)))}"
        f" and has in excess {_shown(sorted(set(found) - set(entries)))}",
    )
    for path, entry in entries.items():
        content = harness.read(root / path) if found[path] is True else found[path]
        _compare(f"{case['path']}/{path}", content, entry, "exact")


def _modes(case: Case, folder: Path) -> None:
    """Check the permission bits of files and folders, in octal digits by path."""
    for path, mode in case["modes"].items():
        with harness.as_agent(), _as_assertion():
            status = (folder / path).lstat()
        harness.require(not stat.S_ISLNK(status.st_mode), f"{path} is a link")
        found = f"{stat.S_IMODE(status.st_mode):o}"
        harness.require(found == mode, f"{path} has mode {found}, not {mode}")


def _run(case: Case, folder: Path) -> None:
    """Run a program as the agent in a private copy of the folder, on other files, and check its result.

    The paths in ``remove`` are deleted, and then ``files`` with ``modes`` are written. Cases in ``then`` are checked
    in the copy, after the program has ended.
    """
    copy = harness.private_folder()
    try:
        with _as_assertion():
            harness.copy_work(copy, folder)
            with harness.as_agent():
                for path in case["remove"]:
                    _remove(copy / path)
            for path, content in case["files"].items():
                harness.write(copy / path, content)
            with harness.as_agent():
                for path, mode in case["modes"].items():
                    (copy / path).chmod(int(mode, 8))
        result = harness.run(case["argv"], stdin=case["stdin"], cwd=copy, timeout_s=case["timeout_s"])
        words = " ".join(case["argv"])
        problem = f": {_shown(result.stderr)}" if result.stderr else ""
        if case["exit"] is not None:
            harness.require(result.returncode == case["exit"], f"{words} ended with {result.returncode}{problem}")
        if case["stdout"] is not None:
            _compare(f"output of {words}", result.stdout, case["stdout"], case["form"])
        for after in case["then"]:
            check(after, copy)
    finally:
        with harness.as_agent():
            shutil.rmtree(copy, ignore_errors=True)


def _git(case: Case, folder: Path) -> None:
    """Check the output of a command of git, which runs as the agent, without hooks and settings of the user."""
    words = (*_GIT, "-C", str(folder / case["path"]), *case["argv"])
    result = harness.run(words, cwd=folder, env=_GIT_ENV)
    harness.require(result.returncode == 0, f"git {case['argv'][0]} failed: {_shown(result.stderr)}")
    _compare("git " + " ".join(case["argv"]), result.stdout, case["stdout"], case["form"])


def _archive(case: Case, folder: Path) -> None:
    """Check the format (``tar``, ``tar.gz`` or ``zip``) of an archive and the content of its files by name."""
    kind, members = json.loads(_python(_MEMBERS, folder, case["path"]))
    harness.require(kind == case["format"], f"{case['path']} has the format {kind}, not {case['format']}")
    _compare(f"the files of {case['path']}", sorted(members), sorted(case["members"]), "exact")
    for name, content in case["members"].items():
        _compare(f"{name} in {case['path']}", members[name], content, "exact")


def _rows(case: Case, folder: Path) -> None:
    """Check the rows that a query returns from a SQLite file."""
    rows = json.loads(_python(_ROWS, folder, case["path"], case["query"]))
    _compare(f"the rows of {case['path']}", rows, case["rows"], "exact")


KINDS: Mapping[str, Callable[[Case, Path], None]] = {
    "file": _file,
    "absent": _absent,
    "tree": _tree,
    "modes": _modes,
    "run": _run,
    "git": _git,
    "archive": _archive,
    "rows": _rows,
}


def _python(program: str, folder: Path, path: str, *arguments: str) -> str:
    """Return the output of a Python program that reads a hostile file, with the rights of the agent."""
    with harness.as_agent(), _as_assertion():
        harness.require(stat.S_ISREG((folder / path).lstat().st_mode), f"{path} is not a regular file")
    result = harness.run(["python3", "-I", "-c", program, str(folder / path), *arguments], cwd=folder)
    harness.require(result.returncode == 0, f"{path} cannot be read: {_shown(result.stderr[-_SHOWN:])}")
    return result.stdout


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    elif os.path.lexists(path):
        path.unlink()


def _compare(what: str, found: object, expected: object, form: str) -> None:
    try:
        is_equal = _value(found, form) == _value(expected, form)
    except ValueError as error:
        raise AssertionError(f"{what} is not {form}: {error}") from None
    harness.require(is_equal, f"{what} is {_shown(found)}, not {_shown(expected)}")


def _value(content: object, form: str) -> object:
    """Return a content in the form in which it is compared.

    Forms: ``exact``; ``lines``, without blanks at the ends of lines and of the text; ``sorted``, the lines in any
    order; ``words``, separated by any blanks; ``json``.
    """
    if form == "exact" or not isinstance(content, str):
        return content
    if form == "json":
        return json.loads(content)
    if form == "words":
        return content.split()
    lines = [line.rstrip() for line in content.rstrip().split("\n")]
    return sorted(lines) if form == "sorted" else lines


@contextlib.contextmanager
def _as_assertion() -> Iterator[None]:
    """Turn errors of files, such as missing rights, into a failure of the agent."""
    try:
        yield
    except (OSError, shutil.Error) as error:
        raise AssertionError(f"files cannot be used: {_shown(error)}") from None


def _fail(error: OSError) -> None:
    raise error


def _shown(value: object) -> str:
    text = repr(value) if not isinstance(value, Exception) else str(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."
