"""Physics: boards as text and boards as arrays follow the same rules, which are those of the game."""

from __future__ import annotations

import pytest

from envkit.environments.boards.physics import CODES, Physics
from envkit.environments.frozen_lake import LakeGame
from envkit.environments.sokoban import SokobanGame

LAKE, SOKOBAN = LakeGame.physics, SokobanGame.physics
EVERY_PHYSICS = pytest.mark.parametrize("physics", [LAKE, SOKOBAN], ids=["lake", "sokoban"])
EDGE_CODE = 7


@EVERY_PHYSICS
def test_boards_as_arrays_do_what_boards_as_text_do_for_every_pair_of_cells(physics: Physics) -> None:
    tables = physics.tables()
    compared = 0
    for player_code, player in enumerate(physics.symbols):
        if player not in physics.players:
            continue
        for ahead_code, ahead in enumerate(physics.symbols):
            for beyond_code in (*range(len(physics.symbols)), EDGE_CODE):
                beyond = "\n" if beyond_code == EDGE_CODE else physics.symbols[beyond_code]
                after = [player, ahead, beyond]
                gain = physics.move(after, 0, 1)
                pair = 8 * ahead_code + beyond_code
                assert tables.moves_K[pair] == (gain is not None)
                assert tables.gain_K[pair] == (gain or 0)
                left_code = tables.left_S[player_code + 8 * bool(tables.moves_K[pair])]
                assert physics.symbols[left_code] == after[0]
                assert physics.symbols[tables.ahead_K[pair]] == after[1]
                if beyond_code == EDGE_CODE:
                    assert tables.beyond_K[pair] == EDGE_CODE
                else:
                    assert physics.symbols[tables.beyond_K[pair]] == after[2]
                compared += 1
    assert compared == {6: 3 * 6 * 7, 7: 2 * 7 * 8}[len(physics.symbols)]


@EVERY_PHYSICS
def test_tables_hold_every_pair_of_codes_and_nothing_moves_where_there_is_no_symbol(physics: Physics) -> None:
    tables = physics.tables()
    for pair in range(CODES * CODES):
        if pair // CODES >= len(physics.symbols):
            assert not tables.moves_K[pair]
        if not tables.moves_K[pair]:
            assert (tables.ahead_K[pair], tables.beyond_K[pair]) == divmod(pair, CODES)
            assert tables.gain_K[pair] == 0
    fatal = [code for code in range(CODES) if tables.is_fatal_S[code]]
    assert [physics.symbols[code] for code in fatal] == list(physics.fatal)


def test_a_move_in_sokoban_has_exactly_these_effects() -> None:
    changes = {}
    for ahead in SOKOBAN.symbols:
        for beyond in f"{SOKOBAN.symbols}\n":
            cells = ["P", ahead, beyond]
            gain = SOKOBAN.move(cells, 0, 1)
            if gain is not None and cells[1:] != [ahead, beyond]:
                changes[ahead + beyond] = (cells[1] + cells[2], gain)
    walks = {f"{floor}{any_}": (f"{player}{any_}", 0) for floor, player in ("_P", "OS") for any_ in "#_O√XPS\n"}
    pushes = {"X_": ("PX", 0), "XO": ("P√", 1), "√_": ("SX", -1), "√O": ("S√", 0)}
    assert changes == walks | pushes


def test_a_move_on_the_lake_has_exactly_these_effects() -> None:
    arrivals = {"_": ("P", 0), "O": ("X", 0), "G": ("√", 1)}
    for ahead in LAKE.symbols:
        for beyond in f"{LAKE.symbols}\n":
            cells = ["P", ahead, beyond]
            gain = LAKE.move(cells, 0, 1)
            if ahead in arrivals:
                shown, wanted = arrivals[ahead]
                assert (gain, cells) == (wanted, ["_", shown, beyond])
            else:
                assert (gain, cells) == (None, ["P", ahead, beyond])


def test_the_player_is_found_whatever_it_stands_on() -> None:
    assert [SOKOBAN.find_player(board) for board in ("__P_", "S___", "##\n#P", "____", "")] == [2, 0, 4, -1, -1]
    assert [LAKE.find_player(board) for board in ("_X\n__", "__\n_√", "_G")] == [1, 4, -1]
