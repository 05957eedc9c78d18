"""Hours of sandboxes that fail at random, on virtual time; `benchmarks/evidence/fleet_day.py` simulates days."""

from __future__ import annotations

from envkit.types import CauseKind
from tests.sim.fleet_day import SANDBOXES_PER_NODE, live, problems


def test_each_sandbox_and_lease_ends_once_and_the_counts_are_reproducible() -> None:
    first, second = live(3, 100), live(3, 100)

    assert problems(first, 100) == []
    assert set(first.losses) == {
        CauseKind.KILLED,
        CauseKind.OUT_OF_MEMORY,
        CauseKind.EXITED,
        CauseKind.UNRESPONSIVE,
        CauseKind.NODE_LOST,
    }
    assert 0 < first.losses[CauseKind.NODE_LOST] <= SANDBOXES_PER_NODE
    assert first == second
