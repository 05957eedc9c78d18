"""Level files in the format of Boxoban."""

from __future__ import annotations

from pathlib import Path

import pytest

from envkit.environments.sokoban.files import read_levels
from envkit.environments.sokoban.solver import solve
from envkit.errors import OptionError

_SMALL = "#####\n#@$.#\n#   #\n#   #\n#####\n"
_TWO = """\
; 12
######
#@$ .#
#    #
#  $.#
#    #
######

; 13
######
#+ $ #
# *  #
#  $.#
##   #
######
"""


def test_levels_are_read_in_our_own_symbols_and_in_their_order(tmp_path: Path) -> None:
    levels = read_levels(_write(tmp_path, _TWO))
    assert levels == (
        "######\n#PX_O#\n#____#\n#__XO#\n#____#\n######",
        "######\n#S_X_#\n#_√__#\n#__XO#\n##___#\n######",
    )
    assert solve(levels[0]) == ("right", "right", "left", "down", "down", "right")


@pytest.mark.parametrize(
    "text",
    [
        _SMALL,
        _SMALL.rstrip("\n"),
        f"\ufeff; 0\n{_SMALL}",
        _SMALL.replace("\n", "\r\n"),
        f"\n\n; a level\n;and more\n{_SMALL}   \n\n; the end",
    ],
)
def test_text_around_a_level_is_ignored(tmp_path: Path, text: str) -> None:
    assert read_levels(_write(tmp_path, text)) == ("#####\n#PXO#\n#___#\n#___#\n#####",)


def test_a_header_alone_separates_two_levels(tmp_path: Path) -> None:
    assert len(read_levels(_write(tmp_path, f"; 0\n{_SMALL}; 1\n{_SMALL}"))) == 2


def test_a_folder_is_read_in_the_order_of_names(tmp_path: Path) -> None:
    for name, row in (("010.txt", "# @$.#"), ("002.txt", "#@$ .#"), ("notes.md", "not a level"), ("1.txt", "#@ $.#")):
        (tmp_path / name).write_text(f"######\n{row}\n#    #\n#    #\n#    #\n######\n")
    assert [level.split("\n")[1] for level in read_levels(str(tmp_path))] == ["#PX_O#", "#_PXO#", "#P_XO#"]


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no levels in"),
        (_SMALL.replace("$", "x"), "line 1 has the unknown symbol 'x'; known are '# .*$@+'"),
        (f"; 0\n\n{_SMALL.replace('.', '+')}", "line 3 must have one player, got 2"),
        (_SMALL.replace(".", " "), "line 1 must have as many targets as boxes, got 1 boxes and 0 targets"),
        (_SMALL.replace("$.", "* "), "line 1 has no box, or is already solved"),
        (
            _SMALL.replace("#   #\n", "#   #\n" * 2, 1),
            "must be a square of 5 to 32 cells, got 6 lines of [5] characters",
        ),
        (_SMALL.replace("#   #\n", "#  #\n", 1), "must be a square of 5 to 32 cells, got 5 lines of [4, 5] characters"),
        (_SMALL.replace("#   #", "    #", 1), "line 1 is not enclosed by walls"),
        (
            f"{_SMALL}\n; 1\n######\n#@$. #\n#    #\n#    #\n#    #\n######\n",
            "line 8 has a different size from those before it: 6 instead of 5",
        ),
    ],
)
def test_a_fault_is_reported_with_its_line(tmp_path: Path, text: str, fault: str) -> None:
    path = _write(tmp_path, text)
    with pytest.raises(OptionError) as refused:
        read_levels(path)
    assert refused.value.option == "level_file"
    assert path in refused.value.reason
    assert fault in refused.value.reason


def test_bytes_that_are_not_text_are_refused(tmp_path: Path) -> None:
    (tmp_path / "levels.txt").write_bytes(_SMALL.encode().replace(b"$", b"\xff"))
    with pytest.raises(OptionError, match="line 1 has the unknown symbol"):
        read_levels(str(tmp_path / "levels.txt"))


def test_a_path_without_levels_is_refused(tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=r"level_file: cannot read .*gone\.txt: No such file or directory"):
        read_levels(str(tmp_path / "gone.txt"))
    with pytest.raises(OptionError, match=r"no levels in .*a folder with \*\.txt files"):
        read_levels(str(tmp_path))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    with (tmp_path / "levels.txt").open("wb") as file:
        file.truncate((128 << 20) + 1)  # a hole, which takes no place on the disk
    with pytest.raises(OptionError, match="has more than 128 MiB"):
        read_levels(str(tmp_path / "levels.txt"))


def _write(folder: Path, text: str) -> str:
    path = folder / "levels.txt"
    path.write_text(text, newline="", encoding="utf-8")
    return str(path)
