"""How the files of a sandbox are added up, of which some are deleted meanwhile; the disk is scripted."""

from __future__ import annotations

from envkit import clock
from envkit.sandbox.docker.disk_quota import Deleted, counted_once

A, B, C = (50, 1), (50, 2), (50, 3)


def counted(*looks: tuple[int, Deleted], bound: int) -> tuple[int, int]:
    """Return what is counted, and in how many looks, where each finds so much with a name and these without."""
    left = list(looks)

    async def named() -> int:
        return left[0][0]

    async def deleted() -> Deleted:
        return left.pop(0)[1]

    async def main() -> int:
        return await counted_once(named, deleted, bound)

    return clock.run(main, virtual=True), len(looks) - len(left)


def test_a_file_deleted_between_the_two_scans_is_counted_once() -> None:
    # 75 are written, of which the first look sees A by its name and then again without one.
    assert counted((50, {A: 25, B: 25}), (25, {A: 25, B: 25}), bound=80) == (75, 2)
    assert counted((50, {A: 25, B: 25}), (25, {A: 25, B: 25}), bound=60) == (75, 2)


def test_one_scan_is_enough_if_double_counting_decides_nothing() -> None:
    assert counted((50, {A: 25}), bound=80) == (75, 1)
    assert counted((90, {A: 25}), bound=80) == (90, 1)


def test_files_that_were_deleted_before_count_beside_those_with_a_name() -> None:
    assert counted((0, {A: 25, B: 25, C: 25}), (0, {A: 25, B: 25, C: 25}), bound=60) == (75, 2)


def test_deleting_a_file_during_each_scan_does_not_hide_the_use() -> None:
    looks = [(0, {(50, number): 75}) for number in range(4)]
    assert counted(*looks, bound=60) == (75, 4)
