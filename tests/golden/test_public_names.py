"""The names that users depend on change only on purpose: `public_names.json` holds them, and the code must agree."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.golden.public_names import FILE, Names, Source, collect, differences, text

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


def test_a_renamed_option_and_a_new_route_are_named() -> None:
    old: dict[str, Names] = {"commands": {"envkit train": ["--force", "--output"]}, "http routes": {"GET /v1": []}}
    new: dict[str, Names] = {
        "commands": {"envkit train": ["--folder", "--force"]},
        "http routes": {"GET /v1": [], "GET /v2": []},
    }

    assert differences(old, new) == [
        "+ commands: envkit train: --folder",
        "- commands: envkit train: --output",
        "+ http routes: GET /v2",
    ]


MODULE = '''
"""A module that says $ENVKIT_DOCUMENTED and documented.json only in its documentation."""

HOME_LABEL = "envkit.home"
START = f'exec "$ENVKIT_START" {HOME_LABEL}'
NAMES = (b"$ENVKIT_BYTES", f"part-{HOME_LABEL}.jsonl")

def collect():
    yield CounterMetricFamily("envkit_homes", "Homes.", labels=["city"])
    os.environ.get("ENVKIT_HOME")
    entry_points(group="envkit.homes")
'''


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "sandbox" / "deep").mkdir(parents=True)
    (tmp_path / "sandbox" / "deep" / "homes.py").write_text(MODULE)
    (tmp_path / "docker").mkdir()
    (tmp_path / "docker" / "homes.Dockerfile").write_text("FROM scratch\nLABEL envkit.image=1\nENV A=$ENVKIT_IMAGE\n")
    return Source(tmp_path)


def test_a_variable_is_found_in_code_and_scripts(source: Source) -> None:
    assert source.variables() == ["ENVKIT_BYTES", "ENVKIT_HOME", "ENVKIT_IMAGE", "ENVKIT_START"]


def test_labels_files_metrics_and_groups_are_found_in_the_source(source: Source) -> None:
    assert source.labels() == ["envkit.home", "envkit.image"]
    assert source.file_names() == ["part-{}.jsonl"]
    assert source.metrics() == {"envkit_homes_total": ["counter", "city"]}
    assert source.entry_point_groups() == {"envkit.homes": []}
