"""Policy lag: which groups can still be used in time, and which tokens are too old."""

from __future__ import annotations

from dataclasses import replace

import pytest

from envkit.trainer_bridge.scheduler.staleness import can_wait, lags, with_stale_ignored
from envkit.types import ints
from tests.trainer_bridge.models import sample


@pytest.mark.parametrize(
    ("oldest", "max_lag", "sizes", "can"),
    [
        ([], 1, [2], True),
        ([7, 7], 1, [2], True),
        ([7, 7, 7], 1, [2], False),  # one of three would be used two versions after its own
        ([6], 1, [2], False),  # only the batch that is taken now would be in time
        ([7] * 4, 2, [2, 2], True),
        ([7] * 5, 2, [2, 2], False),  # none is at the limit yet
        ([6, 6, 6, 7], 2, [2, 2], False),  # three for the next batch, though four fit into two
        ([6, 6, 7, 7], 2, [2, 2], True),
        ([6, 7, 7, 7], 2, [1, 2], False),
    ],
)
def test_groups_can_wait_if_the_next_batches_take_them_in_time(
    oldest: list[int], max_lag: int, sizes: list[int], can: bool
) -> None:
    assert can_wait(oldest, 7, max_lag, sizes) is can


def test_tokens_beyond_the_bound_are_ignored_and_the_others_have_a_lag() -> None:
    one = sample([1, 5], ([6, 7, 8], [9, 9]), ([4], []))
    versions = one.versions.copy()
    versions[one.mask] = [3, 4, 5, 6]
    (found,) = with_stale_ignored([replace(one, versions=ints(versions))], 6, 2)
    assert found.mask.tolist() == one.mask.tolist()
    assert found.ignored[found.mask].tolist() == [True, False, False, False]
    assert lags([found], 6).tolist() == [2, 1, 0]
