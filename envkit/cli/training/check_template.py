"""``envkit check-template``: check that a model's chat template can be rendered turn by turn, as in training."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from envkit.cli.exits import FAILED
from envkit.cli.tables import echo, print_table

if TYPE_CHECKING:
    from envkit.checks.template import TemplateReport


def check_template(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, or the name of a model on this machine.")
    ],
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
