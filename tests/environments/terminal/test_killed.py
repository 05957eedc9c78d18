"""Sandboxes of terminal episodes are killed: the episodes are void, or finish, and none is lost."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.e2e.terminal_campaign import terminals_accounted_for


@pytest.mark.bwrap
@pytest.mark.skipif(os.geteuid() != 0, reason="only root's sandboxes are found by their first process")
def test_of_sixteen_terminal_episodes_at_once_each_ends_once_when_sandboxes_are_killed(tmp_path: Path) -> None:
    figures = terminals_accounted_for("local", tmp_path, 16, 0.2)

    assert figures["finished"] + figures["void"] == 16
    assert figures["void"] > 0
