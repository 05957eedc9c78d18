"""Dependencies as a library has them: ranges in pyproject.toml, and exact versions beside it for `make`."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
EXTRAS = PROJECT["optional-dependencies"]


def requirements(*words: str) -> list[Requirement]:
    found = [Requirement(word) for word in words]
    return [one for one in found if one.name not in ("envkit", "envkit-cheats")]


def test_no_requirement_names_an_exact_version() -> None:
    every = requirements(*PROJECT["dependencies"], *(word for words in EXTRAS.values() for word in words))
    assert [str(one) for one in every if any(part.operator in ("==", "===") for part in one.specifier)] == []


def test_the_constraints_have_an_allowed_version_of_each_requirement() -> None:
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    versions = {canonicalize_name(name): version for name, _, version in (line.partition("==") for line in lines)}
    extras = [word for name, words in EXTRAS.items() if name != "vllm" for word in words]
    for one in requirements(*PROJECT["dependencies"], *extras):
        assert one.specifier.contains(versions[canonicalize_name(one.name)]), one


def test_the_tests_that_need_no_torch_are_found_without_it() -> None:
    program = ROOT / "benchmarks" / "evidence" / "clones" / "dependencies.py"
    (found,) = re.findall(r"^TESTS = (\(.*?^\))", program.read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE)
    script = "import sys, pytest; sys.modules['torch'] = None; sys.exit(pytest.main(sys.argv[1:]))"
    words = ["--collect-only", "-qq", *(f"tests/{name}" for name in ast.literal_eval(found))]
    done = subprocess.run([sys.executable, "-c", script, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout
