"""The names that users depend on change only on purpose: `public_names.json` holds them, and the code must agree."""

from __future__ import annotations

import json

import pytest

import envkit
import envkit.http
import envkit.sandbox
from tests.golden.public_names import FILE, collect, differences, text

REMEDY = """\
public names changed ("-" is gone, "+" is new):
  {lines}
If that is intended: run `python tests/golden/public_names.py`, and commit the change of names on its own, with a table
old -> new in CHANGELOG.md."""


def test_public_names_match_the_golden_file() -> None:
    collected, agreed = collect(), FILE.read_text(encoding="utf-8")
    lines = differences(json.loads(agreed), collected)
    if lines:
        pytest.fail(REMEDY.format(lines="\n  ".join(lines)), pytrace=False)
    assert agreed == text(collected), "not as `python tests/golden/public_names.py` writes it"


def test_an_editor_completes_the_names_that_are_imported_when_they_are_first_used() -> None:
    for package in (envkit, envkit.http, envkit.sandbox):
        assert dir(package) == sorted(package.__all__)
    assert "make" in dir(envkit)
