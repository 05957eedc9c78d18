"""``envkit check-template``: check that training can render a model's chat template turn by turn."""

from __future__ import annotations

from typing import Annotated

import typer

from envkit.cli.exits import FAILED
from envkit.cli.tables import print_table


def check_template(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="A model folder, or the name of a model on this machine.")
    ],
) -> None:
    """Check a model's chat template for training.

    Renders dialogues turn by turn, as training does, and compares the tokens with the template's rendering of the
    whole chat. Verdicts: "same"; "new sample": the template rewrites earlier turns; "answers kept": only sampled
    answers differ; "refused": the template accepts no system prompt; "differs": training would use wrong tokens. Exits
    with 1 if a dialogue differs.
    """
    from envkit.wiring.training.template_check import check_template

    report = check_template(model)
    stops = ", ".join(f"{token} {text!r}" for token, text in report.stop)
    typer.echo(f"stop tokens: {stops or 'none; only the limit rollout.turn_tokens ends a completion'}")
    print_table(("DIALOGUE", "VERDICT", "SEEN"), [(one.name, one.outcome, one.seen) for one in report.verdicts])
    if any(one.outcome == "differs" for one in report.verdicts):
        raise typer.Exit(FAILED)
