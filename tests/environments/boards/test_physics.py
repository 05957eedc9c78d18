"""Physics: boards as text and boards as arrays follow the same rules, which are those of the game."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from envkit.environments.board import MOVES
from envkit.environments.boards.physics import CODES, Physics
from envkit.environments.frozen_lake import LakeGame
from envkit.environments.sokoban import SokobanGame

LAKE, SOKOBAN = LakeGame.physics, SokobanGame.physics
EVERY_PHYSICS = pytest.mark.parametrize("physics", [LAKE, SOKOBAN], ids=["lake", "sokoban"])
STEPS = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
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


@EVERY_PHYSICS
def test_a_player_is_never_walked_over(physics: Physics) -> None:
    for player in physics.players:
        for other in physics.players:
            for beyond in f"{physics.symbols}\n":
                cells = [player, other, beyond]
                assert physics.move(cells, 0, 1) is None
                assert cells == [player, other, beyond]


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


class Model:
    """Sokoban written again, with sets of cells."""

    def __init__(self, board: str) -> None:
        at = {(row, column): sign for row, line in enumerate(board.split("\n")) for column, sign in enumerate(line)}
        self.cells = list(at)
        self.walls = {cell for cell, sign in at.items() if sign == "#"}
        self.targets = {cell for cell, sign in at.items() if sign in "O√S"}
        self.boxes = {cell for cell, sign in at.items() if sign in "X√"}
        [self.player] = [cell for cell, sign in at.items() if sign in "PS"]

    def play(self, move: str) -> None:
        down, right = STEPS[move]
        ahead = self.player[0] + down, self.player[1] + right
        beyond = ahead[0] + down, ahead[1] + right
        if ahead in self.walls or (ahead in self.boxes and beyond in self.walls | self.boxes):
            return
        if ahead in self.boxes:
            self.boxes = self.boxes - {ahead} | {beyond}
        self.player = ahead

    def draw(self) -> str:
        side = max(self.cells)[0] + 1
        return "\n".join("".join(self._sign((row, column)) for column in range(side)) for row in range(side))

    def _sign(self, cell: tuple[int, int]) -> str:
        if cell in self.walls:
            return "#"
        signs = "X√" if cell in self.boxes else "PS" if cell == self.player else "_O"
        return signs[cell in self.targets]


@st.composite
def rooms(draw: st.DrawFn, side: int | None = None) -> str:
    """Any room enclosed by walls, with one player; it need not be solvable."""
    side = draw(st.integers(4, 9)) if side is None else side
    inside = draw(st.lists(st.sampled_from("____##XXOO√"), min_size=(side - 2) ** 2, max_size=(side - 2) ** 2))
    inside[draw(st.integers(0, len(inside) - 1))] = draw(st.sampled_from("PS"))
    rows = ["".join(inside[start : start + side - 2]) for start in range(0, len(inside), side - 2)]
    return "\n".join(["#" * side, *(f"#{row}#" for row in rows), "#" * side])


MANY_MOVES = st.lists(st.sampled_from(MOVES), min_size=1, max_size=40)


@settings(deadline=None)
@given(rooms(), MANY_MOVES)
def test_sokoban_agrees_with_an_implementation_on_sets_of_cells(room: str, moves: list[str]) -> None:
    model = Model(room)
    for move in moves:
        model.play(move)
        room = SOKOBAN.play(room, move)
        assert room == model.draw()
