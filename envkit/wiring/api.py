"""`train` and `evaluate` as functions for scripts and notebooks. The commands of the same names call them."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass, fields
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from anyio.from_thread import start_blocking_portal

from envkit import clock, config
from envkit.config import RunConfig
from envkit.errors import UsageError
from envkit.runs.display import display_on
from envkit.types import JSON, EpisodeRecord, Options

if TYPE_CHECKING:
    from envkit.trainer_bridge.evaluation.rescore import Rescored
    from envkit.wiring.evaluation.evaluate import Evaluation
    from envkit.wiring.evaluation.report import EvaluationFolder
    from envkit.wiring.training.run import OnStep

__all__ = ["TrainSummary", "display_on", "evaluate", "train"]

T = TypeVar("T")

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

    with closing(display_on(sys.stdout)) as display:
        content = _run(
            partial(run.train, settings, folder, resume=resume, force=force, display=display, on_step=on_step)
        )
    return TrainSummary.of(folder, content)


def evaluate(
    env_id: str,
    policy: str,
    *,
    episodes: int | None = None,
    attempts: int = 1,
    seed: int = 1_000_003,
    options: Options | None = None,
    split: str = "eval",
    url: str | None = None,
    token: str | None = None,
    ca: str | os.PathLike[str] | None = None,
    backend: str | None = None,
    judge: str | None = None,
    greedy: bool = False,
    temperature: float | None = None,
    system: str | None = None,
    turn_tokens: int | None = None,
    max_turns: int | None = None,
    max_tokens: int | None = None,
    history: int | Literal["all"] | None = None,
    thinking: Literal["keep", "cut"] | None = None,
    device: Literal["auto", "cpu", "cuda"] | None = None,
    batch: int | None = None,
    concurrency: int | None = None,
    output: str | os.PathLike[str] | EvaluationFolder | None = None,
    dialogues: str | os.PathLike[str] | None = None,
    force: bool = False,
) -> Evaluation:
    """Measure how well a policy plays. Prints progress on standard error, and works in scripts and notebooks.

    Args:
        env_id: Registered environment.
        policy: ``"random"``, ``"expert"``, ``"checkpoint:DIR"`` (the folder of a run), ``"model:NAME-OR-PATH"``,
            ``"openai:MODEL@URL"``, or a player of the environment such as ``"oracle"``.
        episodes: Number of tasks; None means 512, or all if the split has fewer.
        attempts: Episodes per task; above 1, ``pass@k`` is reported too.
        seed: Seed of the tasks; by default the same as in training files.
        options: Options of the environment.
        split: Split whose levels are played, if the environment has splits; ``"any"`` plays all levels.
        url: Address of an `envkit serve` that plays the episodes; None plays in this process.
        token: Token for that server; None means the variable ``ENVKIT_TOKEN``.
        ca: PEM file of the certificates to trust for ``https://``, instead of the system's.
        backend: As in `envkit.make`.
        judge: ``"MODEL@URL"`` of the judge, for an environment that needs one.
        greedy: Whether a language model takes the most likely token instead of sampling.
        temperature: Sampling temperature of a language model. Like the settings below, it is only for language models;
            None means the default.
        system: System prompt.
        turn_tokens: Maximum tokens of one answer.
        max_turns: Turns after which an episode is cut off.
        max_tokens: Maximum tokens of a prompt plus its answer.
        history: Number of most recent turns in a prompt, or ``"all"``.
        thinking: Whether thoughts of earlier turns stay in the prompt.
        device: Device of a model in this process.
        batch: Number of concurrent episodes of a model in this process.
        concurrency: Number of concurrent requests to an endpoint.
        output: Folder in which the episodes, the results and a plot are saved, and from which an interrupted evaluation
            continues; None saves nothing.
        dialogues: File for the successful episodes as dialogues, for ``warmup.kind: dialogues``; None writes no file.
        force: Whether to replace the evaluation in the folder.

    Raises:
        UnknownEnvError: No such environment.
        OptionError: The environment rejects an option.
        UsageError: No such policy, it cannot play this environment with these arguments, or the folder or the file of
            dialogues cannot be used.
        UnreachableError: The server does not answer, or stopped answering.
        EnvkitError: No episode finished, or an endpoint was lost.
    """
    from envkit.trainer_bridge.evaluation.recordings import dialogue_of, open_recording
    from envkit.wiring.evaluation import evaluate as evaluation
    from envkit.wiring.evaluation.players import Playing

    if force and output is None:
        raise UsageError("force replaces the evaluation in the folder output; set output, or leave out force")
    playing = Playing(
        system=system,
        turn_tokens=turn_tokens,
        max_turns=max_turns,
        max_tokens=max_tokens,
        temperature=temperature,
        history=history,
        thinking=thinking,
        device=device,
        batch=batch,
        concurrency=concurrency,
    )
    if dialogues is not None:
        _check_writable(Path(dialogues))
    folder = None if output is None else _folder(output, force=force)
    succeeded: list[EpisodeRecord] = []

    def add(episode: EpisodeRecord) -> None:
        if folder is not None:
            folder.add(episode)
        if dialogues is not None and episode.outcome.success:
            dialogue_of(episode)  # an environment with tools is refused here, and not after the last episode
            succeeded.append(episode)

    with closing(display_on(sys.stderr)) as display:
        found = _run(
            partial(
                evaluation.evaluate,
                env_id,
                policy,
                episodes=episodes,
                attempts=attempts,
                seed=seed,
                options=options or {},
                split=split,
                display=display,
                url=url,
                token=token,
                ca=None if ca is None else Path(ca),
                backend=backend,
                judge=judge,
                greedy=greedy,
                playing=playing,
                kept=None if folder is None else folder.begin,
                on_episode=add,
            )
        )
    if folder is not None:
        folder.finish(found)
    if dialogues is not None:
        if folder is not None:  # it also has the episodes from before an interruption
            succeeded = [one for one in open_recording(folder.path)[1] if one.outcome.success]
        succeeded.sort(key=lambda one: (one.index, one.member))
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

    Args:
        run: Folder of a training run or of an evaluation, or a file of episodes in it.
        step: Train step; None means the last recorded one.
        options: Options that override those of the recorded tasks.
        backend: As in `envkit.make`.
        judge: ``"MODEL@URL"`` of the judge, for an environment that needs one.
        output: File for the repeated episodes, as JSON lines; None writes no file.

    Returns:
        The file of the recorded episodes, and both versions of each of its valid episodes.

    Raises:
        UsageError: The episodes cannot be read or repeated.
    """
    from envkit.trainer_bridge.evaluation import rescore as rescoring
    from envkit.trainer_bridge.evaluation.recordings import open_recording
    from envkit.wiring.environments import find, open_resources, slots

    path, recorded = open_recording(run, step=step)
    episodes, chosen = rescoring.repeatable(recorded), options or {}

    async def main() -> list[Rescored]:
        async with (
            open_resources(find(episodes[0].env_id).needs, backend=backend, judge=judge) as resources,
            slots(_REPEATED_AT_ONCE, chosen, resources) as host,
        ):
            return await rescoring.rescore(host, episodes, options=chosen, num_envs=_REPEATED_AT_ONCE, display=display)

    with closing(display_on(sys.stderr)) as display:
        found = _run(main)
    if output is not None:
        _write(output, (one.after for one in found))
    return path, found


