"""The schedule of a run: which groups each train step trained on; and playing the groups of such a log again."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from envkit.errors import UsageError
from envkit.types import JSON, Group

from .requests import Place


@dataclass(frozen=True, slots=True)
class LoggedGroup:
    """A group that a train step trained on.

    Attributes:
        place: Its place in the run.
        members: Index of each valid episode; those that were aborted or void are not among them.
    """

    place: Place
    members: tuple[int, ...]


def row_of(groups: Sequence[tuple[Place, Group]]) -> dict[str, JSON]:
    """Return the row of a train step in ``schedule.jsonl``: number, environment, task and members of each group."""
    return {
        "groups": [
            [place.number, place.env, place.index, [one.member for one in group.trajectories if not one.is_void]]
            for place, group in groups
        ]
    }


def read_schedule(rows: Sequence[Mapping[str, JSON]]) -> dict[int, list[LoggedGroup]]:
    """Return the groups of each train step, by its number.

    Raises:
        UsageError: A row is damaged.
    """
    found: dict[int, list[LoggedGroup]] = {}
    for row in rows:
        try:
            groups: list[tuple[int, int, int, list[int]]] = row["groups"]  # type: ignore[assignment]
            step: int = row["step"]  # type: ignore[assignment]
            found[step] = [LoggedGroup(Place(*place), tuple(members)) for *place, members in groups]
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the schedule has a damaged row: {row}") from error
    return found
