"""When a sandbox counts as lost and how often lost ones are replaced, in the file of a run."""

from __future__ import annotations

from envkit.config.grammar import Count, Seconds, Section


class HealthSection(Section):
    """When a sandbox counts as lost."""

    interval_s: Seconds = 5.0
    """Seconds between two probes."""
    timeout_s: Seconds = 2.0
    """Seconds that the last of them may take."""
    misses: Count = 3
    """Probes in a row without an answer until the sandbox is lost."""


class RestartSection(Section):
    """How often a lost sandbox is replaced."""

    budget: Count = 5
    """Replacements within one window, after which the run gives up."""
    window_s: Seconds = 600.0
    """Length of the window in seconds."""
