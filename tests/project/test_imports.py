"""`import envkit` is light, its list of names is true, and the folders have one name each."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import envkit

ROOT = Path(__file__).parents[2]
HEAVY = {
    "docker",
    "fastapi",
    "httpx",
    "matplotlib",
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


def test_every_name_in_the_list_is_there() -> None:
    assert sorted(envkit.__all__) == envkit.__all__
    for name in envkit.__all__:
        assert getattr(envkit, name) is not None


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="'envkit' has no attribute 'mk'"):
        _ = envkit.mk
