"""Reading of untrusted folders of tasks: regular files of bounded size, and no links out of the folder."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from typing import TypeVar

import msgspec
import yaml

from envkit.errors import ConfigError

T = TypeVar("T")
MAX_TEXT = 256 << 10
"""Maximum bytes of a file that describes a task."""
_MAX_FOLDER = 2 << 30
_READ = frozenset({"environment", "tests", "solution", "cheats", "steps", "workdir", "instruction.md", "check.py"})
_READ_SUFFIXES = (".sh", ".toml", ".yaml", "Dockerfile", ".dockerignore")


def require_usable(folder: Path) -> None:
    """Check that the folder of a task can be read without surprises.

    Links in the material of a task are allowed, because envkit does not follow them.

    Raises:
        ConfigError: It is larger than 2 GiB, where sparse files count with their full size; it has a named pipe, a
            device or a socket; or a file or folder that envkit itself reads is a link out of the folder.
    """
    size = 0
    for parent, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = f"{parent}/{name}"  # a Path for each file takes twice as long
            found = os.lstat(path)
            if stat.S_ISLNK(found.st_mode):
                is_read = name in _READ or name.endswith(_READ_SUFFIXES) or parent.endswith("/steps")
                if is_read and not Path(path).resolve().is_relative_to(folder.resolve()):
                    raise ConfigError([f"{path}: must not be a link out of the folder of the task"])
            elif stat.S_ISREG(found.st_mode):
                size += found.st_size
            elif not stat.S_ISDIR(found.st_mode):
                raise ConfigError([f"{path}: must be a regular file or a folder"])
    if size > _MAX_FOLDER:
        raise ConfigError([f"{folder}: its files have {size >> 20} MiB; the limit is {_MAX_FOLDER >> 20} MiB"])


def read_text(file: Path) -> str:
    """Return the content of a file that describes a task, in a folder that `require_usable` has accepted.

    Raises:
        ConfigError: It cannot be read, is larger than `MAX_TEXT`, or is not UTF-8.
    """
    try:
        if file.stat().st_size > MAX_TEXT:
            raise ConfigError([f"{file}: must have at most {MAX_TEXT >> 10} KiB"])
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError([f"{file}: cannot be read: {error}"]) from None


def read_yaml(file: Path, kind: type[T]) -> T:
    """Return the content of a YAML file that describes a task.

    Raises:
        ConfigError: See `read_text`; or it is malformed.
    """
    try:
        return msgspec.convert(yaml.safe_load(read_text(file)), kind)
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # msgspec's errors are ValueErrors
        raise ConfigError([f"{file}: {' '.join(str(error).split())}"]) from None
