"""Building: what is accepted, how it continues, and the tasks of our own package."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest

from envkit import clock
from envkit.environments.swe import packages
from envkit.environments.swe.build import BuildSettings, _Bug, _Bugs, _Builder, _Journal, _Trial, build
from envkit.environments.swe.env import OWN_TASKS
from envkit.environments.swe.mutate import Edit, edits_of
from envkit.environments.swe.runs import REPO, run_tests, spec_of
from envkit.environments.swe.tasks import read_folder
from envkit.errors import UsageError
from envkit.wiring.data import folder_of
from envkit.wiring.sandboxes.backends import open_tool_pool


def edit(function: str, operator: str = "off_by_one", start: int = 0) -> Edit:
    return Edit(operator=operator, function=function, line=1, start=start, end=start + 1, text="1")


@dataclass
class Builder:
    """Tries bugs; those with the operator ``survivor`` survive."""

    jobs: int = 1

    async def try_bug(self, bug: _Bug) -> _Trial:
        return _Trial(bug="", verdict="survived" if bug[1][0].operator == "survivor" else "found")

    def is_program(self, bug: _Bug) -> bool:
        return bug[1][0].function != "invalid"


def taken(candidates: list[tuple[str, Edit]], *sizes: int, jobs: int = 1, wanted: int = 40) -> list[list[str] | None]:
    bugs = _Bugs(Builder(jobs), candidates, wanted)  # type: ignore[arg-type]

    async def main() -> list[list[str] | None]:
        found = [await bugs.take(size) for size in sizes]
        return [None if bug is None else [one.function for one in bug[1]] for bug in found]

    return clock.run(main)


def pytest_only() -> Path:
    """Return the environment of tests that need nothing but pytest."""
    return packages.environment(packages.PYTEST, folder_of("swe") / "environments", lambda line: None)


@pytest.mark.parametrize("jobs", [1, 3])
def test_every_function_gets_one_bug_and_every_operator_a_quarter_of_all(jobs: int) -> None:
    candidates = [("a.py", edit("f")), ("a.py", edit("f", "return_none"))]
    candidates += [("a.py", edit(name)) for name in ("invalid", "g", "h", "i")]
    candidates += [("a.py", edit("j", "survivor")), ("a.py", edit("k", "return_none"))]
    assert taken(candidates, 1, 1, 1, 1, jobs=jobs, wanted=8) == [["f"], ["g"], ["k"], None]


@pytest.mark.parametrize(
    ("requirement", "more", "problem"),
    [
        ("semver==3.1.1", ("Six==1.17.0", "six==1.16.0"), "Six==1.17.0 and six==1.16.0"),
    ],
)
def test_an_impossible_environment_is_refused(requirement: str, more: tuple[str, ...], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        packages.environment_of([requirement], more)


@pytest.mark.parametrize(
    ("metadata", "licence"),
    [
        ("License-Expression: MIT\nLicense: Other\n", "MIT"),
        ("License: UNKNOWN\nClassifier: License :: OSI Approved :: MIT License\n", "MIT License"),
        ("Name: a\n", "unknown"),
    ],
)
def test_the_licence_is_read_from_the_metadata(metadata: str, licence: str, tmp_path: Path) -> None:
    (tmp_path / "PKG-INFO").write_text(metadata)
    assert packages.licence_of(tmp_path) == licence


@pytest.mark.bwrap
@pytest.mark.slow
def test_a_build_makes_today_the_first_tasks_of_our_own_package(tmp_path: Path) -> None:
    async def made(want: int) -> int:
        """Return the number of sandboxes that a build started."""
        async with open_tool_pool("local") as pool:
            settings = BuildSettings(want=want, combine=3, seed=1)
            await build(pool, [packages.OWN], tmp_path, data=folder_of("swe"), settings=settings)
            return pool.counts().starts

    assert clock.run(partial(made, 1)) > 0
    (journal,) = (tmp_path / "tried").iterdir()
    with journal.open("ab") as file:
        file.write(b'{"type": "trial", "bug": "src/a')  # as after kill -9
    clock.run(partial(made, 2))

    assert read_folder(tmp_path)[0] == read_folder(OWN_TASKS)[0][:2]
    assert clock.run(partial(made, 2)) == 0


@pytest.mark.bwrap
def test_tests_whose_imports_are_missing_are_left_out(tmp_path: Path) -> None:
    for name, needed in (("a", "math"), ("b", "missing_module")):
        (tmp_path / f"test_{name}.py").write_text(f"import {needed}\n\ndef test_{name}(): assert {needed}\n")

    async def main() -> tuple[tuple[str, ...], int]:
        async with open_tool_pool("local") as pool:
            builder = _Builder(pool, tmp_path, pytest_only(), _Journal(tmp_path / "tried.jsonl"), BuildSettings())
            baseline = await builder.measure((), "tests==1.0")
            return baseline.stable, baseline.unstable

    assert clock.run(main) == (("test_a.py::test_a",), 1)


@pytest.mark.bwrap
def test_tests_do_not_see_the_packages_of_the_machines_distribution(tmp_path: Path) -> None:
    (tmp_path / "test_here.py").write_text("def test_here():\n    pass\n")
    (tmp_path / "test_there.py").write_text("import only_there\n\ndef test_there():\n    pass\n")
    spec = spec_of(pytest_only())
    distribution = "/workspace/lib/dist-packages"
    shown = replace(spec, env={**spec.env, "PYTHONPATH": f"{spec.env['PYTHONPATH']}:{distribution}"})

    async def main() -> Mapping[str, str]:
        async with open_tool_pool("local") as pool, pool.lease(shown) as sandbox:
            await sandbox.write(f"{distribution}/only_there.py", b"")
            await sandbox.upload(tmp_path, REPO)
            return (await run_tests(sandbox)).outcomes

    assert clock.run(main) == {"test_here.py::test_here": "passed"}


@pytest.mark.bwrap
@pytest.mark.slow
def test_bugs_that_hang_or_use_up_the_memory_end_their_trials(tmp_path: Path) -> None:
    source = b"""import time


def count(n):
    while n > 0:
        time.sleep(0.01)
        n -= 1
    return n


def keep(n):
    kept = []
    while n > 0:
        kept.append(bytearray(1 << 24))
        n -= 1
    return n
"""
    (tmp_path / "loops.py").write_bytes(source)
    tests = [f"def test_{name}():\n    assert loops.{name}(2) == 0\n" for name in ("count", "keep")]
    tests += [f"def test_{number}():\n    pass\n" for number in range(10)]
    (tmp_path / "test_loops.py").write_text("import loops\n\n" + "\n".join(tests))

    async def main() -> dict[str, str]:
        async with open_tool_pool("local") as pool:
            builder = _Builder(pool, tmp_path, pytest_only(), _Journal(tmp_path / "tried.jsonl"), BuildSettings())
            baseline = await builder.measure(("a",), "loops==1.0")
            assert len(baseline.stable) == 12
            endless = [one for one in edits_of(source) if one.operator == "assign_removed"]
            return {one.function: (await builder.try_bug(("loops.py", (one,)))).verdict for one in endless}

    verdicts = clock.run(main)
    assert verdicts.keys() == {"count", "keep"}
    assert verdicts["count"] == "hung"
    assert verdicts["keep"] in ("hung", "lost")
