"""What an evaluation leaves in a folder: ``evaluation.json``, and a plot where the world tells how hard levels are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from envkit.errors import UsageError
from envkit.wiring.evaluation import Evaluation
from envkit.wiring.evaluation_plot import draw

EVALUATION = "evaluation.json"
PLOT = "success_by_difficulty.png"


def prepare(folder: Path, *, force: bool) -> None:
    """Make the folder, and find out before anything is played whether an evaluation can be written there.

    Raises:
        UsageError: It holds one and `force` is false, or it cannot be written.
    """
    with _writing(folder):
        if not force and (folder / EVALUATION).exists():
            raise UsageError(f"{folder}: already holds an evaluation; replace it with --force or choose another folder")
        folder.mkdir(parents=True, exist_ok=True)
        part = folder / f".{EVALUATION}.part"
        part.touch()
        part.unlink()


def write(found: Evaluation, folder: Path) -> list[Path]:
    """Write an evaluation in place of any that is there, and return the files.

    Raises:
        UsageError: The folder cannot be written.
    """
    written = [folder / EVALUATION]
    with _writing(folder):
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
