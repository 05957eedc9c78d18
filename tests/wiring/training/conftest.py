"""Training runs without plots."""

from __future__ import annotations

import pytest

from envkit.trainer_bridge.run_folder import plots


@pytest.fixture
def no_plots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draw no plots, which takes longer than a short run."""
    monkeypatch.setattr(plots, "draw", lambda *_: None)
