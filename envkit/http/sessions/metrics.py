"""Prometheus metrics of a server's sessions. They are computed each time that Prometheus requests them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, TypeAlias

from envkit.http.sessions.counters import BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client.core import Metric

    from envkit.http.sessions.table import SessionTable

Collect: TypeAlias = "Callable[[], Iterable[Metric]]"
"""A function that returns metrics; called each time that Prometheus requests them."""


def exposition(table: SessionTable, more: Collect | None = None) -> bytes:
    """Return the metrics of the sessions in `table`, and the metrics that `more` returns, in Prometheus text format."""
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

        table, counters = self._table, self._table.counters
        live = GaugeMetricFamily("envkit_sessions", "Live sessions, by state.", labels=["state"])
        for state, count in sorted(Counter(view.state.value for view in table.views()).items()):
            live.add_metric([state], count)
        yield live
        yield GaugeMetricFamily("envkit_slots", "Slots: episodes that can run at the same time.", table.capacity)
        yield GaugeMetricFamily("envkit_slots_leased", "Slots in use.", table.leased)
        yield CounterMetricFamily("envkit_sessions_created", "Sessions created.", counters.sessions)
        yield CounterMetricFamily("envkit_steps", "Steps played.", sum(counters.buckets))
        total = 0
        buckets = []
        for bound, count in zip([*map(str, BOUNDS_S), "+Inf"], counters.buckets, strict=True):
            total += count
            buckets.append((bound, total))
        yield HistogramMetricFamily("envkit_step_seconds", "Duration of a step.", buckets, counters.step_seconds)
        errors = CounterMetricFamily("envkit_errors", "Error responses, by code.", labels=["code"])
        for code, count in sorted(counters.errors.items()):
            errors.add_metric([code], count)
        yield errors
        if self._more is not None:
            yield from self._more()
