"""``envkit show`` and ``envkit rescore``: recorded episodes turn by turn, and their rewards computed again."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.environments.options import Backend, EnvOptions, Judge, Recording, TrainStep, read_options
from envkit.cli.tables import echo
from envkit.errors import UsageError
from envkit.runs.printable import counted

if TYPE_CHECKING:
    from envkit.types import EpisodeRecord


def show(
    run: Recording,
    step: TrainStep = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that failed.")] = False,
    task: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only attempts at this task.")] = None,
    episode: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only the episode in this line of the file, from 1.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Show at most this many episodes.")] = 3,
    prompts: Annotated[
        bool,
        typer.Option("--prompts", help="Show the model's raw prompts and completions, with special tokens."),
    ] = False,
) -> None:
    """Print recorded episodes turn by turn."""
    from envkit.cli.environments.episode_page import EpisodePage, summary
    from envkit.trainer_bridge.evaluation.recordings import open_recording

    path, episodes = open_recording(run, partial(echo, err=True), step=step)
    _check(path, episodes, task=task, episode=episode, prompts=prompts)
    chosen = [
        (number, one)
        for number, one in enumerate(episodes, 1)
        if episode in (None, number) and task in (None, one.index) and (not failed or one.outcome.success is False)
    ]
    page = EpisodePage(sys.stdout, prompts=prompts)
    page.heading(f"{path}: {summary(episodes)}", episodes)
    for number, one in chosen[:limit]:
        page.episode(one, number)
    if not chosen:
        page.note("no failed episodes" if failed else "no such episode")
    elif len(chosen) > limit:
        page.note(f"{limit} of {len(chosen)} episodes shown; --limit {len(chosen)} shows all")


def _check(
    path: Path, episodes: Sequence[EpisodeRecord], *, task: int | None, episode: int | None, prompts: bool
) -> None:
    """Raise `UsageError` if the file does not contain the episode, task or prompts that an option selects."""
    from envkit.trainer_bridge.evaluation.recordings import listed

    if episode is not None and episode > len(episodes):
        raise UsageError(f"--episode {episode}: the last episode of {path} has number {len(episodes)}")
    tasks = sorted({one.index for one in episodes})
    if task is not None and task not in tasks:
        raise UsageError(f"--task {task}: {path} has no episode of this task; its tasks are {listed(tasks)}")
    if prompts and not any(turn.generation for one in episodes for turn in one.turns):
        raise UsageError(f"--prompts: {path} has no prompts, since no model played its episodes; leave --prompts out")


_SHOWN = 10


def rescore(
    run: Recording,
    step: TrainStep = None,
    option: EnvOptions = None,
    backend: Backend = None,
    judge: Judge = None,
    output: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the repeated episodes here, for envkit show.")
    ] = None,
) -> None:
    """Repeat recorded actions, and compare the rewards with the recorded ones."""
    from envkit.trainer_bridge.evaluation.rescore import totals
    from envkit.wiring import api

    options = read_options(option or ())
    path, found = api.rescore(run, step=step, options=options, backend=backend, judge=judge, output=output)
    changed = [one for one in found if one.is_changed]
    failed = [one for one in found if one.after.outcome.is_void]
    echo(f"{path}: {counted(len(found), 'episode')} repeated, {counted(len(changed), 'reward')} changed")
    for name, (before, after) in totals(found).items():
        echo(f"  {name:<8} {before:.3f} -> {after:.3f}")
    for one in changed[:_SHOWN]:
        before_reward, after_reward = one.before.outcome.reward, one.after.outcome.reward
        echo(f"  {one.before.label}, attempt {one.before.member + 1}: {before_reward} -> {after_reward}")
    if len(changed) > _SHOWN:
        echo(f"  and {len(changed) - _SHOWN} more; --output FILE writes all")
    different = [one for one in found if not one.after.outcome.is_void and one.differs_at is not None]
    if different:
        echo(
            f"{counted(len(different), 'episode')} had other observations, the first in turn {different[0].differs_at}:"
            " the environment is not the one that was recorded, or its observations vary",
            err=True,
        )
    if failed:
        echo(f"{len(failed)} could not be repeated; the first: {failed[0].after.outcome.error}", err=True)
    if output is not None:
        echo(f"written: {output}")
    if failed:
        raise typer.Exit(1)
