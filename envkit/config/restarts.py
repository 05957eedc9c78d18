"""Heartbeats and restarts of sandboxes, in the training file."""

from __future__ import annotations

from envkit.config.grammar import Count, Seconds, Section


class HealthSection(Section):
    """When a sandbox that does not answer is declared lost."""

    interval_s: Seconds = 5.0
    """Seconds between two probes."""
    timeout_s: Seconds = 2.0
    """Seconds to wait for an answer to the last of `misses` probes before the sandbox is declared lost."""
    misses: Count = 3
    """Number of consecutive probes without an answer after which the sandbox is declared lost."""


class RestartSection(Section):
    """Limit on the restarts of lost sandboxes."""

    budget: Count = 5
    """Maximum number of restarts within one window. If a further sandbox is lost in the window, the run ends."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""
