"""The program that runs all tests as on fresh machines counts outcomes by pytest's reports."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parents[2] / "benchmarks" / "evidence" / "clones"
SUMS = "import json, pathlib, sys, fresh_machine; print(json.dumps(fresh_machine.sums(pathlib.Path(sys.argv[1]))))"
TESTS = """
import pathlib, pytest

def test_good():
    pass

def test_bad():
    assert False

def test_flaky():
    assert pathlib.Path("again").exists()

@pytest.mark.parametrize("number", [1, 2])
def test_left_out(number):
    pytest.skip("no such machine")
"""


def test_the_sums_are_those_of_the_reports(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    (tmp_path / "test_it.py").write_text(TESTS, encoding="utf-8")
    pytest_here = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    subprocess.run([*pytest_here, "--junitxml=parallel.xml"], cwd=tmp_path, capture_output=True, check=False)
    (tmp_path / "again").touch()
    again = [*pytest_here, "--junitxml=again.xml", "-k", "flaky or bad"]
    subprocess.run(again, cwd=tmp_path, capture_output=True, check=False)
    done = subprocess.run(
        [sys.executable, "-c", SUMS, tmp_path], cwd=PROGRAMS, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == {
        "passed": 2,
        "failed": 1,
        "skipped": 2,
        "reasons": {"no such machine": 2},
        "failures": ["test_it.test_bad"],
    }
