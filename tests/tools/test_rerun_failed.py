"""A run of the tests in which few failed passes if those pass when they are run again."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[2] / "tools" / "rerun_failed.py"
ONCE = """
from pathlib import Path
import pytest

@pytest.mark.xdist_group("one")
@pytest.mark.parametrize("i", range({count}))
def test_it(i):
    path = Path(f"ran-{{i}}")
    ran = path.exists()
    path.touch()
    assert ran and not {always}
"""


@pytest.mark.parametrize(
    ("count", "always", "code", "message"),
    [
        (3, False, 0, "flaky: test_few.py::test_it[2] (failed at first, passed when it was run again)"),
        (1, True, 1, ""),
        (4, False, 1, "4 tests failed. Only 1 to 3 are run again."),
    ],
)
def test_few_failed_tests_are_run_again(
    tmp_path: Path, count: int, always: bool, code: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take seconds to import
    monkeypatch.setenv("PYTEST_PLUGINS", "xdist.plugin")
    (tmp_path / "test_few.py").write_text(ONCE.format(count=count, always=always))
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = --strict-markers\n")
    parallel = [sys.executable, "-m", "pytest", "-q", "-n", "1", "--dist", "loadgroup"]
    first = subprocess.run(parallel, cwd=tmp_path, capture_output=True, check=False)
    again = subprocess.run([sys.executable, PROGRAM], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (first.returncode, again.returncode) == (1, code)
    assert message in again.stderr
    assert (tmp_path / ".reports/flaky.txt").exists() == (code == 0)
