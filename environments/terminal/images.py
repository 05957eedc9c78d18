"""Docker images of tasks. The tag is a hash of the Dockerfile and its build context."""

from __future__ import annotations

import hashlib
import re
import stat
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from .tasks import TerminalTask

BASE = "debian:bookworm-slim"
"""Base image of portable tasks."""
_REPOSITORY = "envkit/terminal"
_SETTING = re.compile(r"(?m)^\s*(ENTRYPOINT|USER)\s+(.+)$")


@dataclass(frozen=True, slots=True)
class Build:
    """How to build an image: its tag, the content of its Dockerfile, and the folder from which that copies files."""

    tag: str
    dockerfile: str
    context: Path | None = None


def recipe(packages: Sequence[str]) -> str:
    """Return the Dockerfile of a portable task without its files."""
    names = " ".join(["python3", *(one for one in packages if one != "python3")])
    return (
        f"ARG BASE={BASE}\n"
        "FROM ${BASE}\n"
        f"RUN apt-get update && apt-get install -y --no-install-recommends {names} && rm -rf /var/lib/apt/lists/*\n"
        "RUN useradd -m -u 1000 -s /bin/bash agent && mkdir /workspace && chown agent:agent /workspace\n"
        "WORKDIR /workspace\n"
        "USER agent\n"
    )


def ignored(dockerfile: Path) -> Iterator[str]:
    """Yield a note for each setting of the last stage that envkit does not support. Harbor runs no CMD either."""
    text = dockerfile.read_text(encoding="utf-8", errors="replace")
    settings = dict(_SETTING.findall(re.split(r"(?im)^\s*FROM\s", text)[-1]))
    if settings.get("ENTRYPOINT", "[]").strip() != "[]":
        yield "ENTRYPOINT of the image: is not run"
    if (user := settings.get("USER", "root").strip()).partition(":")[0] not in ("0", "root"):
        yield f"USER of the image: {user}: programs run as root"


def image_of(task: TerminalTask) -> str:
    """Return the name of the image of a task's environment."""
    build = build_of(task)
    return task.image if build is None else build.tag


def verifier_image_of(task: TerminalTask) -> str:
    """Return the name of the image of a task's verifier: its own image, or that of the environment."""
    build = _verifier_build(task)
    return task.verifier.image or (image_of(task) if build is None else build.tag)


def builds(task: TerminalTask) -> Iterator[Build]:
    """Yield how to build each image of a task that is not pulled from a registry."""
    found = [build_of(task), *map(_verifier_build, (task, *task.later))]
    yield from {build.tag: build for build in found if build is not None}.values()


def build_of(task: TerminalTask) -> Build | None:
    """Return how to build the image of a task's environment; None if the task names an image."""
    if task.image:
        return None
    if task.is_portable:
        content = recipe(sorted(task.packages))
        return Build(f"{_REPOSITORY}:packages-{_hash(content.encode())}", content)
    return _folder_build(task.environment, task.folder.resolve().name)


def _verifier_build(task: TerminalTask) -> Build | None:
    file = task.verifier.dockerfile
    return None if file is None or task.verifier.image else _folder_build(file.parent, "verifier")


def _folder_build(context: Path, name: str) -> Build:
    content = (context / "Dockerfile").read_text(encoding="utf-8")
    name = "".join(letter if letter.isascii() and (letter.isalnum() or letter in "-_") else "-" for letter in name)
    return Build(f"{_REPOSITORY}:{name[:80].strip('-') or 'task'}-{_hash(*_state(context))}", content, context)


def _state(folder: Path) -> Iterator[bytes]:
    """Yield the paths, modes and contents of all files below a folder."""
    for path in sorted(folder.rglob("*")):
        mode = path.lstat().st_mode
        yield f"{path.relative_to(folder).as_posix()}\0{stat.S_IFMT(mode) | (mode & 0o111):o}".encode()
        if path.is_symlink():
            yield str(path.readlink()).encode()
        elif stat.S_ISREG(mode):
            yield path.read_bytes()


def _hash(*parts: bytes) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8) + part)
    return state.hexdigest()[:16]
