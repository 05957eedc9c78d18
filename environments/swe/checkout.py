"""Source trees of tasks on this machine, and patches: what they change, applied without trusting the paths in them."""

from __future__ import annotations

import difflib
import hashlib
import json
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath

from envkit import clock
from envkit.errors import UsageError
from envkit.types import JSON

from .packages import OWN, fetch, put, requirement_of, set_date, sha256_of, unpack
from .runs import REPO
from .tasks import Lock, SweTask

MAX_FILE = 1 << 20
"""Maximum bytes of a changed file."""

_MODES = re.compile(r"^(old mode|new mode|rename from|copy from|new file mode (?!100644)|GIT binary patch).*", re.M)
_GIT_TIMEOUT_S = 60.0
_HUNK = re.compile(r"@@ -(\d+)(?:,(\d+))? \+\d+(?:,(\d+))? @@")
_WRITE = """
import json, os, sys
for path, hunks in json.loads(sys.argv[1]).items():
    os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
    with open(path, "a+", encoding="utf-8", newline="") as file: lines = (file.seek(0), file.read())[1].split("\\n")
    for start, old, new in reversed(hunks):
        place = slice(start - 1, start - 1 + len(old))
        assert lines[place] == old, "the patch does not fit line %d of %s" % (start, path)
        lines[place] = new
    with open(path, "w", encoding="utf-8", newline="") as file: file.write("\\n".join(lines))
"""


async def source_of(task: SweTask, folder: Path, lock: Lock | None = None) -> Path:
    """Return the folder with the source of a task: its package with the bug.

    The folder is made once, as a subfolder of ``folder/trees``. Do not change its files. The source distribution is in
    ``folder/sdists``; pip downloads it if it is missing. `lock` has its hash; None to use any.

    Raises:
        UsageError: The source distribution has another hash; pip failed; or the patch does not apply.
    """
    return await clock.to_thread(_source_of, task, folder, lock)


def changes_of_patch(tree: Path, patch: str) -> Mapping[str, bytes]:
    """Return the files that a patch adds to a tree or changes in it, with their new content. `tree` is not changed.

    Raises:
        UsageError: The patch does not apply; it has an absolute path or one with ``..``; it changes a mode, renames or
            deletes a file, or adds a link or binary file; or git is missing.
    """
    if not patch.strip():
        return {}
    if (found := _MODES.search(patch)) is not None:
        raise UsageError(f"the patch must only change the text of files, but has the line {found.group()!r}")
    with tempfile.TemporaryDirectory() as scratch:
        target = Path(scratch) / "tree"
        target.mkdir()
        listed = _git(["apply", "--numstat", "-z"], patch, target)
        paths = [entry.split("\t", 2)[2] for entry in listed.split("\0") if entry.count("\t") >= 2]
        for path in paths:
            if (why := why_unsafe(tree, path)) is not None:
                raise UsageError(f"the patch changes {path!r}: {why}")
            if (tree / path).is_file():
                (target / path).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(tree / path, target / path)
        _git(["apply", "--whitespace=nowarn"], patch, target)
        for path in paths:
            if not (target / path).is_file():
                raise UsageError(f"the patch must not delete files, but deletes {path!r}")
        return {path: (target / path).read_bytes() for path in paths}


def apply_command(patch: str) -> str:
    """Return a command of bash that applies a patch of existing files, for sandboxes without git or patch."""
    edits: dict[str, list[JSON]] = {}
    path, lines = "", patch.split("\n")
    while lines:
        line = lines.pop(0)
        if line.startswith("+++ "):
            path = line[4:].partition("\t")[0].removeprefix("b/")
        elif (hunk := _HUNK.match(line)) is not None:
            old, new = (1 if count is None else int(count) for count in hunk.groups()[1:])
            start = int(hunk[1]) + (old == 0)  # a hunk without old lines comes after line `start`
            removed: list[JSON] = []
            added: list[JSON] = []
            edits.setdefault(path, []).append([start, removed, added])
            while lines and (old > 0 or new > 0):
                line = lines.pop(0) or " "
                old, new = old - (line[0] in " -"), new - (line[0] in " +")
                if line[0] in " -":
                    removed.append(line[1:])
                if line[0] in " +":
                    added.append(line[1:])
    return f"cd {REPO}\npython3 - <<'END' \n{_WRITE.replace('sys.argv[1]', repr(json.dumps(edits)))}\nEND"


