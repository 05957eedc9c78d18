"""The folder that an evaluation writes.

arguments.json              the arguments of the command; running it again resumes the evaluation
episodes.jsonl              one line per finished episode; sorted by task and attempt at the end
evaluation.json             the results, written last
success_by_difficulty.png   a plot, if the environment reports the shortest solutions of its levels
"""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import orjson

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.runs.files import encoded
from envkit.types import JSON, EpisodeRecord

from .compare import EVALUATION, flat
from .plot import draw
from .result import Evaluation

ARGUMENTS = "arguments.json"
PLOT = "success_by_difficulty.png"


class EvaluationFolder:
    """Saves each episode of an evaluation when it ends, and restores the episodes when the evaluation is resumed.

    Args:
        path: The folder; created when the first episode ends.
        force: Whether to replace an existing evaluation in the folder, as soon as the first new episode ends.

    Attributes:
        path: The folder.
        count: Number of finished episodes in the folder.
        files: The files that `finish` has written.

    Raises:
        UsageError: The folder contains a complete evaluation and `force` is false, or the folder is not writable.
    """

    def __init__(self, path: Path, *, force: bool) -> None:
        self.path = path
        self.count = 0
        self.files: list[Path] = []
        self._force = force
        self._arguments: Mapping[str, JSON] = {}
        self._is_begun = False
        with _writing(path):
            if not force and _is_complete(path):
                raise UsageError(
                    f"{path}: already holds an evaluation; replace it with --force or choose another folder"
                )
            existing = next((one for one in (path, *path.parents) if one.exists()), path)
            if not existing.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(existing, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def begin(self, arguments: Mapping[str, JSON]) -> list[EpisodeRecord]:
        """Return the episodes that an interrupted run of the same command saved, without an incomplete last line.

        Raises:
            UsageError: The folder contains an evaluation with other arguments, or its episodes are damaged.
        """
        self._arguments = arguments
        if self._force or not (self.path / ARGUMENTS).exists():
            return []
        self._refuse_others()
        file = self.path / EPISODES
        with _writing(self.path):
            content = file.read_bytes() if file.exists() else b""
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                os.truncate(file, complete)
        kept = read_episodes(file) if complete else []
        self.count = len({(one.index, one.member) for one in kept if not one.outcome.is_void})
        return kept

    def add(self, episode: EpisodeRecord) -> None:
        """Append an episode to the file ``episodes.jsonl`` immediately, so that it survives a crash of this process.

        Raises:
            UsageError: The folder is not writable.
        """
        with _writing(self.path):
            if not self._is_begun:
                self._begin_files()
            with (self.path / EPISODES).open("ab") as file:
                file.write(encoded(episode) + b"\n")
        self.count += not episode.outcome.is_void

    def finish(self, found: Evaluation) -> None:
        """Sort the file of episodes, and write the results and the plot.

        Raises:
            UsageError: The folder is not writable.
        """
        with _writing(self.path):
            lines = (self.path / EPISODES).read_bytes().splitlines(keepends=True)
            self._replace(EPISODES, b"".join(_last_of_each(lines)))
            if found.levels:
                draw(found, self.path / PLOT)
            self._replace(EVALUATION, orjson.dumps(found.as_json(), option=orjson.OPT_INDENT_2) + b"\n")
        self.files = [self.path / name for name in (EVALUATION, EPISODES, *((PLOT,) if found.levels else ()))]

    def _refuse_others(self) -> None:
        before, now = _read(self.path / ARGUMENTS), _plain(self._arguments)
        if "environment" in before:
            raise UsageError(
                f"{self.path}: holds an unfinished evaluation of an earlier version of envkit; finish it with that "
                "version, replace it with --force or choose another folder"
            )
        before, now = flat(before), flat(now)
        changes = [
            f"{name} was {orjson.dumps(before.get(name)).decode()}, now {orjson.dumps(now.get(name)).decode()}"
            for name in dict.fromkeys([*before, *now])
            if before.get(name) != now.get(name)
        ]
        if changes:
            raise UsageError(
                f"{self.path}: holds an evaluation with other arguments: {'; '.join(changes)}; repeat its command to "
                "continue it, replace it with --force or choose another folder"
            )

    def _begin_files(self) -> None:
        """Create the folder and ``arguments.json``, and remove the files of an evaluation that is being replaced."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (EVALUATION, PLOT, *((EPISODES,) if self._force else ())):
            (self.path / name).unlink(missing_ok=True)
        self._replace(ARGUMENTS, encoded(self._arguments, indented=True) + b"\n")
        self._is_begun = True

    def _replace(self, name: str, content: bytes) -> None:
        part = self.path / f".{name}.part"
        part.write_bytes(content)
        part.replace(self.path / name)


def _is_complete(folder: Path) -> bool:
    """Whether the evaluation in `folder` is finished, or cannot be resumed because ``arguments.json`` is missing."""
    if not (folder / ARGUMENTS).exists():
        return any((folder / name).exists() for name in (EVALUATION, EPISODES))
    return (folder / EVALUATION).exists() and not _read(folder / EVALUATION).get("void")


def _read(path: Path) -> dict[str, JSON]:
    with _writing(path):
        content = path.read_bytes()
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: is damaged; start again with --force or choose another folder")
    return found


def _plain(value: Mapping[str, JSON]) -> dict[str, JSON]:
    """Return `value` encoded as JSON and decoded again, to compare it with values from a file."""
    found: dict[str, JSON] = orjson.loads(encoded(value))
    return found


def _last_of_each(lines: list[bytes]) -> list[bytes]:
    """Return the last line of each attempt, by task and attempt. A void attempt that was repeated has several lines."""
    last: dict[tuple[int, int], bytes] = {}
    for line in lines:
        row = orjson.loads(line)
        last[row["index"], row["member"]] = line
    return [line for _, line in sorted(last.items())]


@contextmanager
def _writing(folder: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{folder}: {error.strerror or error}; choose a folder that can be written") from error
