"""Write a portable task as a folder that Harbor and envkit can play."""

from __future__ import annotations

import json
import shlex
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from envkit.errors import UsageError

from .. import harness
from ..images import recipe

SETUP = "setup.sh"
TEST = '#!/bin/sh\nexec python3 -I "$(dirname "$0")/harness.py"\n'
"""The file ``test.sh`` of all tasks with a check that uses `envkit.environments.terminal.harness`."""
_FROM_ENVIRONMENT = "COPY --chown=agent:agent . /workspace/\n"
_SET_UP = f"RUN sh ./{SETUP} && rm {SETUP}\n"
_AS_ROOT = "USER root\n"
"""Last line: the first process of Harbor's containers must not be the agent's, whose processes the harness kills."""
_IGNORED = "Dockerfile\n.dockerignore\n"
_CPUS, _MEMORY_MIB = 1, 512


def write_task(
    folder: Path,
    *,
    name: str,
    instruction: str,
    files: Mapping[str, str | bytes],
    solution: str,
    check: Mapping[str, str | bytes],
    description: str = "",
    setup: str = "",
    services: str = "",
    programs: Sequence[str] = (),
    packages: Sequence[str] = (),
    difficulty: str = "",
    category: str = "",
    cheats: Mapping[str, str] | None = None,
    timeout_s: float = 60.0,
) -> None:
    """Write a portable task; see `TerminalTask.is_portable`.

    A file whose content begins with ``#!`` becomes executable. ``task.toml`` does not say where the
    tests run. So envkit runs them in a sandbox of their own, but Harbor runs them in the agent's sandbox: as artifacts,
    files would lose their owners there.

    Args:
        folder: Folder of the task, which is made. It must be missing or empty.
        name: Name of the task without organization.
        instruction: What the agent is asked.
        files: Files of ``/workspace`` by relative path.
        solution: Shell script that solves the task in ``/workspace``.
        check: Files of the tests by relative path: ``check.py`` and its data.
        description: The task in a sentence.
        setup: Shell script that the agent's user runs in ``/workspace`` to complete the environment.
        services: Shell script that the agent's user runs in ``/workspace`` when an episode begins. It may start
            programs in the background. It is written as a healthcheck, so a failure means that the episode is broken.
        programs: Programs that the task needs besides ``sh``, ``bash``, ``python3`` and the coreutils.
        packages: Debian packages of the image, besides Python.
        difficulty: Difficulty, such as ``easy``.
        category: Category.
        cheats: Scripts by name that try to earn a reward without solving the task.
        timeout_s: Maximum seconds of the check.

    Raises:
        UsageError: The folder is not empty or cannot be written, or a path leaves its folder.
    """
    environment = dict(files)
    for path, where in ((SETUP, files), ("Dockerfile", files), (".dockerignore", files), ("test.sh", check)):
        if path in where:
            raise UsageError(f"{folder}: {path} is made by the writer of the task; use another name")
    if setup:
        environment[SETUP] = setup
    environment["Dockerfile"] = dockerfile(packages, has_setup=bool(setup))
    environment[".dockerignore"] = _IGNORED
    table: dict[str, str | float | list[str]] = {"portable": True, **({"setup": SETUP} if setup else {})}
    table |= {"programs": list(programs), "packages": list(packages), "profile": "strict"}
    content = [
        _table("", {"schema_version": "1.4"}),
        _table("task", {"name": f"envkit/{name}", "description": description}),
        _table("metadata", {"difficulty": difficulty, "category": category}),
        _table("metadata.envkit", table),
        _table("agent", {"user": "agent"}),
        _table("verifier", {"timeout_sec": timeout_s, "user": "root"}),
        _table("environment", {"network_mode": "no-network", "cpus": _CPUS, "memory_mb": _MEMORY_MIB}),
    ]
    if services:
        content.append(_table("environment.healthcheck", {"command": _as_agent(services), "retries": 1}))
    parts: dict[str, Mapping[str, str | bytes]] = {
        "": {"task.toml": "\n".join(content), "instruction.md": instruction.rstrip("\n") + "\n"},
        "environment": environment,
        "tests": {"test.sh": TEST, **check},
        "solution": {"solve.sh": solution},
        "cheats": {f"{one}.sh": script for one, script in (cheats or {}).items()},
    }
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UsageError(f"{folder} is not empty; choose a new folder")
        for part, members in parts.items():
            for path, member in members.items():
                _write(folder / part, path, member)
        add_harness(folder / "tests")
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror}; choose a folder that can be written") from None


def dockerfile(packages: Sequence[str], *, has_setup: bool) -> str:
    """Return the Dockerfile of a portable task, which installs its packages and copies its files."""
    return recipe(packages) + _FROM_ENVIRONMENT + (_SET_UP if has_setup else "") + _AS_ROOT


def _as_agent(script: str) -> str:
    """Return a script that runs another one as the agent's user, even if Harbor runs it as root."""
    return (
        f"script={shlex.quote(script)}\n"
        'if [ "$(id -u)" = 0 ]; then exec su agent -s /bin/sh -c "$script"; fi\n'
        'eval "$script"\n'
    )


def add_harness(tests: Path) -> None:
    """Copy the harness of envkit into a folder with the tests of a task, if its ``test.sh`` needs it."""
    if (tests / "check.py").is_file() and not (tests / "harness.py").exists():
        shutil.copyfile(harness.__file__, tests / "harness.py")


def _write(folder: Path, path: str, content: str | bytes) -> None:
    if PurePosixPath(path).is_absolute() or ".." in PurePosixPath(path).parts:
        raise UsageError(f"{path!r} must be a path inside the folder {folder.name}")
    data = content.encode() if isinstance(content, str) else content
    file = folder / path
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(data)
    file.chmod(0o755 if data.startswith(b"#!") else 0o644)


def _table(name: str, values: Mapping[str, str | float | list[str]]) -> str:
    """Return a table of TOML. A string of JSON without non-ASCII escapes is also a string of TOML."""
    head = f"[{name}]\n" if name else ""
    return head + "".join(f"{key} = {_value(value)}\n" for key, value in values.items())


def _value(value: str | float | list[str]) -> str:
    # JSON leaves DEL as it is, which TOML does not allow.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
