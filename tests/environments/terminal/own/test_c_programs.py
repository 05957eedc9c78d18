"""Own tasks about C programs pay for fixed programs only, and not for those that look fixed to their checks."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.terminal.options import OWN_TASKS
from tests.environments.terminal.test_env import SUBMIT, bash, played

NAMES = ("memory-errors", "deadlock-and-race")

pytestmark = [pytest.mark.bwrap, pytest.mark.slow, pytest.mark.valgrind]


def play(name: str, script: Path) -> tuple[float | None, str]:
    """Run a script in a task; return the grade and what the tests printed."""
    logs: list[str] = []
    action = bash(f"bash -s <<'END-OF-SCRIPT'\n{script.read_text()}\nEND-OF-SCRIPT")
    _, reward = played(OWN_TASKS / name, action, SUBMIT, logs=logs)
    return reward, logs[0]


@pytest.mark.parametrize("name", NAMES)
def test_the_fixed_program_earns_1(name: str) -> None:
    assert play(name, OWN_TASKS / name / "solution/solve.sh")[0] == 1.0


CHEATS = {
    "memory-errors/cheats/another-program.sh": "calls execlp",
    "memory-errors/cheats/suppresses-leaks.sh": "exit code 9",
    "memory-errors/cheats/inline-assembly.sh": "has inline assembly",
    "deadlock-and-race/cheats/idle-thread.sh": "ran at the same time",
    "deadlock-and-race/cheats/no-locks.sh": "not solved",
}


@pytest.mark.parametrize(("cheat", "reason"), CHEATS.items(), ids=[Path(cheat).stem for cheat in CHEATS])
def test_a_cheat_earns_0_for_its_own_reason(cheat: str, reason: str) -> None:
    reward, log = play(cheat.partition("/")[0], OWN_TASKS / cheat)
    assert reward == 0.0
    assert reason in log
