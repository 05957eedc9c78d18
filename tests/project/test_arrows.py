"""The structure stays one that a reader can hold: small folders, few arrows, no cycles."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.project.arrows import MAX_ARROWS, arrows, crowded, cycles, import_graph, imports


def test_no_folder_has_more_than_twelve_modules() -> None:
    assert crowded() == {}


@pytest.mark.parametrize("package", MAX_ARROWS)
def test_the_entries_of_a_package_have_few_arrows(package: str) -> None:
    found = arrows(import_graph(), package)
    assert found
    assert len(found) <= MAX_ARROWS[package], sorted(found)


def test_no_modules_import_each_other() -> None:
    assert cycles(import_graph()) == []


def test_relative_imports_and_imports_of_modules_are_followed(tmp_path: Path) -> None:
    path = tmp_path / "x.py"
    path.write_text("from . import b\nfrom ..c import Name\nimport envkit.d\ndef f():\n    from envkit.e import g\n")
    names: list[str] = ["envkit.a.b", "envkit.c", "envkit.d", "envkit.e", "envkit.a"]
    known = dict.fromkeys(names, path)
    assert set(imports("envkit.a.x", path, known)) == {"envkit.a.b", "envkit.c", "envkit.d", "envkit.e"}


def test_a_cycle_is_found_also_over_a_third_module() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a"}, "d": {"a"}}
    assert cycles(graph) == [("a", "b", "c")]
