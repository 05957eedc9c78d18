"""The folder that an evaluation writes; see docs/play-and-evaluate.md for its files."""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import orjson

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.runs.files import encoded, replace, writing
from envkit.types import JSON, EpisodeRecord

from .compare import EVALUATION, differences
from .result import FORMAT, Evaluation

ARGUMENTS = "arguments.json"
_REMEDY = "choose a folder that can be written"


class EvaluationFolder:
    """Saves each episode of an evaluation when it ends, and restores the episodes when the evaluation is resumed.

    The folder is created, or with `force` an evaluation in it is replaced, when the first episode ends.

    Attributes:
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
        with self._writing():
            if not force and _is_complete(path):
                raise UsageError(
                    f"{path}: already holds an evaluation; replace it with --force or choose another folder"
                )
            existing = next((one for one in (path, *path.parents) if one.exists()), path)
            if not existing.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
            if not os.access(existing, os.W_OK | os.X_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    def _writing(self) -> AbstractContextManager[None]:
        return writing(self.path, remedy=_REMEDY)

    def begin(self, arguments: Mapping[str, JSON]) -> list[EpisodeRecord]:
        """Return the episodes that an interrupted run of the same command saved, without an incomplete last line.

        Raises:
            UsageError: The folder has an evaluation with other arguments or of another version, or damaged episodes.
        """
        self._arguments = {"format": FORMAT, **arguments}
        if self._force or not (self.path / ARGUMENTS).exists():
            return []
        before = _read(self.path / ARGUMENTS)
        if before.get("format") != FORMAT:
            raise UsageError(
                f"{self.path}: holds an unfinished evaluation of another version of envkit; finish it with that "
                "version, replace it with --force or choose another folder"
            )
        now = orjson.loads(encoded(self._arguments))
        changes = [f"{key} was {old}, now {new}" for key, old, new in differences(before, now)]
        if changes:
            raise UsageError(
                f"{self.path}: holds an evaluation with other arguments: {'; '.join(changes)}; repeat its command to "
                "continue it, replace it with --force or choose another folder"
            )
        file = self.path / EPISODES
        with self._writing():
            content = file.read_bytes() if file.exists() else b""
            complete = content.rfind(b"\n") + 1
            if complete < len(content):
                os.truncate(file, complete)
        kept = read_episodes(file) if complete else []
        self.count = len({(one.index, one.member) for one in kept if not one.outcome.is_void})
        return kept

    def add(self, episode: EpisodeRecord) -> None:
        """Append an episode to the file ``episodes.jsonl`` immediately, so that it survives a crash of this process."""
        with self._writing():
            if not self._is_begun:
                self._begin_files()
            with (self.path / EPISODES).open("ab") as file:
                file.write(encoded(episode) + b"\n")
        self.count += not episode.outcome.is_void

    def finish(self, found: Evaluation) -> None:
        """Sort the file of episodes, and write the results."""
        with self._writing():
            lines = (self.path / EPISODES).read_bytes().splitlines(keepends=True)
            replace(self.path / EPISODES, b"".join(_last_of_each(lines)), remedy=_REMEDY)
            replace(self.path / EVALUATION, encoded(found.as_json(), indented=True) + b"\n", remedy=_REMEDY)
        self.files = [self.path / EVALUATION, self.path / EPISODES]

    def _begin_files(self) -> None:
        """Create the folder and ``arguments.json``, and remove the files of an evaluation that is being replaced."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (EVALUATION, *((EPISODES,) if self._force else ())):
            (self.path / name).unlink(missing_ok=True)
        replace(self.path / ARGUMENTS, encoded(self._arguments, indented=True) + b"\n", remedy=_REMEDY)
        self._is_begun = True


def _is_complete(folder: Path) -> bool:
    """Whether the evaluation in `folder` is finished, or cannot be resumed because ``arguments.json`` is missing."""
    if not (folder / ARGUMENTS).exists():
        return any((folder / name).exists() for name in (EVALUATION, EPISODES))
    return (folder / EVALUATION).exists() and not _read(folder / EVALUATION).get("void")


def _read(path: Path) -> dict[str, JSON]:
    with writing(path, remedy=_REMEDY):
        content = path.read_bytes()
    try:
        found = orjson.loads(content)
    except orjson.JSONDecodeError:
        found = None
    if not isinstance(found, dict):
        raise UsageError(f"{path}: is damaged; start again with --force or choose another folder")
    return found


def _last_of_each(lines: list[bytes]) -> list[bytes]:
    """Return the last line of each attempt, by task and attempt. A void attempt that was repeated has several lines."""
    last: dict[tuple[int, int], bytes] = {}
    for line in lines:
        row = orjson.loads(line)
        last[row["index"], row["member"]] = line
    return [line for _, line in sorted(last.items())]
