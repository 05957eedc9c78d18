"""``envkit eval``: how well a policy plays."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.environments.options import EnvOptions, read_options
from envkit.errors import OptionError, UsageError

if TYPE_CHECKING:
    from envkit.types import Options
    from envkit.wiring.evaluation.evaluate import Evaluation
    from envkit.wiring.evaluation.statistics import Estimate, Stratum

_NAMES = {"action_is_valid": "valid answers", "action_is_effective": "effective actions"}
_SHARES = ("success", "action_is_valid", "action_is_effective")


def evaluate(
    env_id: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment; see envkit list.")],
    policy: Annotated[str, typer.Option(metavar="random|expert|checkpoint:DIR", help="Who plays.")],
    episodes: Annotated[int, typer.Option(min=1, metavar="COUNT", help="Tasks.")] = 512,
    attempts: Annotated[
        int,
        typer.Option(min=1, metavar="COUNT", help="How often each task is played; with several, pass@COUNT is told."),
    ] = 1,
    seed: Annotated[
        int, typer.Option(min=0, help="The tasks follow from it; the default is that of training files.")
    ] = (1_000_003),
    option: EnvOptions = None,
    split: Annotated[
        str, typer.Option(metavar="train|validation|eval|any", help="Play only levels of this split.")
    ] = "eval",
    url: Annotated[str | None, typer.Option(help="Play on the envkit serve at this address.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take a checkpoint's likeliest tokens instead of sampling.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
    output: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Also write figures, episodes and a plot into this folder.")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace an evaluation that the folder already holds.")
    ] = False,
) -> None:
    """Measure how well a policy plays."""
    if force and output is None:
        raise UsageError("--force needs --output: it replaces what a folder holds")
    from envkit import clock
    from envkit.wiring.evaluation.evaluate import evaluate
    from envkit.wiring.training.display import display_on

    options = read_options(option or ())
    episodes_played = None
    if output is not None:
        from envkit.wiring.evaluation import report

        report.check(output, force=force)
        episodes_played = report.EpisodeBuffer()
    with closing(display_on(sys.stderr)) as display, _advice(split, options):
        found = clock.run(
            partial(
                evaluate,
                env_id,
                policy,
                episodes=episodes,
                attempts=attempts,
                seed=seed,
                options=options,
                split=split,
                display=display,
                url=url,
                greedy=greedy,
                on_episode=None if episodes_played is None else episodes_played.add,
            )
        )
    _print(found, as_json=as_json)
    if output is not None and episodes_played is not None:
        files = report.write(found, episodes_played, output)
        typer.echo(f"written: {', '.join(map(str, files))}", err=as_json)
        if not found.levels:
            typer.echo(f"no plot: {env_id} does not tell how hard its levels are, or what success is", err=as_json)


@contextmanager
def _advice(split: str, options: Options) -> Iterator[None]:
    """Say what to do about levels that belong to no split, of which nobody who leaves out --split has to know."""
    try:
        yield
    except OptionError as error:
        if error.option != "split" or "split" in options:
            raise
        raise UsageError(f"--split {split}: {error.reason}; take --split any") from None


def _print(found: Evaluation, *, as_json: bool) -> None:
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found.as_json()))
        return
    from envkit.wiring.evaluation.evaluate import MAX_STRATA

    times = f" ({found.attempts} attempts at each task)" if found.attempts > 1 else ""
    typer.echo(f"{found.policy} on {found.env_id}: {found.episodes} episodes{times} in {found.seconds:.1f} s")
    if found.void:
        by_agent = f", {found.void_by_agent} by what ran in their sandbox" if found.void_by_agent else ""
        typer.echo(f"{found.void} more were lost{by_agent} and do not count: {found.error}")
    _table([("", "mean", "95 % interval"), *(_row(name, estimate) for name, estimate in found.metrics.items())])
    if found.levels:
        typer.echo("success by shortest solution")
        head = ("moves", "mean", "95 % interval", "episodes")
        _table([head, *(_stratum(one) for one in found.by_difficulty(most=MAX_STRATA))])


def _table(rows: Sequence[Sequence[str]]) -> None:
    """Print rows whose first column is to the left and whose others are to the right."""
    width = max(len(name) for name, *_ in rows)
    for name, mean, interval, *rest in rows:
        typer.echo("  ".join([f"  {name:<{width}}", f"{mean:>8}", f"{interval:>16}", *(f"{one:>9}" for one in rest)]))


def _row(name: str, estimate: Estimate) -> tuple[str, str, str]:
    is_share = name in _SHARES or name.startswith("pass@")
    mean, low, high = (f"{value:.1%}" if is_share else f"{value:.2f}" for value in estimate)
    return _NAMES.get(name, name.replace("_", " ")), mean, f"{low} – {high}"


def _stratum(one: Stratum) -> tuple[str, str, str, str]:
    moves = str(one.shortest) if one.shortest == one.longest else f"{one.shortest}-{one.longest}"
    _, mean, interval = _row("success", one.success)
    return moves, mean, interval, str(one.episodes)
