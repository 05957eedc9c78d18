"""Prometheus metrics of a fleet."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from envkit.fleet import FleetHost
from envkit.http.sessions.metrics import by_label
from envkit.sandbox.pool import Pool
from envkit.types import CauseKind

if TYPE_CHECKING:
    from prometheus_client.core import Metric


_ALERTS = ("disk", "ledger", "memory", "probe", "restarts", "stock", "stop")


def collect(pool: Pool, hosts: Sequence[FleetHost]) -> Iterator[Metric]:
    """Yield the metrics of a pool and of the hosts that play in its sandboxes."""
    from prometheus_client.core import CounterMetricFamily as Counter
    from prometheus_client.core import GaugeMetricFamily as Gauge

    counts = pool.counts()
    # Prometheus computes no rate from the first value of a series, so each one begins before the first loss or alert.
    losses = {kind: counts.losses.get(kind, 0) for kind in CauseKind}
    alerts = {**dict.fromkeys(_ALERTS, 0), **counts.alerts}
    slowest = max(counts.probe_s.values(), default=0.0)
    counted = [(host.lost, host.failed_starts, host.episodes.rebuilt, host.episodes.void) for host in hosts]
    lost, failed, rebuilt, void = (sum(each) for each in zip(*counted, strict=True))
    waits = sum(host.waiting for host in hosts)
    yield by_label(Gauge("envkit_sandboxes", "Existing sandboxes, by state.", labels=["state"]), counts.states)
    queued = Gauge("envkit_sandboxes_waiting", "Queued sandbox requests, by tenant.", labels=["tenant"])
    yield by_label(queued, counts.waiting)
    yield Gauge("envkit_sandboxes_warm", "Warm sandboxes: ready and not leased.", counts.warm)
    yield Gauge("envkit_sandboxes_wanted", "Sandboxes to add; below 0: to remove.", pool.wanted())
    yield Gauge("envkit_probe_seconds_max", "Slowest of the latest probes, one per sandbox.", slowest)
    yield Counter("envkit_sandbox_starts", "Sandbox starts.", counts.starts)
    yield Counter("envkit_sandbox_failed_starts", "Failed starts, except for invalid requests.", counts.failed_starts)
    yield Counter("envkit_warm_sandboxes_replaced", "Warm sandboxes that were replaced.", counts.restarts)
    yield Counter("envkit_sandboxes_finished", "Sandboxes whose command exited.", counts.finished)
    yield by_label(Counter("envkit_sandboxes_lost", "Lost sandboxes, by cause.", labels=["cause"]), losses)
    yield by_label(Counter("envkit_alerts", "Alerts, by kind.", labels=["kind"]), alerts)
    yield Counter("envkit_env_sandboxes_lost", "Lost sandboxes that served environments.", lost)
    yield Counter("envkit_env_sandbox_failed_starts", "Sandboxes lost before they served environments.", failed)
    yield Counter("envkit_episodes_rebuilt", "Episodes rebuilt in another sandbox.", rebuilt)
    yield Counter("envkit_episodes_void", "Episodes lost with their sandbox.", void)
    yield Gauge("envkit_env_sandboxes_waiting", "Environment sandboxes waiting for a restart.", waits)
