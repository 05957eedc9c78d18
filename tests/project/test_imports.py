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


@pytest.mark.parametrize("package", LATE_NAMES, ids=lambda package: package.__name__)
def test_every_name_in_the_list_is_there(package: ModuleType) -> None:
    assert sorted(package.__all__) == package.__all__
    for name in package.__all__:
        assert getattr(package, name) is not None
