"""`train` and `evaluate` as functions for scripts and notebooks. The commands of the same names call them."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from envkit import clock, config
from envkit.config import EvalConfig, RunConfig
from envkit.config.evaluation import read as config_of_evaluation
from envkit.errors import ConfigError, UnknownEnvError, UsageError
from envkit.runs.display import StreamDisplay
from envkit.types import JSON, EpisodeRecord, Options
from envkit.wiring.environments import find

if TYPE_CHECKING:
    from envkit.trainer_bridge.evaluation.report import EvaluationFolder
    from envkit.trainer_bridge.evaluation.rescore import Rescored
    from envkit.trainer_bridge.evaluation.result import Evaluation
    from envkit.wiring.training.run import OnStep

__all__ = ["TrainSummary", "evaluate", "train"]


_REPEATED_AT_ONCE = 8

RUNS = Path("runs")
"""Folder in which `train` creates the folders of runs by default."""


@dataclass(frozen=True, slots=True)
class TrainSummary:
    """Result of `train`. Rates are shares of episodes on held-out tasks; None if they were not evaluated.

    Attributes:
        folder: Folder of the run; see docs/train.md for its files.
        env_id: The environment; the first of several, whose results are in `content`.
        algorithm: The preset of the algorithm.
        policy: One line that describes the model.
        train_steps: Number of train steps, including those before a resume.
        episodes: Number of training episodes that ended, lost ones included.
        lost_episodes: Number of training episodes that were lost; most were played again.
        eval_success_before: Success rate with sampled completions before training.
        eval_success_after: The same at the end.
        eval_greedy_before: Success rate with greedy completions before training.
        eval_greedy_after: The same at the end.
        eval_episodes: Number of episodes of the last evaluation.
        wall_s: Duration in seconds, including the parts before a resume.
        seed: Seed of the run.
        diagnosis: What was wrong with the run: name, first and last train step, and a line for each finding.
        stopped: Whether SIGINT or SIGTERM ended the run before its last train step.
        content: The whole content of ``summary.json``.
    """

    folder: Path
    env_id: str
    algorithm: str
    policy: str
    train_steps: int
    episodes: int
    lost_episodes: int
    eval_success_before: float | None
    eval_success_after: float | None
    eval_greedy_before: float | None
    eval_greedy_after: float | None
    eval_episodes: int
    wall_s: float
    seed: int
    diagnosis: list[dict[str, JSON]]
    stopped: bool
    content: Mapping[str, JSON]

    @classmethod
    def of(cls, folder: Path, content: Mapping[str, Any]) -> TrainSummary:
        """Return the summary of the run in `folder` from the content of its ``summary.json``."""
        values = {"env_id": next(iter(content.get("env_ids", ())), None), **content}
        return cls(folder=folder, content=content, **{one.name: values[one.name] for one in fields(cls)[1:-1]})


def train(
    config: str | os.PathLike[str] | Mapping[str, Any] | RunConfig,
    *,
    output: str | os.PathLike[str] | None = None,
    resume: bool = False,
    force: bool = False,
    on_step: OnStep | None = None,
) -> TrainSummary:
    """Train a policy. Prints progress, and works in scripts and notebooks.

    In a script, SIGINT and SIGTERM save a checkpoint and end the run, whose summary then has ``stopped=True``. If the
    thread has a running event loop, as in a notebook, the run works in another thread, and an interrupt saves a
    checkpoint and raises `KeyboardInterrupt`.

    Args:
        config: Path of a training file, its content as a mapping, or a `RunConfig`.
        output: Folder of the run; None means ``runs/`` and the name of the file or of the first environment.
        resume: Whether to continue the run in the folder from its last checkpoint.
        force: Whether to replace the run in the folder.
        on_step: Called after each train step with its number and its metrics, in the thread of the run. If it raises an
            error, the run saves a checkpoint and raises this error.

    Raises:
        ConfigError: The training file has problems, one line each.
        UsageError: The folder, the model or the checkpoint cannot be used.
        EnvkitError: The run failed, for example because no sandbox works any more.
    """
    if resume and force:
        raise UsageError("resume continues the run and force replaces it; leave one out")
    settings, name = _read(config)
    folder = RUNS / name if output is None else Path(output)

    from envkit.wiring.training import run  # Import this slow module only if the file is valid.

    with closing(StreamDisplay(sys.stdout)) as display:
        content = clock.run_blocking(
            partial(run.train, settings, folder, resume=resume, force=force, display=display, on_step=on_step)
        )
    return TrainSummary.of(folder, content)


def evaluate(
    config: str | os.PathLike[str] | Mapping[str, Any] | EvalConfig,
    policy: str | None = None,
    *,
    overrides: Sequence[str] = (),
    output: str | os.PathLike[str] | EvaluationFolder | None = None,
    dialogues: str | os.PathLike[str] | None = None,
    force: bool = False,
    **settings: Any,
) -> Evaluation:
    """Measure how well a policy plays. Prints progress on standard error, and works in scripts and notebooks.

    Args:
        config: Id of an environment, path of an evaluation file, its content as a mapping, or an `EvalConfig`.
        policy: The policy, such as ``"random"``; see `envkit.config.EvalConfig`. None means that of `config`.
        overrides: ``"a.b=value"`` strings, such as ``"rollout.max_turns=8"``.
        output: Folder in which the episodes and the results are saved, and from which an interrupted evaluation
            continues; None saves nothing.
        dialogues: File for the successful episodes as dialogues, for ``imitation.kind: dialogues``; None: no file.
        force: Whether to replace the evaluation in the folder.
        settings: Values of keys by short names, such as ``episodes=64``, ``attempts=4``, ``seed=1``, ``split="any"``,
            ``options={"size": 6}``, ``url="http://host"``, ``temperature=0`` (greedy), ``max_turns=8``,
            ``greedy=True``, ``turn_tokens=64`` or ``system="Be brief."``; see `envkit.config.evaluation`.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment rejects an option.
        ConfigError: The description is invalid; one line for each problem.
        UsageError: No such policy or short name, the policy cannot play this environment, or the folder or the file of
            dialogues cannot be used.
        EnvkitError: No episode finished, or a server or endpoint was lost.
    """
    from envkit.runs.episodes import EPISODES, read_episodes
    from envkit.trainer_bridge.evaluation.recordings import dialogue_of
    from envkit.wiring.evaluation import evaluate as evaluation

    if force and output is None:
        raise UsageError("force replaces the evaluation in the folder output; set output, or leave out force")
    try:
        chosen = config_of_evaluation(config, overrides, policy=policy, **settings)
    except ConfigError as error:
        raise ConfigError([*_unknown_env(config, settings.get("url")), *error.problems]) from None
    if dialogues is not None:
        _write(Path(dialogues), None)
    folder: EvaluationFolder | None = None
    if output is not None:
        from envkit.trainer_bridge.evaluation.report import EvaluationFolder

        folder = output if isinstance(output, EvaluationFolder) else EvaluationFolder(Path(output), force=force)
    succeeded: list[EpisodeRecord] = []

    def add(episode: EpisodeRecord) -> None:
        if folder is not None:
            folder.add(episode)
        if dialogues is not None and episode.outcome.success:
            dialogue_of(episode)  # an environment with tools is refused here, and not after the last episode
            succeeded.append(episode)

    with closing(StreamDisplay(sys.stderr)) as display:
        kept = None if folder is None else folder.begin
        found = clock.run_blocking(partial(evaluation.evaluate, chosen, display=display, kept=kept, on_episode=add))
    if folder is not None:
        folder.finish(found)
    if dialogues is not None:
        if folder is not None:  # it also has the episodes from before an interruption
            succeeded = [one for one in read_episodes(folder.path / EPISODES) if one.outcome.success]
        succeeded.sort(key=lambda one: (one.index, one.member))
        if "success" not in found.metrics:
            display.announce(f"{dialogues}: has no dialogues, because success is {found.success_rule}")
        _write(Path(dialogues), map(dialogue_of, succeeded))
    return found


def rescore(
    run: Path,
    *,
    step: int | None = None,
    options: Options | None = None,
    backend: str | None = None,
    judge: str | None = None,
    output: Path | None = None,
) -> tuple[Path, list[Rescored]]:
    """Repeat the actions of recorded episodes, and compute their rewards again. Prints progress on standard error.

    The arguments are those of ``envkit rescore``. Returns the file of the recorded episodes, and both versions of each
    of its valid episodes. Raises `UsageError` if they cannot be read or repeated.
    """
    from envkit.trainer_bridge.evaluation import rescore as rescoring
    from envkit.trainer_bridge.evaluation.recordings import open_recording
    from envkit.wiring.environments import open_resources, refuse_foreign, slots

    display, chosen = StreamDisplay(sys.stderr), options or {}
    path, recorded = open_recording(run, display.announce, step=step)
    episodes = rescoring.repeatable(recorded)
    for one in episodes:
        refuse_foreign(one.env_id, one.options, chosen, "the recording")

    async def main() -> list[Rescored]:
        async with (
            open_resources(find(episodes[0].env_id).needs, backend=backend, judge=judge) as resources,
            slots(_REPEATED_AT_ONCE, chosen, resources) as host,
        ):
            return await rescoring.rescore(host, episodes, options=chosen, num_envs=_REPEATED_AT_ONCE, display=display)

    with closing(display):
        found = clock.run_blocking(main)
    if output is not None:
        _write(output, (one.after for one in found))
    return path, found


def _unknown_env(config: object, url: str | None) -> Iterator[str]:
    """Yield a problem if `config` is the id of no environment; a file, its content or a server may name others."""
    if isinstance(config, str) and url is None and not Path(config).suffix:
        try:
            find(config)
        except UnknownEnvError as error:
            yield f"env.id: {error}"


def _write(path: Path, rows: Iterable[object] | None) -> None:
    """Write JSON lines. If `rows` is None, only check that the file can be written, without leaving one behind."""
    from envkit.runs.files import encoded, writing

    with writing(path, remedy="choose a file that can be written"):
        is_new = not path.exists()
        with path.open("ab" if rows is None else "wb") as file:
            file.writelines(encoded(row) + b"\n" for row in rows or ())
        if is_new and rows is None:
            path.unlink()


def _read(content: str | os.PathLike[str] | Mapping[str, Any] | RunConfig) -> tuple[RunConfig, str]:
    """Return a training file, and the default name of the run's folder."""
    if isinstance(content, (str, os.PathLike)):
        return config.load(Path(content)), Path(content).stem
    run = content if isinstance(content, RunConfig) else config.parse(content)
    return run, run.envs[0].id
