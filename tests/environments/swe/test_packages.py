"""Source distributions and environments: what pip is asked for, and what is unpacked."""

from __future__ import annotations

import io
import tarfile
from pathlib import Path

import pytest

from envkit.environments.swe import packages
from envkit.environments.swe.env import OWN_TASKS
from envkit.environments.swe.packages import OWN, environment, environment_of, fetch, requirement_of, unpack
from envkit.environments.swe.tasks import read_folder
from envkit.errors import UsageError

BASE = "tiny-1.0.tar.gz"


def archive(folder: Path, *entries: tuple[str, bytes]) -> Path:
    with tarfile.open(folder / BASE, "w:gz") as made:
        for name, content in entries:
            entry = tarfile.TarInfo(name)
            entry.size = len(content)
            made.addfile(entry, io.BytesIO(content))
    return folder / BASE


def test_the_own_package_is_packed_the_same_each_time(tmp_path: Path) -> None:
    file = fetch(OWN, tmp_path)
    (locked,) = read_folder(OWN_TASKS)[1].packages
    assert file.name == locked.base
    tree = unpack(file, tmp_path)
    assert (tree / "src/intervals/sets.py").is_file()
    assert unpack(fetch(OWN, tmp_path), tmp_path) == tree


@pytest.mark.parametrize(
    "base",
    [
        "-rfile-1.tar.gz",
        "--index-url=x-1.tar.gz",
        "x @ https://h/x-1.tar.gz",
        "a/b-1.tar.gz",
        "semver.tar.gz",
        "a-.tar.gz",
    ],
)
def test_pip_never_gets_the_name_of_a_file_as_an_option_or_address(
    base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_pip", lambda *arguments: pytest.fail(f"pip {arguments}"))
    with pytest.raises(UsageError, match="must name an exact version"):
        fetch(requirement_of(base), tmp_path)
    with pytest.raises(UsageError, match="must name an exact version"):
        environment(["pytest==9.2.0", requirement_of(base)], tmp_path, lambda line: None)


def test_a_named_package_is_found_under_each_spelling_of_its_name() -> None:
    for name in ("python-slugify", "python_slugify", "Python.Slugify"):
        assert "text-unidecode==1.3" in environment_of([f"{name}==9.2.0"])


def test_a_file_with_another_content_is_unpacked_again_under_the_same_name(tmp_path: Path) -> None:
    for content in (b"old", b"new"):
        tree = unpack(archive(tmp_path, ("tiny-1.0/a.py", content)), tmp_path / "trees")
        assert (tree / "a.py").read_bytes() == content
    assert len(list((tmp_path / "trees").iterdir())) == 2


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ((), "has no files"),
        ((("a/x", b""), ("b/x", b"")), "must contain one folder"),
        ((("a/x", b"1" * 600), ("a/y", b"1" * 600)), "of at most 0 MiB"),
        ((("../x", b""),), "cannot unpack"),
    ],
)
def test_an_archive_that_is_no_small_tree_is_refused(
    entries: tuple[tuple[str, bytes], ...], problem: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packages, "_MAX_TREE", 1000)
    with pytest.raises(UsageError, match=problem):
        unpack(archive(tmp_path, *entries), tmp_path / "trees")
    assert not list((tmp_path / "trees").iterdir())


@pytest.mark.parametrize(("name", "is_refused"), [("a/x", False), ("../x", True), ("/x", True)])
def test_an_archive_is_unpacked_by_a_python_without_extraction_filters(
    name: str, is_refused: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(tarfile, "data_filter", raising=False)
    made = archive(tmp_path, (name, b"content"))
    if is_refused:
        with pytest.raises(UsageError, match="leads out of the folder"):
            unpack(made, tmp_path / "trees")
    else:
        assert (unpack(made, tmp_path / "trees") / "x").read_bytes() == b"content"


def test_a_pip_that_does_not_end_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packages, "_PIP_TIMEOUT_S", 0.01)
    with pytest.raises(UsageError, match=r"pip did not end within 0\.01 s"):
        fetch("no-such-package==1.0", tmp_path)
