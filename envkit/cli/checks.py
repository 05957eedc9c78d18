"""Commands that check a training file, an environment or a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.environments.options import EnvId, EnvOptions, read_options
from envkit.cli.exits import FAILED
from envkit.cli.tables import echo, print_table
from envkit.errors import ConfigError

if TYPE_CHECKING:
    from envkit.checks.template import TemplateReport
    from envkit.config import RunConfig


File = Annotated[Path, typer.Argument(metavar="FILE", help="A training file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Override one key of the file, such as trainer.steps=10; repeatable."
    ),
]


def load(file: Path, overrides: Sequence[str]) -> RunConfig:
    """Read a training file. If it is invalid, the error also names wrong options of its environments."""
    from envkit import config

    try:
        return config.load(file, overrides)
    except ConfigError as error:
        from envkit.wiring.training.checks import env_problems

        raise ConfigError(dict.fromkeys([*error.problems, *env_problems(file, overrides)])) from None


def check(file: File, overrides: Overrides = None) -> None:
    """Check a training file without running it.

    Prints "ok", or one line per problem, starting with its key. Asks the server of env.url, but uses no other network:
    if the model is not on this machine, the check cannot find out whether it exists on the Hugging Face hub.
    """
    from envkit import clock
    from envkit.wiring.training import checks, remote

    run = load(file, overrides or ())
    problems = [*checks.check(run), *clock.run(checks.check_docker, run), *clock.run(remote.check_server, run)]
    if problems:
        raise ConfigError(problems)
    for line in checks.unverified(run):
        echo(line, err=True)
    echo("ok")


def check_env(
    env_id: EnvId,
    option: EnvOptions = None,
    episodes: Annotated[int, typer.Option(min=2, metavar="COUNT", help="Number of seeds that most checks play.")] = 5,
) -> None:
    """Check your own environment for mistakes.

    Prints one line per check: what was observed, or what is wrong and how to fix it. Exits with 1 if a check fails.
    """
    from rich.console import Console

    from envkit.checks import check_env

    with Console(stderr=True).status(f"checking {env_id}") as status:
        verdicts = check_env(
            env_id,
            options=read_options(option or ()),
            episodes=episodes,
            on_check=lambda name: status.update(f"checking {env_id}: {name}"),
        )
    print_table(("CHECK", "VERDICT", "SEEN"), [(one.check, one.outcome, one.seen) for one in verdicts])
    if any(one.outcome == "fail" for one in verdicts):
        raise typer.Exit(FAILED)


def check_template(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model, named as in engine.model.")],
) -> None:
    """Check a model's chat template for training.

    Renders dialogues turn by turn, as training does, and compares the tokens with the template's for the whole chat.
    "same", "new sample" (the template rewrites earlier turns, so training splits the episode) and "answers kept"
    (training keeps the sampled answers, which the template would change) are fine. "refused": the template accepts no
    system prompt. "differs": training would use wrong tokens, or does not read the model's tool calls, or the template
    leaves out the text of a message; the command exits with 1.
    """
    from envkit.checks.template import check_template

    report = check_template(model)
    stops = ", ".join(f"{token} {text!r}" for token, text in report.stop)
    echo(f"stop tokens: {stops or 'none; only the limit rollout.turn_tokens ends a completion'}")
    echo(f"tools: {_tools(report)}")
    print_table(("DIALOGUE", "VERDICT", "SEEN"), [(one.name, one.outcome, one.seen) for one in report.verdicts])
    if any(one.outcome == "differs" for one in report.verdicts):
        raise typer.Exit(FAILED)


def _tools(report: TemplateReport) -> str:
    """Return what the template supports of tools."""
    support = report.tools
    if support is None:
        return "not possible; the template shows neither tools nor a system prompt that describes them"
    tools = (
        "shown by the template" if support.shows_tools else "ignored by the template, described in the system prompt"
    )
    calls = "in the template's markup" if support.writes_calls else "in <tool_call> tags"
    results = "user messages" if support.results == "user" else "messages with the role tool"
    return f"{tools}; calls: {calls}; results: {results}"
