"""Token buckets with scripted times."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from envkit.http.auth.rate_limit import Bucket, Rate


def test_a_burst_passes_and_the_next_call_waits_for_its_share_of_a_second() -> None:
    bucket = Bucket(Rate(per_s=10, burst=3), now=0.0)
    assert [bucket.take(0.0) for _ in range(4)] == [0.0, 0.0, 0.0, pytest.approx(0.1)]
    assert bucket.take(0.04) == pytest.approx(0.06)
    assert bucket.take(0.1) == 0.0
    assert [bucket.take(1000.0) > 0 for _ in range(4)] == [False, False, False, True]  # no more than a burst


def test_a_full_bucket_lets_more_than_a_burst_pass_and_goes_into_debt() -> None:
    bucket = Bucket(Rate(per_s=10, burst=5), now=0.0)
    assert bucket.take(0.0, 25) == 0.0
    assert bucket.take(0.0) == pytest.approx(2.1)
    assert bucket.take(2.0, 100) == pytest.approx(0.5)


def test_charging_received_calls_returns_how_long_to_stop_reading() -> None:
    bucket = Bucket(Rate(per_s=10, burst=5), now=0.0)
    assert [bucket.charge(0.0, 5), bucket.charge(0.0, 2), bucket.charge(0.1, 0)] == [0.0, 0.2, pytest.approx(0.1)]


@given(
    st.floats(0.1, 1e4),
    st.floats(0.5, 1e4),
    st.lists(st.tuples(st.floats(0, 10), st.integers(1, 100)), min_size=1, max_size=50),
)
def test_a_caller_that_waits_the_returned_time_passes_and_the_average_holds(
    per_s: float, burst: float, calls: list[tuple[float, int]]
) -> None:
    bucket = Bucket(Rate(per_s, burst), now=0.0)
    now, passed = 0.0, 0
    for pause_s, n in calls:
        now += pause_s
        wait_s = bucket.take(now, n)
        if wait_s:
            now += wait_s
            assert bucket.take(now, n) == pytest.approx(0.0, abs=1e-6)
        passed += n
    assert passed <= per_s * now + burst + max(n for _, n in calls) + 1e-3
