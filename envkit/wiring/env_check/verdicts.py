"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

Outcome: TypeAlias = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class Verdict:
    """The result of one check.

    Attributes:
        check: What the environment has to do.
        outcome: ``"skip"`` where the check does not apply.
        seen: What was measured; for a failure, what is wrong and what to change.
    """

    check: str
    outcome: Outcome
    seen: str


class FailedCheckError(Exception):
    """The environment breaks the contract; the message says how, and what to change."""


class SkippedCheckError(Exception):
    """The check does not apply; the message says why."""
