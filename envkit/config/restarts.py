"""Heartbeats and restarts of sandboxes, in the training file."""

from __future__ import annotations

from envkit.config.grammar import Count, Seconds, Section


class HealthSection(Section):
    """When a sandbox is declared lost."""

    interval_s: Seconds = 5.0
    """Seconds between two probes."""
    timeout_s: Seconds = 2.0
    """Seconds to wait for an answer to the last of the missed probes."""
    misses: Count = 3
    """Consecutive failed probes after which the sandbox is lost."""


class RestartSection(Section):
    """Restart budget of lost sandboxes."""

    budget: Count = 5
    """Restarts within one window; one more ends the run."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""
