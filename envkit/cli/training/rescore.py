"""``envkit rescore``: compute the rewards of recorded episodes again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from envkit.cli.environments.options import Backend, EnvOptions, Judge, Recording, TrainStep, read_options
from envkit.cli.tables import echo
from envkit.runs.printable import counted

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