def content_of(tree: Path, path: str) -> bytes:
    """Return the content of a file of a tree; empty if it is missing."""
    return (tree / path).read_bytes() if (tree / path).is_file() else b""


def between(path: str, old: bytes, new: bytes) -> str:
    """Return the unified diff between two contents of a file. Bytes that are not UTF-8 are replaced."""
    # Unlike `str.splitlines`, only a line feed ends a line.
    before, after = (re.findall(r"[^\n]*\n|[^\n]+", content.decode(errors="replace")) for content in (old, new))
    lines = difflib.unified_diff(before, after, f"a/{path}", f"b/{path}")
    return "".join(line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines)


def why_unsafe(tree: Path, path: str) -> str | None:
    """Return why a path may lead out of a tree, or through a link of the tree; None if it does not."""
    parts = path.split("/")
    if not path or path.startswith("/") or "\\" in path or "\0" in path or PurePosixPath(path).as_posix() != path:
        return "not a relative path in its simplest form"
    if ".." in parts or any(part.lower() == ".git" for part in parts):
        return "a path must not contain .. or .git"
    place = tree
    for part in parts:
        place = place / part
        if place.is_symlink():
            return "it is a link, or in a linked folder"
    return "it is a folder" if place.is_dir() else None


def _source_of(task: SweTask, folder: Path, lock: Lock | None) -> Path:
    base = folder / "sdists" / task.base
    if Path(task.base).name != task.base:
        raise UsageError(f"{task.id}: `base` must be the name of a file, got {task.base!r}")
    requirement = requirement_of(task.base)
    if not base.is_file() or requirement == OWN:
        base = fetch(requirement, folder / "sdists")
    for package in () if lock is None or requirement == OWN else lock.packages:  # our own package is packed here
        if package.base == task.base and package.sha256 != sha256_of(base):
            raise UsageError(f"{base} is not the file that the tasks were made of: its SHA-256 is not {package.sha256}")
    clean = unpack(base, folder / "trees")
    digest = hashlib.sha256(task.bug_patch.encode()).hexdigest()[:16]
    target = folder / "trees" / f"{clean.name}+{digest}"
    if target.is_dir():
        return target
    with tempfile.TemporaryDirectory(dir=target.parent) as scratch:
        made = Path(scratch) / "tree"
        shutil.copytree(clean, made, symlinks=True)
        for path, content in changes_of_patch(made, task.bug_patch).items():
            (made / path).write_bytes(content)
        set_date(made)
        put(made, target)
    return target


def _git(arguments: list[str], patch: str, folder: Path) -> str:
    """Run git in a folder that is not part of a repository, with a patch as input."""
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "HOME": str(folder.parent),
        "GIT_CONFIG_NOSYSTEM": "1",
        "GIT_CEILING_DIRECTORIES": str(folder.parent),
    }
    try:
        done = subprocess.run(
            ["git", *arguments, "-"],
            input=patch.encode(),
            cwd=folder,
            env=environment,
            capture_output=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except FileNotFoundError:
        raise UsageError("git was not found; install git, which applies patches") from None
    except subprocess.TimeoutExpired:
        raise UsageError(f"git did not apply the patch within {_GIT_TIMEOUT_S:g} s") from None
    if done.returncode:
        raise UsageError(f"the patch does not apply: {done.stderr.decode(errors='replace').strip()[:500]}")
    return done.stdout.decode(errors="surrogateescape")
