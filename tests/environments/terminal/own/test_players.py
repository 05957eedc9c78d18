"""An own task in real sandboxes: the oracle earns 1, and the nop and all cheats earn 0."""

from __future__ import annotations

import pytest

from envkit.checks.tasks import check_tasks
from envkit.environments.terminal.options import OWN_TASKS
from envkit.wiring.environments import find


@pytest.mark.slow
@pytest.mark.bwrap
def test_the_oracle_earns_1_and_every_cheat_0() -> None:
    """In containers, some cheats play in ``tests/environments/tasks``, and all in ``benchmarks/evidence``."""
    options = {"tasks": str(OWN_TASKS / "lost-commit")}
    results, missing = check_tasks("Terminal-v0", tasks=1, repeat=1, options=options, backend="local")
    assert [line for one in results for line in one.problems()] == []
    players = {*find("Terminal-v0").players, "nop"}
    assert {one.player: one.successes for one in results} == {player: int(player == "oracle") for player in players}
    assert missing == []
