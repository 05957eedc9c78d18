"""Episodes: what the agent's sandbox holds, what is submitted, and the split of tasks."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.environments.split import SPLITS
from envkit.environments.swe import Swe, SweTasks
from envkit.environments.swe.checkout import apply_command, between
from envkit.environments.swe.env import SweBug, options_of
from envkit.environments.swe.runs import REPO, spec_of
from envkit.environments.tools import write_call
from envkit.errors import OptionError, UsageError
from envkit.types import JSON
from envkit.wiring.sandboxes.backends import open_tool_pool

from .tiny import CORE, FIX, task, task_folder

pytestmark = pytest.mark.bwrap

SUBMIT = write_call("submit")


def bash(command: str) -> str:
    return write_call("bash", command=command)


async def play(env: Swe, actions: Sequence[str], options: Mapping[str, JSON]) -> tuple[list[str], float | None]:
    """Play an episode; return what was observed and the grade."""
    start = await env.reset(seed=0, options=options)
    seen = [start.observation.text]
    for action in actions:
        seen.append((await env.step(action)).observation.text)
    return seen, await env.grade()


def played(folder: Path, *actions: str, **options: Any) -> tuple[list[str], float | None]:
    async def main() -> tuple[list[str], float | None]:
        async with open_tool_pool("local") as pool:
            env = Swe(sandboxes=pool, data={"swe": folder / "swe"}, tasks=str(folder / "tasks"))
            return await play(env, [*actions, SUBMIT], options)

    return clock.run(main)


def test_the_sandbox_does_not_hold_the_answer(tmp_path: Path) -> None:
    task_folder(tmp_path)
    seen, _ = played(
        tmp_path,
        bash(
            "grep -rlsF -e 'first + second' -e 'class TestAdd' /workspace /tmp /opt /run /etc /dev/shm;"
            "find /workspace /tmp /opt /usr/lib/python3* -path '*tiny/core*'; ls tests"
        ),
        bash(
            "git log --all --reflog --format='%h %ad %an %s' --date=iso; git fsck --lost-found; git tag; git status -s"
        ),
        bash("ls .git/hooks .git/logs; python3 -c 'import tiny; print(tiny.__path__)'; python3 -m pip show tiny"),
        bash("find . /tmp -path ./.git -prune -o -type f -printf '%T@\n' | sort -u"),
        bash("env | grep -E '^(TZ|LC_ALL|PYTHONHASHSEED)='; timeout 5 bash -c '< /dev/tcp/1.1.1.1/80'"),
    )
    assert seen[1] == f"{REPO}/{CORE}\nhelpers.py\n[exit code 0]"
    assert [line.split(" ", 1)[1] for line in seen[2].splitlines()[:-1]] == ["2024-01-15 12:00:00 +0000 envkit Start"]
    assert f"['{REPO}/src/tiny']" in seen[3]
    assert "not found: tiny" in seen[3]
    assert "No such file" in seen[3]
    assert seen[4] == "1705320000.0000000000\n[exit code 0]"
    assert all(line in seen[5] for line in ("TZ=UTC", "LC_ALL=C.UTF-8", "PYTHONHASHSEED=0", "unreachable"))


def test_the_text_and_the_tests_depend_on_the_level_of_the_statement(tmp_path: Path) -> None:
    task_folder(tmp_path)
    for level, statement in enumerate(task().statements, 1):
        seen, _ = played(tmp_path, bash("ls tests"), statement=level)
        assert statement in seen[0]
        assert ("test_core.py" in seen[1]) == (level == 3)


def test_the_fix_earns_1_and_what_the_agent_may_not_change_does_not_matter(tmp_path: Path) -> None:
    task_folder(tmp_path)
    other = (
        "rm -r tests .git setup.py; ln -s /etc/passwd src/tiny/x.py; chmod 755 src/tiny/__init__.py; echo > conftest.py"
    )
    review = tmp_path / "review"
    seen, grade = played(tmp_path, bash(apply_command(FIX)), bash(other), review=str(review))
    assert (grade, seen[1]) == (1.0, "[exit code 0]")
    assert played(tmp_path)[1] == 0.0
    assert not review.exists()


def test_many_new_files_do_not_hide_the_fix(tmp_path: Path) -> None:
    task_folder(tmp_path)
    many = bash("mkdir a; for n in $(seq 150); do head -c 1048576 /dev/zero > a/f$n.py; ln -s x a/l$n; done")
    review = tmp_path / "review"
    gc = bash(f"echo 'import gc' >> {CORE}")  # flagged
    assert played(tmp_path, bash(apply_command(FIX)), gc, many, review=str(review))[1] == 1.0
    assert next(review.iterdir()).stat().st_size < 10_000


def test_a_suspicious_episode_is_kept_for_review(tmp_path: Path) -> None:
    task_folder(tmp_path)
    review = tmp_path / "review"
    commands = (bash(f"echo 'import os; os._exit(1)' >> {CORE}"), bash("echo 'import gc' > conftest.py; rm setup.py"))
    assert played(tmp_path, *commands, review=str(review))[1] == 0.0
    kept = json.loads(next(review.iterdir()).read_text())
    assert f"os._exit in {CORE}" in kept["verdict"]["flags"]
    assert "+import os; os._exit(1)" in kept["diff"]
    assert kept["verdict"]["refused"] == {}


def test_episodes_at_once_start_from_one_preparation_and_do_not_share_files(tmp_path: Path) -> None:
    task_folder(tmp_path)
    grades: dict[int, float | None] = {}
    seen: dict[int, list[str]] = {}

    async def main() -> None:
        async with open_tool_pool("local") as pool, anyio.create_task_group() as tasks:

            async def one(number: int) -> None:
                env = Swe(sandboxes=pool, data={"swe": tmp_path / "swe"}, tasks=str(tmp_path / "tasks"))
                mark = bash(f"ls; git log --format=%H; touch mark-{number}")
                fix = [bash(apply_command(FIX))] if number % 2 else []
                seen[number], grades[number] = await play(env, [mark, *fix, SUBMIT], {})

            for number in range(4):
                tasks.start_soon(one, number)

    clock.run(main)
    assert grades == {0: 0.0, 1: 1.0, 2: 0.0, 3: 1.0}
    assert len({texts[1] for texts in seen.values()}) == 1


def test_an_installed_original_is_an_error(tmp_path: Path) -> None:
    task_folder(tmp_path, task(file="src/json/decoder.py"))
    with pytest.raises(UsageError, match="json is installed in the sandbox, at /usr/lib/python"):
        played(tmp_path)


def test_callers_wait_as_long_as_all_runs_of_the_tests_may_take(tmp_path: Path) -> None:
    options = options_of({"tasks": str(task_folder(tmp_path))})
    run_s, repeat_s = 22, 3 * 22
    runs_s = run_s + repeat_s + run_s + (3 + 3) * run_s  # one without the changes, and three bugs in two sources
    assert SweBug(task(), options, tmp_path, None).judge_limit_s == runs_s + 60


def test_each_task_is_in_one_split_and_a_function_is_not_in_two(tmp_path: Path) -> None:
    tasks = [task(id=f"tiny.{number}", function=f"f{number // 2}") for number in range(20)]
    found = SweTasks(tasks=str(task_folder(tmp_path, *tasks)))
    ids: dict[str, list[int]] = {}
    assert found.count("any") == 20
    for split in SPLITS:
        chosen = [found.task(split, index) for index in range(found.count(split))]
        ids[split] = [tasks.index(options_of(one.options).task(one.seed)) for one in chosen]
    assert sorted(chain(*ids.values())) == list(range(20))
    assert {split: len(numbers) for split, numbers in ids.items()} == {"train": 16, "validation": 2, "eval": 2}
    functions = [{number // 2 for number in numbers} for numbers in ids.values()]
    assert sum(map(len, functions)) == len(set.union(*functions))


def test_a_wrong_option_is_refused(tmp_path: Path) -> None:
    for options in ({"statement": 4}, {"statements": 1}, {"review": 3}, {"split": "test"}):
        with pytest.raises(OptionError):
            Swe(sandboxes=None, data={}, **options)  # type: ignore[arg-type]


def test_a_patch_with_several_hunks_and_no_final_line_end_is_applied_by_the_command(tmp_path: Path) -> None:
    before = b"".join(b"line %d\n" % number for number in range(60)) + b"last"
    after = before.replace(b"line 5\n", b"").replace(b"line 30\n", b"line 30\n\n  x\n").replace(b"last", b"new\nlast")
    tree = tmp_path / "repo"
    tree.mkdir()
    (tree / "a.py").write_bytes(before)
    command = apply_command(between("a.py", before, after)).replace(f"cd {REPO}", f"cd {tree}")
    subprocess.run(["bash", "-c", command], check=True)
    assert (tree / "a.py").read_bytes() == after


def test_in_an_image_the_tests_find_the_packages_that_the_image_was_built_with() -> None:
    recipe = (Path(__file__).parents[3] / "docker" / "python.Dockerfile").read_text()
    folder = spec_of(None, image="tests:1").env["PYTHONPATH"].rpartition(":")[2]
    assert f"ENV PYTHONPATH={folder} " in recipe
