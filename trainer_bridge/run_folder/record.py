"""The record of a training run: its folder, and all files in it except checkpoints and weights; see docs/train.md.

`RunRecord.resume` can open the folder of a run, even if the run was killed. File system errors are raised as
`UsageError` with the path, the reason and a remedy.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import IO, Self

import orjson
import yaml

from envkit.errors import ConfigError, UsageError
from envkit.protocols import Tracker
from envkit.runs.files import Rows, encoded, keep_until, read_rows, replace, replace_rows, writing
from envkit.runs.folder import FORMAT_FILE, lock_folder, require_format, write_format
from envkit.types import JSON, EpisodeRecord

from .timeline import encoded_timeline

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
EVALUATIONS = "evaluations.jsonl"
SCHEDULE = "schedule.jsonl"
SUMMARY = "summary.json"
LOCK = "run.lock"
CHECKPOINTS = "checkpoints"
TRAJECTORIES = "trajectories"
TIMELINE = "timeline"

RUN_FORMAT = 1
"""Format number of a run's folder. A release whose files older releases would misread has a higher number."""

FILES = (METRICS, EVALUATIONS, SCHEDULE, SUMMARY, CONFIG)
FOLDERS = {
    TRAJECTORIES: ("step-*.jsonl",),
    TIMELINE: ("step-*.json.gz",),
    "plots": ("learning_curve.png", "training.png"),
    "tensorboard": ("events.out.tfevents.*",),
    "wandb": ("envkit-run-id", "run-*", "offline-run-*", "cache"),
    CHECKPOINTS: ("step-*", ".step-*"),
    "weights": ("version-*",),
    "policy": ("*.json", "model.safetensors"),
}
_MAY_GROW = "trainer.steps"
_MAY_MOVE = re.compile(r"(env(?:\.\d+)?)\.(?:url|token_file|ca|outage_timeout_s)")
"""Keys of the server that plays the episodes. A resumed run may use another server, but not stop using one."""
_MAY_CHANGE = re.compile(
    r"placement(?:\..+)?|engine\.(?:url|python|replicas|gpu_memory_utilization|max_num_seqs|arguments)(?:\..+)?"
)
"""Keys that decide where and how fast the engine samples, not what."""
_MISSING = object()


