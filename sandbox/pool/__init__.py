"""Sandbox pool: schedules sandboxes on nodes, leases them, and monitors their liveness."""

from .pool import Pool

__all__ = ["Pool"]
