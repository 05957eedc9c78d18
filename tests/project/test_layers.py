"""Imports between layers that import-linter, which `make lint` runs, cannot see: those of strings."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SPOKES = ("environments", "sandbox", "trainer_bridge")
ABOVE_THE_SPOKES = ("checks", "wiring", "gym", "cli")
NOT_FOR_SPOKES = (*ABOVE_THE_SPOKES, "fleet", "http", "local_host", "config")
EXCEPTIONS = {"trainer_bridge": ("config",)}
"""Names that a spoke may import all the same: a part of an algorithm is one file, with its section."""

# Imports every module of a package, or one module, while some names are blocked; prints the modules that import one of
# these. Modules that `import envkit` itself loads, such as the catalogue of environments, are imported before.
PROGRAM = """
import importlib, pkgutil, sys

class Blocked(Exception):
    pass

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if any(name == one or name.startswith(one + ".") for one in blocked):
            raise Blocked(name)

names, blocked = (argument.split(",") for argument in sys.argv[1:])
import envkit
sys.meta_path.insert(0, Blocker())

def modules(name):
    yield name
    module = sys.modules.get(name)
    for inner in pkgutil.iter_modules(getattr(module, "__path__", ()), name + "."):
        yield from modules(inner.name)

for start in names:
    for name in modules(start):
        try:
            importlib.import_module(name)
        except Blocked as error:
            print(f"{name} imports {error}")
        except ModuleNotFoundError as error:
            if (error.name or "envkit").partition(".")[0] == "envkit":
                raise  # anything else is an optional dependency
"""


def imports_of_blocked(names: list[str], blocked: list[str]) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, ",".join(names), ",".join(blocked)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def hub_modules() -> list[str]:
    places = [place for place in sorted((ROOT / "envkit").iterdir()) if not place.name.startswith("__")]
    names = [place.stem for place in places if place.suffix == ".py" or (place / "__init__.py").exists()]
    return [f"envkit.{name}" for name in names if name not in (*SPOKES, *ABOVE_THE_SPOKES)]


def test_the_hub_can_be_imported_without_the_spokes() -> None:
    names = hub_modules()
    assert {"envkit.types", "envkit.http", "envkit.local_host"} <= set(names)
    blocked = [f"envkit.{name}" for name in (*SPOKES, *ABOVE_THE_SPOKES)]
    assert imports_of_blocked(names, blocked) == []


@pytest.mark.parametrize("spoke", SPOKES)
def test_a_spoke_can_be_imported_without_the_others_and_most_of_the_hub(spoke: str) -> None:
    others = {*SPOKES, *NOT_FOR_SPOKES} - {spoke, *EXCEPTIONS.get(spoke, ())}
    assert imports_of_blocked([f"envkit.{spoke}"], [f"envkit.{name}" for name in others]) == []