class RunRecord:
    """The files of one run, open for writing and locked against other runs. `create` and `resume` return a record.

    Attributes:
        folder: The run's folder.
        checkpoints: The existing folder for checkpoints.
    """

    def __init__(self, folder: Path, opened: ExitStack) -> None:
        self.folder = folder
        self.checkpoints = folder / CHECKPOINTS
        self._trackers: list[Tracker] = []
        with writing(self.checkpoints):
            self.checkpoints.mkdir(exist_ok=True)
        self._metrics = opened.enter_context(closing(Rows(folder / METRICS)))
        self._evaluations = opened.enter_context(closing(Rows(folder / EVALUATIONS)))
        self._schedule = opened.enter_context(closing(Rows(folder / SCHEDULE)))
        self._opened = opened.pop_all()

    def add(self, tracker: Tracker) -> None:
        """Send the metrics of later steps to `tracker`, too, and close it with the record."""
        self._trackers.append(self._opened.enter_context(closing(tracker)))

    @staticmethod
    def refuse_taken(folder: Path) -> None:
        """Raise `UsageError` if `create` without `force` would reject `folder`."""
        with writing(folder):
            if folder.exists() and not folder.is_dir():
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST))
        _refuse_foreign_files(folder)
        refuse_other_format(folder)
        with writing(folder):
            if _has_results(folder):
                raise UsageError(f"{folder}: already holds a run; continue it with --resume or replace it with --force")

    @classmethod
    def create(cls, folder: Path, config_yaml: str, *, force: bool) -> Self:
        """Create the folder of a new run, or reuse a folder whose run has no results yet.

        Files that belong to no run are not changed; `force` removes those of an existing run.

        Raises:
            UsageError: The folder has a run with results and `force` is false, has a run of another format, has files
                of no run that are named like run files, is in use by another process, or cannot be written.
        """
        _refuse_foreign_files(folder)
        refuse_other_format(folder)
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
        with ExitStack() as opened:
            opened.enter_context(_locked(folder))
            if not force:
                cls.refuse_taken(folder)
            with writing(folder):
                _remove_run(folder)
            with writing(folder / FORMAT_FILE):
                write_format(folder, RUN_FORMAT)
            replace(folder / CONFIG, config_yaml.encode())
            return cls(folder, opened)

    @classmethod
    def resume(
        cls,
        folder: Path,
        config_yaml: str,
        *,
        step: int,
        is_evaluated: bool = True,
        complete: Callable[[str], str] = str,
    ) -> Self:
        """Reopen a run's folder, and restore its records to their state after train step `step`.

        Records of later steps are removed, since those steps will be repeated. A truncated last line is removed, too.
        If the checkpoint was not written after the evaluation of its step (`is_evaluated`), the row of this evaluation
        is removed. `config_yaml` must equal the run's configuration, to which `complete` adds the defaults of keys that
        the run did not know; but `trainer.steps` may be larger, and the server of `env.url` may be another one.

        Raises:
            UsageError: The folder has no run to resume or a run of another format, the configuration differs, a file is
                damaged, or the folder is in use by another process or cannot be written.
        """
        if not (folder / CONFIG).is_file():
            raise UsageError(f"{folder}: no run to continue; start one without --resume")
        refuse_other_format(folder)
        with ExitStack() as opened:
            opened.enter_context(_locked(folder))
            config = folder / CONFIG
            with writing(config):
                _refuse_other_config(config, config_yaml, complete)
            keep_until(folder / METRICS, step)
            keep_until(folder / SCHEDULE, step)
            keep_until(folder / EVALUATIONS, step if is_evaluated else step - 1)
            with writing(folder):
                for number, path in (*recorded_steps(folder).items(), *numbered(folder / TIMELINE, ".json.gz")):
                    if number > step:
                        path.unlink()
                (folder / SUMMARY).unlink(missing_ok=True)
            replace(config, config_yaml.encode())
            return cls(folder, opened)

    def step(self, step: int, values: Mapping[str, float]) -> None:
        """Record the metrics of a train step. Floats are stored exactly, and non-finite values as null."""
        self._metrics.append({"step": step, **values})
        for tracker in self._trackers:
            tracker.step(step, values)

    def schedule(self, step: int, row: Mapping[str, JSON]) -> None:
        """Record the groups of a train step; see `scheduler.continuous.Continuous.schedule`."""
        self._schedule.append({"step": step, **row})

    def evaluation(self, step: int, values: Mapping[str, float]) -> None:
        """Record an evaluation of the policy after train step `step`; step 0 is the policy before training."""
        self._evaluations.append({"step": step, **values})
        for tracker in self._trackers:
            tracker.evaluation(step, values)

    def trajectories(self, step: int, episodes: Sequence[EpisodeRecord]) -> None:
        """Write episodes of a train step, one object per line, and replace earlier episodes of the same step."""
        path = self.folder / TRAJECTORIES / f"step-{step}.jsonl"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        replace_rows(path, episodes)

    def timeline(self, step: int, events: Sequence[Mapping[str, JSON]]) -> None:
        """Write the timeline of a train step; see `timeline.timeline`."""
        path = self.folder / TIMELINE / f"step-{step}.json.gz"
        with writing(path):
            path.parent.mkdir(exist_ok=True)
        replace(path, encoded_timeline(events))

    def summary(self, values: Mapping[str, JSON]) -> None:
        """Write ``summary.json`` atomically."""
        replace(self.folder / SUMMARY, encoded(values, indented=True) + b"\n")

    def plots(self) -> None:
        """Draw ``plots/*.png`` from the records written so far."""
        from .plots import draw

        metrics, evaluations = read_rows(self.folder / METRICS), read_rows(self.folder / EVALUATIONS)
        folder = self.folder / "plots"
        with writing(folder):
            folder.mkdir(exist_ok=True)
            draw(folder, metrics, evaluations)

    def close(self) -> None:
        """Close the files and unlock the folder; repeated calls have no effect."""
        self._opened.close()


def recorded_steps(folder: Path) -> dict[int, Path]:
    """Return the path of each episode file in a run's folder, with its train step as the key, in ascending order."""
    return dict(numbered(folder / TRAJECTORIES, ".jsonl"))


