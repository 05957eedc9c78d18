"""Images of tasks: a tag stands for what the image is built from."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from envkit.environments.terminal.formats import read_task
from envkit.environments.terminal.images import builds, image_of, recipe, verifier_image_of
from tests.environments.terminal.formats.folders import harbor, portable


def test_the_image_of_a_portable_task_has_its_packages_and_none_of_its_files(tmp_path: Path) -> None:
    task = read_task(portable(tmp_path / "a"))
    before = image_of(task)
    (tmp_path / "a/environment/numbers.txt").write_text("1\n")

    assert image_of(read_task(tmp_path / "a")) == before
    assert [(one.dockerfile, one.context) for one in builds(task)] == [(recipe(["gawk"]), None)]


@pytest.mark.parametrize(
    "change",
    [
        lambda folder: (folder / "x").write_text("2"),
        lambda folder: (folder / "x").rename(folder / "y"),
        lambda folder: (folder / "x").chmod(0o755),
        lambda folder: (folder / "z").mkdir(),
        lambda folder: (folder / "z").symlink_to("x"),
    ],
)
def test_any_change_of_the_environment_changes_the_tag(change: Callable[[Path], object], tmp_path: Path) -> None:
    folder = harbor(tmp_path / "a", files={"environment/x": "1"})
    before = image_of(read_task(folder))
    change(folder / "environment")

    assert image_of(read_task(folder)) != before


def test_the_same_environment_in_another_place_has_the_same_tag(tmp_path: Path) -> None:
    tags = {image_of(read_task(harbor(tmp_path / place / "a"))) for place in ("here", "there")}
    assert len(tags) == 1


@pytest.mark.parametrize(
    ("toml", "files", "tags"),
    [
        ("", {}, ["envkit/terminal:a-1", "envkit/terminal:a-1"]),
        ('[environment]\ndocker_image = "x:1"\n', {}, ["x:1", "x:1"]),
        (
            '[verifier]\nenvironment_mode = "separate"\n',
            {"tests/Dockerfile": "FROM x\n"},
            ["envkit/terminal:a-1", "envkit/terminal:verifier-1"],
        ),
        ('[verifier.environment]\ndocker_image = "y:1"\n', {}, ["envkit/terminal:a-1", "y:1"]),
    ],
)
def test_a_verifier_has_its_own_image_or_that_of_the_environment(
    toml: str, files: dict[str, str], tags: list[str], tmp_path: Path
) -> None:
    task = read_task(harbor(tmp_path / "a", toml, files))
    found = [image_of(task), verifier_image_of(task)]

    assert [tag if tag.startswith(("x", "y")) else f"{tag.rpartition('-')[0]}-1" for tag in found] == tags
    assert {one.tag for one in builds(task)} == {tag for tag in found if tag.startswith("envkit/")}
