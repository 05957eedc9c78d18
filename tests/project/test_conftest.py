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


BWRAP = "bwrap does not work here: "


@pytest.mark.parametrize(
    ("program", "required", "code", "message"),
    [
        (None, "", 0, f"{BWRAP}there is no program bwrap"),
        ("echo 'bwrap: no permission' >&2; exit 1", "", 0, f"{BWRAP}bwrap: no permission"),
        (None, "docker, bwrap", 1, "bwrap is required and does not work: there is no program bwrap"),
        ("exit 0", "bwrap", 0, "1 passed"),
        ("exit 0", "bubblewrap", 4, "ENVKIT_REQUIRE: bubblewrap: there are bwrap, docker"),
    ],
)
def test_a_component_that_does_not_work_skips_its_tests_unless_it_is_required(
    program: str | None, required: str, code: int, message: str, tmp_path: Path
) -> None:
    (tmp_path / "bin").mkdir()
    if program is not None:
        (tmp_path / "bin" / "bwrap").write_text(f"#!/bin/sh\n{program}\n", encoding="utf-8")
        (tmp_path / "bin" / "bwrap").chmod(0o755)
    done = run_a_test_that_needs_bwrap(tmp_path, PATH=str(tmp_path / "bin"), ENVKIT_REQUIRE=required)
    assert done.returncode == code
    assert message in done.stdout + done.stderr
