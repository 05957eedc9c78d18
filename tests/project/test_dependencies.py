"""Dependencies as a library has them: ranges in pyproject.toml, and exact versions beside it for `make`."""

from __future__ import annotations

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
