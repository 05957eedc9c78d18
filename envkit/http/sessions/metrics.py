"""What a server has counted, as Prometheus metrics, when somebody asks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from envkit.http.sessions.counters import BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from envkit.http.sessions.table import SessionTable

Collect: TypeAlias = "Callable[[], Iterable[Metric]]"
"""Gives metrics when somebody asks."""


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
        yield GaugeMetricFamily("envkit_slots", "Episodes that can be played at once.", table.capacity)
        yield GaugeMetricFamily("envkit_slots_leased", "Places that are taken.", table.leased)
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
