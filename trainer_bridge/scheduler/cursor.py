"""The places of groups in a run: the cursor numbers them, and deals them to the environments of a mixture.

A `Schedule` has those that a run trained on, so that another run can repeat them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from math import floor
from typing import TypeAlias

from envkit.errors import UsageError
from envkit.types import JSON


@dataclass(frozen=True, slots=True)
class Place:
    """The place of a group in a run.

    Attributes:
        number: Number of the group in the run, from 0, which its sampling seeds depend on.
        env: Index of its environment.
        index: Number of its task among those of its environment, from 0. With one environment, this is `number`.
        round: How often the group was given back before.
    """

    number: int
    env: int
    index: int
    round: int = 0


Schedule: TypeAlias = Mapping[int, Mapping[Place, tuple[int, ...]]]
"""The groups of each train step, by its number: their places, and the indices of the members that were trained on."""


class Cursor:
    """Numbers the groups of a run, and deals them to its environments.

    The share of each environment in the whole run is that of its weight, rounded by largest remainder. Within the run,
    the environment that is furthest behind its share comes next, so every train step has its share, too.

    Args:
        weights: Weight of each environment.
        groups: Number of groups in the whole run.
    """

    def __init__(self, weights: Sequence[float], groups: int) -> None:
        self._shares = shares(weights, max(groups, 1))
        self._planned: list[tuple[int, ...]] = [(0,) * len(weights)]
        self._number = 0
        self._dealt = [0] * len(weights)
        self._returned: list[Place] = []

    def planned(self, groups: int) -> tuple[int, ...]:
        """Return how many of the first `groups` numbers go to each environment."""
        while len(self._planned) <= groups:
            before, number = self._planned[-1], len(self._planned)
            total = sum(self._shares)
            behind = [share * number / total - count for share, count in zip(self._shares, before, strict=True)]
            chosen = behind.index(max(behind))
            self._planned.append(tuple(count + (env == chosen) for env, count in enumerate(before)))
        return self._planned[groups]

    def next(self, room: Sequence[int]) -> Place | None:
        """Return the next group of an environment that has room, returned ones first; None if none has room."""
        for place in self._returned:
            if room[place.env] > 0:
                self._returned.remove(place)
                return place
        behind = {
            env: (self._dealt[env] + 1) / max(self._shares[env], 1e-9) for env, left in enumerate(room) if left > 0
        }
        if not behind:
            return None
        env = min(behind, key=behind.__getitem__)
        place = Place(self._number, env, self._dealt[env])
        self._number += 1
        self._dealt[env] += 1
        return place

    def skip(self, groups: int) -> None:
        """Begin after the first `groups` groups."""
        self._number, self._dealt = groups, [*self.planned(groups)]

    def give_back(self, places: Iterable[Place]) -> None:
        """Play these groups again, before new ones."""
        again = [replace(place, round=place.round + 1) for place in places]
        self._returned = sorted([*self._returned, *again], key=lambda place: place.number)

    def state(self, open_places: Iterable[Place]) -> dict[str, JSON]:
        """Return the state for a checkpoint. `open_places` are those that were dealt, but not trained on."""
        again = sorted({*self._returned, *open_places}, key=lambda place: place.number)
        return {
            "number": self._number,
            "dealt": [*self._dealt],
            "again": [[place.number, place.env, place.index, place.round] for place in again],
        }

    def restore(self, state: Mapping[str, JSON]) -> None:
        """Continue from the state of a checkpoint.

        Raises:
            UsageError: The run has another number of environments than that of the checkpoint.
        """
        number, dealt, again = state["number"], state["dealt"], state["again"]
        assert isinstance(number, int), "state() wrote it"
        assert isinstance(dealt, list), "state() wrote it"
        assert isinstance(again, list), "state() wrote it"
        if len(dealt) != len(self._dealt):
            raise UsageError(
                f"the checkpoint is that of a run on {len(dealt)} environments, and env has {len(self._dealt)}; "
                "continue with the same environments, or start a new run"
            )
        self._number = number
        self._dealt = [int(str(count)) for count in dealt]
        self._returned = []
        self.give_back(Place(*place) for place in again if isinstance(place, list))  # type: ignore[arg-type]


def shares(weights: Sequence[float], total: int) -> list[int]:
    """Divide `total` by weights with the largest remainder method: whole numbers whose sum is `total`."""
    exact = [total * weight / sum(weights) for weight in weights]
    whole = [floor(one) for one in exact]
    by_remainder = sorted(range(len(weights)), key=lambda env: (whole[env] - exact[env], env))
    for env in by_remainder[: total - sum(whole)]:
        whole[env] += 1
    return whole


def read_schedule(rows: Sequence[Mapping[str, JSON]]) -> Schedule:
    """Return the schedule in the rows of ``schedule.jsonl``, without groups that have no members.

    Raises:
        UsageError: A row is damaged.
    """
    found: dict[int, Mapping[Place, tuple[int, ...]]] = {}
    for row in rows:
        try:
            groups: list[tuple[int, int, int, list[int]]] = row["groups"]  # type: ignore[assignment]
            step: int = row["step"]  # type: ignore[assignment]
            found[step] = {Place(*place): tuple(members) for *place, members in groups if members}
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"the schedule has a damaged row: {row}") from error
    return found
