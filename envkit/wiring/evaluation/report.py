"""What an evaluation leaves in a folder.

    evaluation.json             the figures
    episodes.jsonl              every episode, one object each, by task and attempt
    success_by_difficulty.png   a plot, where the environment says how hard its levels are

Each file replaces that of an earlier evaluation as a whole.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson

from envkit.errors import UsageError
from envkit.trainer_bridge.run_folder.episodes import EPISODES
from envkit.trainer_bridge.run_folder.rows import encoded
from envkit.types import EpisodeRecord
from envkit.wiring.evaluation.evaluate import Evaluation
from envkit.wiring.evaluation.plot import draw

EVALUATION = "evaluation.json"
PLOT = "success_by_difficulty.png"


def check(folder: Path, *, force: bool) -> None:
    """Find out, before anything is played, whether an evaluation can be written into `folder`; nothing is made yet.

    Raises:
        UsageError: It holds one and `force` is false, or it cannot be written.
    """
    with _writing(folder):
        if not force and any((folder / name).exists() for name in (EVALUATION, EPISODES)):
            raise UsageError(f"{folder}: already holds an evaluation; replace it with --force or choose another folder")
        there = next((one for one in (folder, *folder.parents) if one.exists()), folder)
        if not there.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not os.access(there, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))


class EpisodeBuffer:
    """Keeps the episodes of an evaluation, as the lines that `write` makes of them."""

    def __init__(self) -> None:
        self._lines: dict[tuple[int, int], bytes] = {}

    def add(self, episode: EpisodeRecord) -> None:
        self._lines[episode.index, episode.member] = encoded(episode) + b"\n"

    def content(self) -> bytes:
        """Return all lines, ordered by task and attempt."""
        return b"".join(line for _, line in sorted(self._lines.items()))


def write(found: Evaluation, episodes: EpisodeBuffer, folder: Path) -> list[Path]:
    """Write an evaluation in place of any that is there, make the folder if it is missing, and return the files.

    Raises:
        UsageError: The folder cannot be written.
    """
    written = [folder / EVALUATION, folder / EPISODES]
    contents = (orjson.dumps(found.as_json(), option=orjson.OPT_INDENT_2) + b"\n", episodes.content())
    with _writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in zip(written, contents, strict=True):
            part = path.with_name(f".{path.name}.part")
            part.write_bytes(content)
            part.replace(path)
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
