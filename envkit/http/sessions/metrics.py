"""Prometheus metrics of a server's sessions. They are computed each time that Prometheus requests them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from envkit.http.sessions.stepper import BOUNDS_S

if TYPE_CHECKING:
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

    from envkit.http.sessions.table import SessionTable

Collect: TypeAlias = "Callable[[], Iterable[Metric]]"
"""A function that returns metrics; called each time that Prometheus requests them."""


def exposition(table: SessionTable, more: Collect | None = None) -> bytes:
    """Return the metrics of the sessions in `table`, and the metrics that `more` returns, in Prometheus text format."""
    from prometheus_client import CollectorRegistry, generate_latest

    registry = CollectorRegistry()
    registry.register(_Collector(table, more))
    return generate_latest(registry)


def by_label(metric: CounterMetricFamily | GaugeMetricFamily, numbers: Mapping[Any, int]) -> Metric:
    """Add one number for each value of the metric's only label."""
    for value, number in sorted(numbers.items()):
        metric.add_metric([str(value)], number)
    return metric


class _Collector:
    def __init__(self, table: SessionTable, more: Collect | None) -> None:
        self._table = table
        self._more = more

    def collect(self) -> Iterator[Metric]:
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily

        table, counters = self._table, self._table.counters
        live = Counter(session.state for session in table.all())
        yield by_label(GaugeMetricFamily("envkit_sessions", "Live sessions, by state.", labels=["state"]), live)
        yield GaugeMetricFamily("envkit_slots", "Slots: episodes that can run at the same time.", table.host.capacity)
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
        yield by_label(errors, counters.errors)
        if self._more is not None:
            yield from self._more()
