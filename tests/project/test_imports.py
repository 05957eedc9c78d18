"""`import envkit` is light, its list of names is true, and the folders have one name each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

import envkit
import envkit.http
import envkit.sandbox

ROOT = Path(__file__).parents[2]
LATE_NAMES = [envkit, envkit.http, envkit.sandbox]
HEAVY = {
    "docker",
    "fastapi",
    "httpx",
    "matplotlib",
    "peft",
    "pydantic",
    "ray",
    "torch",
    "transformers",
    "typer",
    "uvicorn",
    "vllm",
    "yaml",
}


def run(program: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)


def test_importing_envkit_loads_nothing_heavier_than_gymnasium() -> None:
    done = run("import sys, envkit; print(*sys.modules)")
    assert done.stderr == ""
    loaded = set(done.stdout.split())
    assert HEAVY & loaded == set()
    assert "envkit.environments.catalog" in loaded
    assert "envkit.environments.frozen_lake" not in loaded


def test_making_an_environment_loads_neither_torch_nor_a_server() -> None:
    done = run("import sys, envkit; envkit.make('FrozenLake-v0').close(); print(*sys.modules)")
    assert done.stderr == ""
    assert {"torch", "transformers", "fastapi", "starlette", "uvicorn", "docker", "ray"} & set(
        done.stdout.split()
    ) == set()


@pytest.mark.parametrize("folder", ["environments", "sandbox", "trainer_bridge"])
def test_a_folder_imported_under_its_bare_name_says_what_to_import(folder: str) -> None:
    done = run(f"import {folder}")
    assert done.returncode == 1
    assert f"ImportError: import this package as envkit.{folder}" in done.stderr


@pytest.mark.parametrize("package", LATE_NAMES, ids=lambda package: package.__name__)
def test_every_name_in_the_list_is_there(package: ModuleType) -> None:
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None


@pytest.mark.parametrize("package", LATE_NAMES, ids=lambda package: package.__name__)
def test_a_name_that_is_not_there_is_an_attribute_error(package: ModuleType) -> None:
    with pytest.raises(AttributeError, match=f"'{package.__name__}' has no attribute 'mk'"):
        _ = package.mk


@pytest.mark.parametrize("package", ["envkit.http", "envkit.sandbox"])
def test_a_package_loads_what_it_exports_only_when_it_is_used(package: str) -> None:
    done = run(f"import sys, {package}; print(*sys.modules)")
    assert [name for name in done.stdout.split() if name.startswith(package + ".")] == []
