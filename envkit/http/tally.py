"""What a server counts, cheaply while it runs, and as Prometheus metrics when somebody asks."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from envkit.http.sessions import SessionTable

Collect: TypeAlias = "Callable[[], Iterable[Metric]]"
"""Gives metrics when somebody asks."""

BOUNDS_S = (1e-4, 2.5e-4, 5e-4, 1e-3, 2.5e-3, 5e-3, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 300)
"""Upper bounds of the buckets of step durations, in seconds."""
_SHORTEST_S = BOUNDS_S[0]


class Tally:
    """Plain numbers, since a step may take less time than a metrics library.

    Attributes:
        sessions: Sessions made.
        step_seconds: Seconds that all steps took together, whatever came of them.
        buckets: Number of steps up to each of `BOUNDS_S`, and beyond the last.
        errors: Errors that were answered, by code.
    """

    def __init__(self) -> None:
        self.sessions = 0
        self.step_seconds = 0.0
        self.buckets = [0] * (len(BOUNDS_S) + 1)
        self.errors: Counter[str] = Counter()

    def step(self, seconds: float) -> None:
        self.step_seconds += seconds
        self.buckets[0 if seconds <= _SHORTEST_S else bisect_left(BOUNDS_S, seconds)] += 1


def exposition(table: SessionTable, more: Collect | None = None) -> bytes:
    """Return the metrics of `table`, and those that `more` gives, in Prometheus's text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(table, more))
    return generate_latest(registry)


class _Collector:
    def __init__(self, table: SessionTable, more: Collect | None) -> None:
        self._table = table
        self._more = more

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        table, tally = self._table, self._table.tally
        live = GaugeMetricFamily("envkit_sessions", "Sessions that exist, by state.", labels=["state"])
        for state, count in sorted(Counter(view.state.value for view in table.views()).items()):
            live.add_metric([state], count)
        yield live
        yield GaugeMetricFamily("envkit_places", "Episodes that can be played at once.", table.capacity)
        yield GaugeMetricFamily("envkit_places_leased", "Places that are taken.", table.leased)
        yield CounterMetricFamily("envkit_sessions_created", "Sessions made.", tally.sessions)
        yield CounterMetricFamily("envkit_steps", "Steps played.", sum(tally.buckets))
        total = 0
        buckets = []
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], tally.buckets, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily("envkit_step_seconds", "Duration of a step.", buckets, tally.step_seconds)
        errors = CounterMetricFamily("envkit_errors", "Errors that were answered, by code.", labels=["code"])
        for code, count in sorted(tally.errors.items()):
            errors.add_metric([code], count)
        yield errors
        if self._more is not None:
            yield from self._more()
