"""A folder of another format is refused, never misread."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.errors import UsageError
from envkit.runs.folder import FORMAT_FILE, require_format, write_format


def require(folder: Path, *, is_used: bool) -> None:
    require_format(folder, 3, holds="a run", remedy="choose another folder", is_used=is_used)


def test_a_folder_is_read_by_the_version_that_wrote_its_number(tmp_path: Path) -> None:
    write_format(tmp_path, 3)

    require(tmp_path, is_used=True)
    assert (tmp_path / FORMAT_FILE).read_text() == '{"format": 3}\n'


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ('{"format": 4}', "4"),
        ('{"format": "3"}', "unknown, since format.json is damaged"),
        ('{"format"', "unknown, since format.json is damaged"),
    ],
)
def test_another_number_is_refused_with_both_and_the_remedy(content: str, found: str, tmp_path: Path) -> None:
    (tmp_path / FORMAT_FILE).write_text(content)
    expected = (
        f"{tmp_path}: holds a run of another format (found {found}; this version of envkit reads 3); "
        "choose another folder"
    )

    with pytest.raises(UsageError) as refused:
        require(tmp_path, is_used=False)
    assert str(refused.value) == expected


def test_files_without_a_number_are_older_and_a_new_folder_passes(tmp_path: Path) -> None:
    require(tmp_path, is_used=False)
    require(tmp_path / "missing", is_used=False)
    with pytest.raises(
        UsageError, match=r"\(found 0, since there is no format\.json; this version of envkit reads 3\)"
    ):
        require(tmp_path, is_used=True)


def test_a_number_that_is_there_is_never_replaced(tmp_path: Path) -> None:
    write_format(tmp_path, 2)
    write_format(tmp_path, 3)

    assert (tmp_path / FORMAT_FILE).read_text() == '{"format": 2}\n'
    assert [path.name for path in tmp_path.iterdir()] == [FORMAT_FILE]