def _write(path: Path, rows: Iterable[object]) -> None:
    from envkit.runs.files import encoded

    with _writing(path):
        path.write_bytes(b"".join(encoded(row) + b"\n" for row in rows))


def _check_writable(path: Path) -> None:
    """Check that a file can be written, without changing it or leaving one behind."""
    with _writing(path):
        is_new = not path.exists()
        path.open("ab").close()
        if is_new:
            path.unlink()


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise UsageError(f"{path}: {error.strerror or error}; choose a file that can be written") from error


def _read(content: str | os.PathLike[str] | Mapping[str, Any] | RunConfig) -> tuple[RunConfig, str]:
    """Return a training file, and the default name of the run's folder."""
    if isinstance(content, RunConfig):
        return content, content.envs[0].id
    if isinstance(content, Mapping):
        parsed = config.parse(content)
        return parsed, parsed.envs[0].id
    path = Path(content)
    return config.load(path), path.stem


def _folder(output: str | os.PathLike[str] | EvaluationFolder, *, force: bool) -> EvaluationFolder:
    from envkit.wiring.evaluation.report import EvaluationFolder  # needs matplotlib

    return output if isinstance(output, EvaluationFolder) else EvaluationFolder(Path(output), force=force)


def _run(main: Callable[[], Awaitable[T]]) -> T:
    """Run `main` in a new event loop, in a worker thread if this thread already runs one.

    If the wait for the worker thread is interrupted, `main` is cancelled, and the interrupt is raised after its end.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return clock.run(main)
    with start_blocking_portal() as portal:
        result = portal.start_task_soon(main)
        try:
            return result.result()
        except BaseException:
            result.cancel()
            raise
