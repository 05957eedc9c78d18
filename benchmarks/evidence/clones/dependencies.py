"""Test the oldest and the newest dependencies that ``pyproject.toml`` allows, and an older torch.

    python benchmarks/evidence/clones/dependencies.py [--only NAME]

Each part makes a virtual environment in a temporary folder. `oldest-3.11` has the lower bound of each direct
dependency, or the next version that has a wheel for this Python, and the newest versions of all others; `newest-3.11`
has the newest versions. Both run tests that need neither torch nor sandboxes. In `older-torch`, pip installs envkit
with the extra `train` into an environment that contains an older torch, which must remain; then the tests of the
trainer run. This part downloads 3.5 GB. uv resolves the versions, pip installs them. Keep the machine quiet: tests
with deadlines fail under a high load.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from fresh_machine import sums
from record import ROOT, Evidence, parser, run

from tests.sandbox.agent.test_source import python_of

NAME = "dependencies"
STALE_AFTER = ("pyproject.toml",)
TWIN = "tests/project/test_dependencies.py::test_the_constraints_have_an_allowed_version_of_each_requirement"
VERSIONS = ("3.11", "3.12", "3.13")
OLDER_TORCH = "2.9.0"
"""The lower bound, about a year older than the version in ``constraints.txt``."""
EXTRAS = ("serve", "docker", "ray", "terminal")
"""The extras without torch."""
TESTS = (
    "config/test_evaluation.py",
    "config/test_training.py",
    "contract/test_envs.py",
    "environments/terminal/test_screen.py",
    "environments/webshop/test_env.py",
    "http/api",
    "http/auth",
    "http/client",
    "runs",
    "test_gym.py",
    "wrappers/test_tools.py",
)
"""Tests that use each of the dependencies, and no torch."""
TRAINER_TESTS = ("trainer_bridge",)
LEFT_OUT = "alone bwrap chromium detached docker limits model nginx node peers ray slow valgrind vllm"
"""Markers of the tests that take long, or need more than the Python packages."""
TOOLS = ("hypothesis", "pytest", "pytest-randomly", "pytest-timeout", "pytest-xdist")
_RESOLUTIONS = {"oldest": "lowest-direct", "newest": "highest"}
_FREE_GIB = 25


def environment(folder: Path, version: str) -> Path:
    """Make a virtual environment, and return its Python."""
    python = python_of(version)
    if python is None:
        sys.exit(f"there is no Python {version}")
    subprocess.run([python, "-m", "venv", folder], check=True)
    return folder / "bin" / "python"


def pip_install(python: Path, arguments: Sequence[str | Path]) -> None:
    done = run([python, "-m", "pip", "install", "--quiet", *arguments], ROOT)
    if done["exit_code"]:
        sys.exit(f"pip failed with exit code {done['exit_code']}")


def resolved(folder: Path, age: str, version: str) -> Path:
    """Return a file with the versions of all packages, as uv chooses them."""
    uv = folder / "uv"
    if not uv.exists():
        pip_install(environment(uv, version), ["uv"])
    wanted, found = folder / "wanted.txt", folder / f"{age}-{version}.txt"
    wanted.write_text("\n".join(tools()))
    options = ["--quiet", "--resolution", _RESOLUTIONS[age], "--only-binary", ":all:", "--python-version", version]
    extras = [word for extra in EXTRAS for word in ("--extra", extra)]
    command = [uv / "bin" / "uv", "pip", "compile", *options, *extras, ROOT / "pyproject.toml", wanted, "-o", found]
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return found


def tools() -> list[str]:
    """Return the programs of the tests, with their versions in ``constraints.txt``."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    return [line for line in lines if line.partition("==")[0] in TOOLS]


def tested(python: Path, tests: Sequence[str]) -> dict[str, Any]:
    """Run tests, and return the sums and the versions of the direct dependencies."""
    reports = python.parents[1] / "reports"
    # Old packages may use what a newer Python deprecates, so warnings are not errors.
    options = ["-q", "-p", "no:cacheprovider", "-W", "default", "-m", f"not ({LEFT_OUT.replace(' ', ' or ')})"]
    report = f"--junitxml={reports / 'parallel.xml'}"
    done = run([python, "-m", "pytest", *options, report, *(f"tests/{name}" for name in tests)], ROOT)
    times = {"exit_code": done["exit_code"], "test_seconds": done["seconds"]}
    return {**times, **sums(reports), "versions": versions(python)}


def versions(python: Path) -> dict[str, str]:
    """Return the installed versions of the packages that ``pyproject.toml`` names."""
    listing = [python, "-m", "pip", "list", "--format=json"]
    found = json.loads(subprocess.run(listing, check=True, capture_output=True).stdout)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    named = [*project["dependencies"], *(word for words in project["optional-dependencies"].values() for word in words)]
    names = {word.partition(">=")[0].partition("[")[0].lower() for word in named}
    return {one["name"].lower(): one["version"] for one in found if one["name"].lower().replace("_", "-") in names}


def without_torch(age: str, version: str) -> dict[str, Any]:
    """Install the oldest or the newest versions, and run the tests that need no torch."""
    with TemporaryDirectory(prefix="envkit-dependencies-") as place:
        chosen = resolved(Path(place), age, version)
        python = environment(Path(place, "tested"), version)
        pip_install(python, ["-r", chosen])
        pip_install(python, ["--no-deps", "--editable", ROOT])
        return tested(python, TESTS)


def with_older_torch() -> dict[str, Any]:
    """Install envkit beside an older torch, and run the tests of the trainer."""
    with TemporaryDirectory(prefix="envkit-dependencies-") as place:
        if shutil.disk_usage(place).free < _FREE_GIB * 2**30:
            sys.exit(f"torch needs {_FREE_GIB} GiB of free disk space in {place}")
        python = environment(Path(place, "tested"), VERSIONS[0])
        pip_install(python, [f"torch=={OLDER_TORCH}"])
        before = versions(python)["torch"]
        pip_install(python, [f"{ROOT}[train]"])
        after = versions(python)["torch"]
        pip_install(python, tools())
        return {"torch_before": before, "torch_after": after, **tested(python, TRAINER_TESTS)}


def main() -> None:
    parts = {f"{age}-{version}": partial(without_torch, age, version) for version in VERSIONS for age in _RESOLUTIONS}
    parts["older-torch"] = with_older_torch
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=parts, action="append", help="only this part; repeatable")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    found = {name: evidence.part(name, parts[name]) for name in asked.only or parts}
    failed = [name for name, figures in found.items() if figures["exit_code"]]
    failed += [name for name, figures in found.items() if figures.get("torch_before") != figures.get("torch_after")]
    if failed:
        sys.exit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
