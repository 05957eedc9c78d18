"""What a fleet counts, in Prometheus's words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from envkit.fleet import FleetHost
from envkit.sandbox.pool import Pool

if TYPE_CHECKING:
    from prometheus_client.core import Metric


def collect(pool: Pool, hosts: Sequence[FleetHost]) -> Iterator[Metric]:
    """Yield the metrics of a pool and of the hosts whose boxes are in it."""
    from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

    counts = pool.counts()
    states = GaugeMetricFamily("envkit_sandboxes", "Sandboxes that exist, by state.", labels=["state"])
    for state, count in sorted(counts.states.items()):
        states.add_metric([state.value], count)
    yield states
    waiting = GaugeMetricFamily("envkit_sandboxes_waiting", "Who waits for a sandbox, by tenant.", labels=["tenant"])
    for tenant, count in sorted(counts.waiting.items()):
        waiting.add_metric([tenant], count)
    yield waiting
    yield GaugeMetricFamily("envkit_sandboxes_warm", "Sandboxes that are ready and not lent.", counts.spares)
    yield GaugeMetricFamily("envkit_sandboxes_wanted", "How many more are wanted; negative: fewer.", pool.wanted())
    slowest = max(counts.probe_s.values(), default=0.0)
    yield GaugeMetricFamily("envkit_probe_seconds_max", "The slowest of each sandbox's last probe.", slowest)
    yield CounterMetricFamily("envkit_sandbox_starts", "Starts that were begun.", counts.starts)
    yield CounterMetricFamily(
        "envkit_sandbox_failed_starts", "Starts that failed, but not by what was asked for.", counts.failed_starts
    )
    yield CounterMetricFamily("envkit_warm_sandboxes_replaced", "Spares that were replaced.", counts.restarts)
    yield CounterMetricFamily("envkit_sandboxes_finished", "Sandboxes that ended with their command.", counts.finished)
    losses = CounterMetricFamily("envkit_sandboxes_lost", "Sandboxes that were lost, by cause.", labels=["cause"])
    for cause, count in sorted(counts.losses.items()):
        losses.add_metric([cause.value], count)
    yield losses
    alerts = CounterMetricFamily("envkit_alerts", "Alerts, by kind.", labels=["kind"])
    for kind, count in sorted(counts.alerts.items()):
        alerts.add_metric([kind], count)
    yield alerts
    counted = [(host.lost, host.failed_starts, host.episodes.rebuilt, host.episodes.void) for host in hosts]
    lost, failed, rebuilt, void = (sum(each) for each in zip(*counted, strict=True))
    yield CounterMetricFamily("envkit_env_sandboxes_lost", "Boxes that served environments and were lost.", lost)
    yield CounterMetricFamily(
        "envkit_env_sandbox_failed_starts", "Boxes that were gone before they served environments.", failed
    )
    yield CounterMetricFamily("envkit_episodes_rebuilt", "Times that an episode was rebuilt in another box.", rebuilt)
    yield CounterMetricFamily("envkit_episodes_void", "Episodes that were lost with their box.", void)
    waits = sum(host.waiting for host in hosts)
    yield GaugeMetricFamily("envkit_env_sandboxes_waiting", "Boxes that are missing until they may be replaced.", waits)


def of_log(dropped: int) -> Iterator[Metric]:
    """Yield the metric of an access log."""
    from prometheus_client.core import CounterMetricFamily

    yield CounterMetricFamily("envkit_access_log_dropped", "Lines of the access log that were not written.", dropped)
