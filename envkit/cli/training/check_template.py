"""``envkit check-template``: whether a model's chat template can be trained with, turn by turn."""

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
    """Check the chat template of a model. Exits with 1 if a dialogue differs.

    Renders dialogues turn by turn, as a rollout does, and whole, as the template does. Each line says: same; new
    sample, where the template rewrites earlier turns; answers kept, where only what was sampled differs from what the
    template would write; refused, where it takes no system prompt; or differs, with the first token.
    """
    from envkit.wiring.training.template_check import check_template

    report = check_template(model)
    stops = ", ".join(f"{token} {text!r}" for token, text in report.stop)
    typer.echo(f"stop tokens: {stops or 'none; completions end at rollout.turn_tokens'}")
    print_table(("DIALOGUE", "VERDICT", "SEEN"), [(one.name, one.outcome, one.seen) for one in report.verdicts])
    if any(one.outcome == "differs" for one in report.verdicts):
        raise typer.Exit(FAILED)
