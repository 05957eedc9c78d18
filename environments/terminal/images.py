"""Docker images of tasks. The tag is a hash of the Dockerfile and its build context."""

from __future__ import annotations

import hashlib
import posixpath
import re
import shlex
import stat
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from .tasks import TerminalTask

BASE = "debian:bookworm-slim"
"""Base image of portable tasks."""
_REPOSITORY = "envkit/terminal"
_VARIABLE = re.compile(r"\$(?:\{(\w+)(?::-([^}]*))?\}|(\w+))")


@dataclass(frozen=True, slots=True)
class Build:
    """How to build an image.

    Attributes:
        tag: Tag of the image.
        dockerfile: Content of the Dockerfile.
        context: Folder whose files the Dockerfile can copy; None if it copies none.
    """

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


@dataclass(slots=True)
class Stage:
    """Settings of an image, or of a stage of a Dockerfile; those of its base image are unknown."""

    workdir: str = "/"
    user: str = ""
    has_entrypoint: bool = False
    variables: dict[str, str] = field(default_factory=dict)


def last_stage(dockerfile: Path) -> Stage:
    """Return the last stage of a Dockerfile, with the settings that it inherits from earlier stages."""
    text = re.sub(r"\\[ \t]*\n(\s*#.*\n)*", " ", dockerfile.read_text(encoding="utf-8", errors="replace"))
    stages: dict[str, Stage] = {}
    head = stage = Stage()  # the lines before the first stage
    for line in text.splitlines():
        keyword, value = (*line.strip().split(maxsplit=1), "", "")[:2]
        match keyword.upper():
            case "FROM":
                words = [word for word in _expanded(value, head.variables).split() if not word.startswith("--")]
                base = stages.get(words[0].lower(), Stage()) if words else Stage()
                stage = replace(base, variables=dict(base.variables))
                if len(words) == 3:  # FROM BASE AS NAME
                    stages[words[2].lower()] = stage
            case "ARG" | "ENV":
                with suppress(ValueError):  # an unclosed quote
                    words = shlex.split(value)
                    if words and "=" not in words[0]:  # ARG NAME, or ENV NAME VALUE
                        words = [f"{words[0]}={' '.join(words[1:]) or head.variables.get(words[0], '')}"]
                    pairs = (word.partition("=") for word in words)
                    stage.variables |= {name: _expanded(content, stage.variables) for name, _, content in pairs}
            case "WORKDIR":
                path = posixpath.join(stage.workdir, _expanded(value.strip("\"'"), stage.variables))
                stage.workdir = posixpath.normpath(path)
            case "USER":
                stage.user = _expanded(value, stage.variables)
            case "ENTRYPOINT":
                stage.has_entrypoint = value.replace(" ", "") != "[]"
    return stage


def workdir_of(dockerfile: Path) -> str:
    """Return the working directory that a Dockerfile sets; if it sets none, ``/``, as in most base images."""
    return last_stage(dockerfile).workdir


def ignored(image: Stage) -> Iterator[str]:
    """Yield a note for each setting of an image that envkit does not support. Harbor does not run a CMD either."""
    if image.has_entrypoint:
        yield "ENTRYPOINT of the image: is not run"
    if image.user.partition(":")[0] not in ("", "0", "root"):
        yield f"USER of the image: {image.user}: programs run as root"


def _expanded(text: str, names: Mapping[str, str]) -> str:
    return _VARIABLE.sub(lambda found: names.get(found[1] or found[3], "") or found[2] or "", text)


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
    found = [build_of(task), _verifier_build(task)]
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
