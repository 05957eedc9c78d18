"""``envkit show``: recorded episodes in the terminal, turn by turn."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.errors import UsageError

if TYPE_CHECKING:
    from envkit.types import EpisodeRecord


def show(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN", help="Folder of a training run or of envkit eval --output, or one of their .jsonl files."
        ),
    ],
    step: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Train step; the newest recorded one when not given.")
    ] = None,
    failed: Annotated[bool, typer.Option("--failed", help="Only episodes that did not succeed.")] = False,
    task: Annotated[int | None, typer.Option(min=0, metavar="N", help="Only attempts at this task.")] = None,
    episode: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Only this episode, counted from 1 as the file's lines.")
    ] = None,
    limit: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Show at most this many episodes.")] = 3,
    prompts: Annotated[
        bool,
        typer.Option("--prompts", help="Show prompts and completions as the model had them, with special tokens."),
    ] = False,
) -> None:
    """Print recorded episodes turn by turn."""
    from envkit.cli.environments.episode_page import EpisodePage, summary
    from envkit.wiring.evaluation.recordings import open_recording

    path, episodes = open_recording(run, step=step)
    _check(path, episodes, task=task, episode=episode, prompts=prompts)
    chosen = [
        (number, one)
        for number, one in enumerate(episodes, 1)
        if episode in (None, number) and task in (None, one.index) and not (failed and one.succeeded)
    ]
    page = EpisodePage(sys.stdout, prompts=prompts)
    page.heading(f"{path}: {summary(episodes)}", episodes)
    for number, one in chosen[:limit]:
        page.episode(one, number)
    if not chosen:
        page.note("none of them failed" if failed else "no such episode")
    elif len(chosen) > limit:
        page.note(f"{limit} of {len(chosen)} episodes shown; --limit {len(chosen)} shows all")


def _check(
    path: Path, episodes: Sequence[EpisodeRecord], *, task: int | None, episode: int | None, prompts: bool
) -> None:
    """Refuse what the file does not have."""
    from envkit.wiring.evaluation.recordings import listed

    if episode is not None and episode > len(episodes):
        raise UsageError(f"--episode {episode}: {path} has {len(episodes)}")
    tasks = sorted({one.index for one in episodes})
    if task is not None and task not in tasks:
        raise UsageError(f"--task {task}: {path} has no episode of it; its tasks are {listed(tasks)}")
    if prompts and not any(turn.generation for one in episodes for turn in one.turns):
        raise UsageError(f"--prompts: no model played the episodes of {path}, so there are none; leave it out")
