"""``envkit check-template``: check that a model's chat template can be rendered turn by turn, as in training."""

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

    Renders dialogues turn by turn, as training does, and compares the tokens with the template's for the whole chat.
    "same", "new sample" (the template rewrites earlier turns, so training splits the episode) and "answers kept"
    (training keeps the sampled answers, which the template would change) are fine. "refused": the template accepts no
    system prompt. "differs": training would use wrong tokens; the command exits with 1.
    """
    from envkit.wiring.training.template_check import check_template

    report = check_template(model)
    stops = ", ".join(f"{token} {text!r}" for token, text in report.stop)
    typer.echo(f"stop tokens: {stops or 'none; only the limit rollout.turn_tokens ends a completion'}")
    print_table(("DIALOGUE", "VERDICT", "SEEN"), [(one.name, one.outcome, one.seen) for one in report.verdicts])
    if any(one.outcome == "differs" for one in report.verdicts):
        raise typer.Exit(FAILED)
