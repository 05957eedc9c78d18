"""Causes of lost sandboxes for tests."""

from __future__ import annotations

from envkit.types import Cause, CauseKind


def cause(detail: str, kind: CauseKind = CauseKind.KILLED, *, by_agent: bool = False) -> Cause:
    """Return a cause with this line."""
    return Cause(kind, detail, by_agent)
