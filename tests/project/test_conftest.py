"""A missing component skips its tests, unless the machine is said to have it."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

CONFTEST = Path(__file__).parents[1] / "conftest.py"


def run_a_test_that_needs_bwrap(folder: Path, **env: str) -> subprocess.CompletedProcess[str]:
    (folder / "conftest.py").write_text(CONFTEST.read_text(encoding="utf-8"), encoding="utf-8")
    (folder / "test_it.py").write_text("import pytest\n@pytest.mark.bwrap\ndef test_it(): pass\n", encoding="utf-8")
    (folder / "pytest.ini").write_text("[pytest]\nmarkers = bwrap: x\n", encoding="utf-8")
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-rs", "-p", "no:cacheprovider", str(folder)],
        env={**os.environ, "ENVKIT_REQUIRE": "", "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", **env},
        capture_output=True,
        text=True,
        check=False,
    )


def fake_bwrap(folder: Path, program: str) -> str:
    """Return a PATH on which `program` is all there is."""
    bin = folder / "bin"
    bin.mkdir()
    (bin / "bwrap").write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
    (bin / "bwrap").chmod(0o755)
    return str(bin)


def test_a_missing_program_is_a_skip_with_the_reason(tmp_path: Path) -> None:
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=str(tmp_path))
    assert done.returncode == 0
    assert "bwrap does not work here: there is no program bwrap" in done.stdout


def test_a_program_that_may_not_do_its_work_counts_as_missing(tmp_path: Path) -> None:
    path = fake_bwrap(tmp_path, "echo 'bwrap: no permission to make a namespace' >&2; exit 1")
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=path)
    assert done.returncode == 0
    assert "bwrap does not work here: bwrap: no permission to make a namespace" in done.stdout


def test_a_required_component_that_is_missing_is_a_failure(tmp_path: Path) -> None:
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=str(tmp_path), ENVKIT_REQUIRE="docker, bwrap")
    assert done.returncode == 1
    assert "bwrap is required and does not work: there is no program bwrap" in done.stdout


def test_a_component_that_works_lets_its_tests_run(tmp_path: Path) -> None:
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=fake_bwrap(tmp_path, "exit 0"), ENVKIT_REQUIRE="bwrap")
    assert done.returncode == 0
    assert "1 passed" in done.stdout


def test_a_misspelt_requirement_is_refused(tmp_path: Path) -> None:
    done = run_a_test_that_needs_bwrap(tmp_path, ENVKIT_REQUIRE="bubblewrap")
    assert done.returncode == 4
    assert "ENVKIT_REQUIRE: bubblewrap: there are bwrap, docker" in done.stderr


@pytest.mark.parametrize(("required", "outcome"), [("", "1 failed, 2 skipped"), ("limits", "2 failed, 1 skipped")])
def test_a_test_of_a_limit_that_is_refused_is_skipped_unless_limits_are_required(
    tmp_path: Path, required: str, outcome: str
) -> None:
    refused = "memory_mib=64 is refused: this backend cannot limit memory"
    circle = "try:\n        raise OSError('1')\n    except OSError as error:\n        raise error from error"
    quotes = f"def test_quotes():\n    text = '{refused}'\n    {circle}\n"
    (tmp_path / "test_more.py").write_text(
        f"def test_more():\n    raise OSError('{refused}')\n\n\n{quotes}", encoding="utf-8"
    )
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=str(tmp_path), ENVKIT_REQUIRE=required)
    assert outcome in done.stdout
    assert ("bubblewrap is not installed" in done.stdout) == (required == "")
