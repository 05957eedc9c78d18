"""The folder that an evaluation writes.

arguments.json              the arguments of the command; running it again resumes the evaluation
episodes.jsonl              one line per finished episode; sorted by task and attempt at the end
evaluation.json             the results, written last
success_by_difficulty.png   a plot, if the environment reports the shortest solutions of its levels
"""

from __future__ import annotations

import errno
import os
import textwrap
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path

import orjson
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator, PercentFormatter

from envkit.errors import UsageError
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.runs.files import encoded, replace, writing
from envkit.types import JSON, EpisodeRecord

from ..run_folder.plots import BLUE, FAINT, INK, frame, new_figure, save
from .compare import EVALUATION, differences
from .result import FORMAT, MAX_STRATA, Evaluation
from .statistics import Stratum

ARGUMENTS = "arguments.json"
PLOT = "success_by_difficulty.png"
_MAX_LABELLED_BARS = 16
_TITLE_WIDTH = 75
"""Maximum number of characters in a line of the plot's title."""
_NOTE = "#6e7781"
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
        """Sort the file of episodes, and write the results and the plot."""
        with self._writing():
            lines = (self.path / EPISODES).read_bytes().splitlines(keepends=True)
            replace(self.path / EPISODES, b"".join(_last_of_each(lines)), remedy=_REMEDY)
            if found.levels:
                _draw(found, self.path / PLOT)
            replace(self.path / EVALUATION, encoded(found.as_json(), indented=True) + b"\n", remedy=_REMEDY)
        self.files = [self.path / name for name in (EVALUATION, EPISODES, *((PLOT,) if found.levels else ()))]

    def _begin_files(self) -> None:
        """Create the folder and ``arguments.json``, and remove the files of an evaluation that is being replaced."""
        self.path.mkdir(parents=True, exist_ok=True)
        for name in (EVALUATION, PLOT, *((EPISODES,) if self._force else ())):
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


def _draw(found: Evaluation, path: Path) -> None:
    """Plot the success rate by length of the shortest solution, with 95 % intervals, and below it the episode counts.

    The `levels` of the evaluation are not empty. The file has the format PNG.
    """
    figure = new_figure(8, 5)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=[4, 1.1])
    title = f"{found.policy} on {found.env_id}: success by difficulty"
    frame(above, textwrap.fill(title, _TITLE_WIDTH).replace("$", r"\$"), size=13)
    strata = found.by_difficulty(most=MAX_STRATA)
    _success(above, strata)
    overall = found.metrics["success"].mean
    above.axhline(overall, color=FAINT, linewidth=1.2, linestyle=(0, (4, 3)), zorder=1)
    transform = above.get_yaxis_transform()
    above.text(1.02, overall, f"all\n{overall:.1%}", color=_NOTE, va="center", fontsize=10, transform=transform)
    frame(below, "", size=10)
    _counts(below, found.by_difficulty())
    figure.align_ylabels()
    tasks = "1 task" if len(found.levels) == 1 else f"{len(found.levels):,} tasks"
    attempts = f", {found.attempts} attempts at each" if found.attempts > 1 else ""
    notes = [f"{tasks}{attempts}", "vertical bars: 95 % intervals"]
    if any(one.shortest < one.longest for one in strata):
        notes.append("horizontal bars: ranges of lengths")
    figure.supxlabel(" · ".join(notes), fontsize=9, color=_NOTE)
    save(figure, path)


def _success(axes: Axes, strata: list[Stratum]) -> None:
    x = [one.mean for one in strata]
    y = [one.success.mean for one in strata]
    down = [one.success.mean - one.success.low for one in strata]
    up = [one.success.high - one.success.mean for one in strata]
    axes.plot(x, y, color=BLUE, linewidth=1.2, alpha=0.35, zorder=2)
    axes.hlines(y, [one.shortest for one in strata], [one.longest for one in strata], color=BLUE, alpha=0.35, zorder=2)
    axes.errorbar(x, y, [down, up], fmt="o", color=BLUE, markersize=5, linewidth=1.6, capsize=3, zorder=3)
    axes.set_ylim(-0.03, 1.03)
    axes.yaxis.set_major_formatter(PercentFormatter(1.0))
    axes.set_ylabel("episodes that succeed", color=INK)


def _counts(axes: Axes, strata: list[Stratum]) -> None:
    bars = axes.bar([one.shortest for one in strata], [one.episodes for one in strata], width=0.8, color=FAINT)
    if len(strata) <= _MAX_LABELLED_BARS:
        axes.bar_label(bars, fontsize=8, color="#57606a", padding=1)
        axes.margins(y=0.3)
    axes.set_xlim(strata[0].shortest - 0.7, strata[-1].longest + 0.7)
    axes.xaxis.set_major_locator(MaxNLocator(12, integer=True, min_n_ticks=1))
    axes.yaxis.set_major_locator(MaxNLocator(3, integer=True, min_n_ticks=1))
    axes.set_xlabel("moves of the shortest solution", color=INK)
    axes.set_ylabel("episodes", color=INK)
