"""The structure stays one that a reader can hold: small folders, few arrows, no cycles."""

from __future__ import annotations

import pytest

from tests.project.arrows import MAX_ARROWS, arrows, crowded, cycles, import_graph


def test_no_folder_has_more_than_twelve_modules() -> None:
    assert crowded() == {}


@pytest.mark.parametrize("package", MAX_ARROWS)
def test_the_entries_of_a_package_have_few_arrows(package: str) -> None:
    found = arrows(import_graph(), package)
    assert found
    assert len(found) <= MAX_ARROWS[package], sorted(found)


def test_no_modules_import_each_other() -> None:
    assert cycles(import_graph()) == []
