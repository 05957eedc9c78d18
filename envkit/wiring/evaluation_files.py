"""What an evaluation leaves in a folder: ``evaluation.json``, and a plot where the world tells how hard levels are."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from envkit.errors import UsageError
from envkit.wiring.evaluation import Evaluation
from envkit.wiring.evaluation_plot import draw

EVALUATION = "evaluation.json"
PLOT = "success_by_difficulty.png"


def check(folder: Path, *, force: bool) -> None:
    """Find out, before anything is played, whether an evaluation can be written into `folder`; nothing is made yet.

    Raises:
        UsageError: It holds one and `force` is false, or it cannot be written.
    """
    with _writing(folder):
        if not force and (folder / EVALUATION).exists():
            raise UsageError(f"{folder}: already holds an evaluation; replace it with --force or choose another folder")
        there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


def write(found: Evaluation, folder: Path) -> list[Path]:
    """Write an evaluation in place of any that is there, make the folder if it is missing, and return the files.

    Raises:
        UsageError: The folder cannot be written.
    """
    written = [folder / EVALUATION]
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{EVALUATION}.part"
        part.write_bytes(orjson.dumps(found.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
        part.replace(folder / EVALUATION)
        if found.levels:
            draw(found, folder / PLOT)
            written.append(folder / PLOT)
        else:
            (folder / PLOT).unlink(missing_ok=True)  # that of the evaluation which is replaced
    return written


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; choose a folder that can be written") from error