def numbered(folder: Path, suffix: str) -> list[tuple[int, Path]]:
    """Return the train step and the path of each ``step-N`` with this suffix in `folder`, in ascending order."""
    names = {path: path.name.removeprefix("step-").removesuffix(suffix) for path in folder.glob(f"step-*{suffix}")}
    return sorted((int(number), path) for path, number in names.items() if number.isdecimal())


def refuse_other_format(folder: Path) -> None:
    """Raise an error if `folder` has a run of another format; a folder without a run is accepted.

    Raises:
        UsageError: The format of the run differs from `RUN_FORMAT`.
    """
    with writing(folder):
        is_used = (folder / LOCK).exists() and any(_run_files(folder))
    remedy = "use the version of envkit that wrote it, or another folder"
    require_format(folder, RUN_FORMAT, holds="a run", remedy=remedy, is_used=is_used)


def _locked(folder: Path) -> IO[bytes]:
    """Lock `folder` and return the open lock file; closing the lock file unlocks the folder."""
    with writing(folder / LOCK):
        return lock_folder(folder, LOCK, user="run", remedy="wait for it or choose another folder with --output")


def _run_files(folder: Path) -> Iterator[Path]:
    """Yield the existing paths in `folder` that have the names of run files."""
    for name in FILES:
        if (folder / name).exists():
            yield folder / name
    for name, patterns in FOLDERS.items():
        for pattern in patterns:
            yield from sorted((folder / name).glob(pattern))


def _refuse_foreign_files(folder: Path) -> None:
    """Raise `UsageError` if `folder` has files that are named like the files of a run but belong to no run."""
    with writing(folder):
        if not (folder / LOCK).exists() and (foreign := list(_run_files(folder))):
            raise UsageError(
                f"{folder}: {foreign[0].relative_to(folder)} exists but belongs to no run; "
                "choose another folder with --output"
            )


def _has_results(folder: Path) -> bool:
    rows = (folder / METRICS, folder / EVALUATIONS)
    return any(path.exists() and path.stat().st_size for path in rows) or any((folder / CHECKPOINTS).glob("step-*"))


def _remove_run(folder: Path) -> None:
    """Remove the files of a run, and then the run's subfolders that are empty."""
    for path in _run_files(folder):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
    for name in FOLDERS:
        subfolder = folder / name
        if subfolder.is_dir() and not any(subfolder.iterdir()):
            subfolder.rmdir()


def _refuse_other_config(path: Path, new_yaml: str, complete: Callable[[str], str]) -> None:
    """Raise `UsageError` for the first key that differs in the new configuration.

    `trainer.steps` may be larger, and the keys of the server in `env` and of the servers of the engine may change.
    """
    try:
        old = dict(leaves(yaml.safe_load(complete(path.read_text(encoding="utf-8")))))
    except ConfigError as error:
        raise UsageError(f"{path}: change these keys in it, or start over with --force:\n{error}") from None
    except (yaml.YAMLError, ValueError, RecursionError):
        raise UsageError(f"{path}: damaged; repair it, or start over with --force") from None
    new = dict(leaves(yaml.safe_load(new_yaml)))
    for key in [*new, *(key for key in old if key not in new)]:
        before, after = old.get(key, _MISSING), new.get(key, _MISSING)
        grows = key == _MAY_GROW and isinstance(before, int) and isinstance(after, int) and after > before
        server = _MAY_MOVE.fullmatch(key)
        moves = server is not None and all(one.get(f"{server[1]}.url") is not None for one in (old, new))
        if before != after and not (grows or moves or _MAY_CHANGE.fullmatch(key)):
            difference = f"the run has {_shown(before)}, the file has {_shown(after)}"
            raise UsageError(f"{key}: {difference}; use the old value, or --force to start over")


def leaves(tree: object, key: str = "") -> Iterator[tuple[str, object]]:
    """Yield the dotted key and the value of each leaf of nested mappings, also of those in lists."""
    if isinstance(tree, list) and any(isinstance(one, Mapping) for one in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        yield key, tree
        return
    for name, inner in tree.items():
        yield from leaves(inner, f"{key}.{name}" if key else str(name))


def _shown(value: object) -> str:
    if value is _MISSING:
        return "no value"
    return value if isinstance(value, str) else orjson.dumps(value).decode()
