"""``envkit train``: train a policy from a training file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.checks import File, Overrides, load
from envkit.cli.exits import STOPPED
from envkit.cli.tables import echo
from envkit.errors import UsageError
from envkit.installation import command

if TYPE_CHECKING:
    from envkit.types import JSON
    from envkit.wiring.api import TrainSummary


def train(
    file: File,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Folder of the run; by default runs/ and the file's name.")
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Continue from the run's last checkpoint.")] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that is already in the folder.")] = False,
    replay_schedule: Annotated[
        Path | None, typer.Option(metavar="RUN", help="Train on the groups of another run, in the same order.")
    ] = None,
    overrides: Overrides = None,
) -> None:
    """Train a policy from a training file. Ctrl-C saves a checkpoint and stops; --resume continues from it."""
    if resume and force:
        raise UsageError("--resume continues the run and --force replaces it; leave one out")
    from envkit.wiring import api

    if replay_schedule is not None:
        overrides = [*(overrides or ()), f"rollout.replay_schedule={replay_schedule}"]
    folder = api.RUNS / file.stem if output is None else output
    summary = api.train(load(file, overrides or ()), output=folder, resume=resume, force=force)
    _print_summary(summary)
    if summary.stopped:
        again = ["train", str(file), "--output", str(folder)]
        again += [word for override in overrides or () for word in ("--set", override)]
        if any((folder / "checkpoints").glob("step-*")):
            again.append("--resume")
            imitates = summary.content.get("phase") == "imitation"
            where = "in the imitation" if imitates else f"after train step {summary.train_steps}"
            echo(f"stopped {where}; continue with: {command(*again)}")
        else:
            echo(f"stopped before the first checkpoint; start again with: {command(*again)}")
        raise typer.Exit(STOPPED)


def _print_summary(summary: TrainSummary) -> None:
    rows = [*_rows(summary), ("files", str(summary.folder))]
    width = max(len(name) for name, _ in rows)
    echo()
    for name, value in rows:
        echo(f"{name:<{width}}  {value}")
    for one in summary.diagnosis:
        echo(f"warning: {one['name']} ({_period(one)}): {one['line']}")


def _period(finding: Mapping[str, JSON]) -> str:
    first, last = finding["first_step"], finding["last_step"]
    return f"train step {first}" if first == last else f"train steps {first} to {last}"


def _rows(summary: TrainSummary) -> Iterator[tuple[str, str]]:
    """Yield the names and values of the main results."""
    whens = ("untrained", "before", "after") if summary.train_steps else ("untrained", "after")
    yield from _held_out(summary.content, whens)
    environments = summary.content.get("environments")
    for env, values in environments.items() if isinstance(environments, dict) else ():
        if isinstance(values, dict):
            yield from _held_out(values, whens, f", {env}")
    step = summary.content.get("best_step")
    if isinstance(best := summary.content.get("eval_success_best"), float):
        yield "best checkpoint", f"step-{step}, {best:.1%} sampled"
    if isinstance(best := summary.content.get("eval_return_best"), float):
        yield "best checkpoint", f"step-{step}, return {best:.2f} sampled"
    yield "train steps", str(summary.train_steps)
    yield "episodes", f"{summary.episodes:,}, {summary.lost_episodes:,} of them lost"
    wall_s = summary.wall_s
    yield "time", f"{wall_s:.0f} s" if wall_s < 120 else f"{wall_s / 60:.1f} min"


def _held_out(values: Mapping[str, JSON], whens: Sequence[str], suffix: str = "") -> Iterator[tuple[str, str]]:
    """Yield the held-out results of the evaluations `whens` that were made."""
    found = {
        key: [one for when in whens if isinstance(one := values.get(f"{key}_{when}"), float)]
        for key in ("eval_success", "eval_greedy", "eval_return")
    }
    for name, key in (("held-out success, sampled", "eval_success"), ("held-out success, greedy", "eval_greedy")):
        if found[key]:
            yield f"{name}{suffix}", " → ".join(f"{one:.1%}" for one in found[key])
    if not found["eval_success"] and found["eval_return"]:
        yield f"held-out return, sampled{suffix}", " → ".join(f"{one:.2f}" for one in found["eval_return"])
