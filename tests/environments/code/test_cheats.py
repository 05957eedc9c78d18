"""Programming tasks in real sandboxes: the oracle earns 1, the nop and all cheats earn 0."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.environments.code import CodeOptions
from envkit.environments.code.env import CodeTask, submission_of
from envkit.environments.code.grading import judge
from envkit.environments.code.tasks import Case, Problem, draw_problem
from envkit.environments.tasks import Cheat
from envkit.types import SandboxSpec
from envkit.wiring.environments import find
from envkit.wiring.sandboxes.backends import open_tool_pool
from envkit_cheats import code


def program_of(cheat: Cheat, problem: Problem) -> str:
    """Return the program that a cheat submits in the mode ``"answer"``."""
    task = CodeTask(problem, CodeOptions())
    plan = cheat.plan_for(task)
    return submission_of(task.answer(plan, []))[0]


@pytest.mark.slow
@pytest.mark.bwrap
@pytest.mark.parametrize("mode", ["answer", "tools"])
def test_the_oracle_earns_1_and_every_cheat_0(mode: str) -> None:
    """In containers, some cheats play in ``tests/environments/tasks``, and all in ``benchmarks/evidence``.

    A submission is judged in the same way in both modes, so each cheat plays where it can do what it is about.
    """
    options: Mapping[str, Any] = {"mode": mode, "level": 4, "timeout_s": 5.0}
    cheats = [
        f"cheat:{name}"
        for name, cheat in code.CHEATS.items()
        if (cheat.source if mode == "answer" else cheat.commands or cheat.files)
    ]
    players = ["oracle", "nop", *cheats]
    results, missing = check_tasks("Code-v0", tasks=1, players=players, repeat=1, options=options, backend="local")
    assert [line for one in results for line in one.problems()] == []
    assert {one.player: one.successes for one in results} == {name: int(name == "oracle") for name in players}
    assert missing == []


def test_each_cheat_is_a_player_and_plays_in_one_of_the_modes() -> None:
    assert {f"cheat:{name}" for name in code.CHEATS} | {"oracle"} == set(find("Code-v0").players)
    assert all(cheat.source or cheat.commands or cheat.files for cheat in code.CHEATS.values())


def graded(problem: Problem, source: str, **options: Any) -> float:
    async def main() -> float:
        async with open_tool_pool("local") as pool, pool.lease(SandboxSpec(untrusted=True)) as sandbox:
            return (await judge(sandbox, problem, CodeOptions(**options), source.encode())).reward

    return clock.run(main)


@pytest.mark.bwrap
def test_a_forged_report_earns_what_its_results_are_worth() -> None:
    example = Case((0,), 7)
    forged = program_of(code.fake_results, Problem("", "solve", [example], [], "", None))
    assert graded(Problem("", "solve", [example], [Case((n,), 7) for n in range(3)], "", None), forged) == 1.0
    assert graded(Problem("", "solve", [example], [Case((n,), 7 + n) for n in range(3)], "", None), forged) == 0.0


@pytest.mark.bwrap
def test_what_a_submission_prints_does_not_disturb_its_results() -> None:
    problem = draw_problem(0, 2, 2, None)
    noisy = f"import os\nprint('import')\nos.write(1, b'x')\n{problem.solution}\nplain = solve\n"
    noisy += "def solve(x):\n    print('call')\n    os.system('echo shell')\n    return plain(x)\n"
    assert graded(problem, noisy) == 1.0


@pytest.mark.bwrap
def test_a_method_sees_typing_and_a_tuple_is_not_a_list() -> None:
    problem = Problem("", "Solution.pair", (), [Case((n,), [n, n]) for n in range(3)], "", None)
    method = "class Solution:\n    def pair(self, n: int) -> List[int]:\n        return {}\n"
    assert graded(problem, method.format("[n, n]")) == 1.0
    assert graded(problem, method.format("(n, n)")) == 0.0
    assert graded(problem, method.format("[n, n] if n else [0]"), partial=True) == pytest.approx(2 / 3)


@pytest.mark.bwrap
@pytest.mark.parametrize(
    ("expected", "source"),
    [
        ({"a": 2, "b": 1}, "from collections import Counter\ndef f():\n    return Counter('aab')\n"),
        (
            [3, "x"],
            "import enum\nclass N(enum.IntEnum):\n    A = 3\nclass S(str): ...\ndef f(): return [N.A, S('x')]\n",
        ),
    ],
    ids=["Counter", "IntEnum and str"],
)
def test_a_value_of_a_subclass_is_the_value(expected: Any, source: str) -> None:
    assert graded(Problem("", "f", (), [Case((), expected)], "", None, level=1), source) == 1.0


@pytest.mark.bwrap
def test_outputs_above_1_mib_together_are_graded() -> None:
    problem = Problem("", "", (), [Case((f"{n}\n",), "x" * 600_000) for n in range(2)], "", None)
    assert graded(problem, "print('x' * 600_000)") == 1.0
    assert graded(problem, "print('x' * 9_000_000)") == 0.0


@pytest.mark.bwrap
def test_a_program_is_graded_by_its_output() -> None:
    problem = Problem("", "", (), [Case((f"{n}\n",), f"{n + 1} \n\n") for n in range(3)], "", None)
    assert graded(problem, "print(int(input()) + 1)") == 1.0
    assert graded(problem, "print(int(input()))") == 0.0
    assert graded(problem, "print(int(input()) + 1)\nraise SystemExit(1)") == 0.0
    assert graded(problem, "import os, sys\nopen('/proc/1/fd/1', 'w')\n") == 0.0


@pytest.mark.limits
def test_the_oracle_of_a_file_passes_the_tests_of_its_row(tmp_path: Path) -> None:
    row = {
        "question": "Add two numbers.",
        "solution": "def add(a, b):\n    return a + b",
        "test": "from solution import add\n\ndef test_add():\n    assert add(1, -2) == -1\n    assert add(2, 2) == 4\n",
    }
    path = tmp_path / "rows.jsonl"
    path.write_text("\n".join(json.dumps({**row, "question": f"Add, number {n}."}) for n in range(20)))
    options: Mapping[str, Any] = {"file": str(path), "timeout_s": 5.0}
    players = ["oracle", "nop"]
    results, _ = check_tasks(
        "Code-v0", tasks=1, split="train", players=players, repeat=1, options=options, backend="local"
    )
    assert {one.player: one.successes for one in results} == {"oracle": 1, "nop": 0}


@pytest.mark.bwrap
def test_time_is_limited() -> None:
    problem = draw_problem(0, 2, 2, None)
    slow = f"import time\ntime.sleep(0.7)\n{problem.solution}"
    assert graded(problem, slow, timeout_s=0.5) == 0.0
    assert graded(problem, slow, timeout_s=9.5) == 1.0
