"""``envkit eval``: how well a policy plays."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.errors import UsageError

if TYPE_CHECKING:
    from envkit.types import JSON
    from envkit.wiring.evaluation import Estimate, Evaluation

_NAMES = {"action_is_valid": "valid answers", "action_is_effective": "effective actions"}
_SHARES = ("success", "action_is_valid", "action_is_effective")


def evaluate(
    env_id: Annotated[str, typer.Argument(metavar="ENV", help="A registered environment; see envkit list.")],
    policy: Annotated[str, typer.Option(metavar="random|expert|checkpoint:DIR", help="Who plays.")],
    episodes: Annotated[int, typer.Option(min=1, help="Tasks, each played once.")] = 512,
    seed: Annotated[
        int, typer.Option(min=0, help="The tasks follow from it; the default is that of training files.")
    ] = (1_000_003),
    option: Annotated[
        list[str] | None, typer.Option(metavar="KEY=VALUE", help="An option of the environment, such as size=6.")
    ] = None,
    split: Annotated[
        str, typer.Option(metavar="train|validation|eval|any", help="Play only levels of this split.")
    ] = "eval",
    url: Annotated[str | None, typer.Option(help="Play on the envkit serve at this address.")] = None,
    greedy: Annotated[
        bool, typer.Option("--greedy", help="Take a checkpoint's likeliest tokens instead of sampling.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON object instead of a table.")] = False,
) -> None:
    """Measure how well a policy plays."""
    from envkit import clock
    from envkit.wiring.display import display_on
    from envkit.wiring.evaluation import evaluate

    options = _options(option or ())
    with closing(display_on(sys.stderr)) as display:
        found = clock.run(
            partial(
                evaluate,
                env_id,
                policy,
                episodes=episodes,
                seed=seed,
                options=options,
                split=split,
                display=display,
                url=url,
                greedy=greedy,
            )
        )
    _print(found, as_json=as_json)


def _options(words: Sequence[str]) -> dict[str, JSON]:
    """Read ``key=value`` words, each value as YAML."""
    import yaml

    options: dict[str, JSON] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not key or not equals:
            raise UsageError(f"--option {word}: must read key=value, such as size=6")
        try:
            options[key] = yaml.safe_load(value)
        except yaml.YAMLError:
            raise UsageError(f"--option {word}: {value!r} is not YAML") from None
    return options


def _print(found: Evaluation, *, as_json: bool) -> None:
    if as_json:
        import orjson

        typer.echo(orjson.dumps(found.as_json()))
        return
    typer.echo(f"{found.policy} on {found.env_id}: {found.episodes} episodes in {found.seconds:.1f} s")
    if found.void:
        typer.echo(f"{found.void} more were lost and do not count: {found.error}")
    rows = [("", "mean", "95 % interval"), *(_row(name, estimate) for name, estimate in found.metrics.items())]
    width = max(len(name) for name, _, _ in rows)
    for name, mean, interval in rows:
        typer.echo(f"  {name:<{width}}  {mean:>8}  {interval:>16}")


def _row(name: str, estimate: Estimate) -> tuple[str, str, str]:
    mean, low, high = (f"{value:.1%}" if name in _SHARES else f"{value:.2f}" for value in estimate)
    return _NAMES.get(name, name.replace("_", " ")), mean, f"{low} – {high}"
