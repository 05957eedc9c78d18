"""The frozen lake, on maps drawn by hand and on random maps."""

from __future__ import annotations

from collections import deque

import pytest

import envkit
from envkit.environments.board import MOVES, find_board
from envkit.environments.boards.slip_noise import SIDES, slipped
from envkit.environments.counter_rng import chance
from envkit.environments.frozen_lake import FrozenLake, FrozenLakeExpert, LakeGame, LakeOptions, draw_lake
from envkit.types import JSON, Observation
from envkit.wiring.environments import open_expert

PHYSICS = LakeGame.physics
POND: JSON = ["FFF", "FSF", "FGF"]
"""The player stands in the middle, ice on three sides and the goal below."""


def _put(ice: str, cell: int) -> str:
    return f"{ice[:cell]}P{ice[cell + 1 :]}"


@pytest.mark.parametrize(
    ("move", "number", "way"),
    [
        ("up", 0.19, "right"),
        ("up", 0.2, "up"),
        ("up", 0.79, "up"),
        ("up", 0.8, "left"),
        ("down", 0.1, "left"),
        ("left", 0.1, "up"),
        ("right", 0.9, "up"),
    ],
)
def test_slipping_goes_to_each_side_for_half_of_its_chance(move: str, number: float, way: str) -> None:
    assert slipped(move, 0.4, number) == way


@pytest.mark.parametrize("move", MOVES)
def test_without_slip_a_move_goes_straight_and_with_slip_one_it_never_does(move: str) -> None:
    numbers = [chance(7, count) for count in range(1000)]
    assert {slipped(move, 0.0, number) for number in numbers} == {move}
    assert {slipped(move, 1.0, number) for number in numbers} == set(SIDES[move])


def test_an_unreadable_answer_does_not_slip() -> None:
    env = FrozenLake(map=POND, slip=1.0, instructions=False)
    for seed in range(50):
        before, _ = env.reset(seed=seed)
        assert env.step("I go up")[0] == before


def test_move_number_t_slips_by_chance_number_t_of_the_seed() -> None:
    env = FrozenLake(size=9, frozen=1.0, slip=0.8, max_moves=50, instructions=False)
    board, _ = env.reset(seed=5)
    for count in range(50):
        if count == 7:  # an answer that cannot be read uses up a number, too
            board, *_ = env.step("what?")
            continue
        board = PHYSICS.play(board, slipped("up", 0.8, chance(5, count)))
        answer = env.step("<answer>up</answer>")
        assert answer[0] == board
        if answer[2]:
            break
    assert count > 20


def test_a_hole_ends_the_episode_without_reward() -> None:
    env = FrozenLake(instructions=False)
    env.reset(seed=3)
    observation, reward, terminated, truncated, info = env.step("<answer>up</answer>")
    assert (observation, reward, terminated, truncated) == ("_O_G\n____\n_X__\n____", 0.0, True, False)
    assert info == {
        "action_is_valid": True,
        "action_is_effective": True,
        "success": False,
        "legal_moves": ["up", "down", "left", "right"],
    }


def test_reaching_the_goal_with_the_last_move_terminates_without_truncation() -> None:
    env = FrozenLake(max_moves=5)
    env.reset(seed=3)
    for move in ("right", "up", "up", "right"):
        env.step(f"<answer>{move}</answer>")
    assert env.step("<answer>up</answer>")[1:4] == (1.0, True, False)

    env.reset(seed=3)
    for _ in range(4):
        assert env.step("<answer>down</answer>")[2:4] == (False, False)
    assert env.step("<answer>down</answer>")[1:4] == (0.0, False, True)


@pytest.mark.parametrize(("size", "frozen"), [(2, 0.8), (4, 0.8), (4, 0.5), (6, 0.8), (8, 0.7)])
def test_the_expert_solves_all_levels_within_the_move_limit(size: int, frozen: float) -> None:
    limit = LakeOptions(size=size, frozen=frozen).move_limit
    expert = FrozenLakeExpert()
    for seed in range(100):
        lake = draw_lake(seed, size, frozen, limit, None)
        assert lake.shortest <= limit
        assert lake.board.count("G") == lake.board.count("P") == 1
        ice = lake.board.replace("P", "_")
        distance = _distances_to_goal(ice)
        assert distance[lake.board.find("P")] == lake.shortest
        for cell in distance:
            if ice[cell] == "_":
                board = _put(ice, cell)
                nearer = [
                    move
                    for move in MOVES
                    if distance.get(PHYSICS.find_player(PHYSICS.play(board, move))) == distance[cell] - 1
                ]
                assert list(expert.moves(Observation(board))) == nearer


def test_levels_at_the_defaults_have_the_documented_lengths() -> None:
    lengths = sorted(draw_lake(seed, 4, 0.8, 10, None).shortest for seed in range(3000))
    assert (lengths[0], lengths[1500]) == (1, 3)
    assert 8 <= lengths[-1] <= 10
    assert lengths.count(1) / 3000 == pytest.approx(0.212, abs=0.02)


def test_the_level_does_not_depend_on_slip_rules_penalty_symbols_or_turns() -> None:
    env = FrozenLake(instructions=False)
    plain = env.reset(seed=9)[0]
    changes = {"slip": 0.5, "instructions": True, "format_penalty": 1.0, "actions_per_turn": 4}
    assert find_board(env.reset(seed=9, options=changes)[0]) == plain
    shown = env.reset(seed=9, options={"symbols": "abcdef"})[0]
    assert shown.translate(str.maketrans("abcdef", "_OGPX√")) == plain


@pytest.mark.parametrize("text", ["", "hello", "P", "__\nP_", "P#\n_G", "P_\n_X", "P_\nG", "√_\n__"])
def test_the_expert_has_no_move_where_there_is_nothing_to_play(text: str) -> None:
    assert list(FrozenLakeExpert().moves(Observation(text))) == []
    assert not FrozenLakeExpert().is_hazardous(Observation(text))


def test_the_expert_has_no_move_where_holes_close_every_way() -> None:
    assert list(FrozenLakeExpert().moves(Observation("OG\nPO\n"))) == []


def test_on_gymnasiums_slippery_map_the_expert_wins_three_of_four_where_the_shortest_way_hardly_ever_does() -> None:
    wins = {}
    for slip in (2 / 3, 0.0):
        env, expert = envkit.make("GymnasiumFrozenLake-v0"), open_expert("GymnasiumFrozenLake-v0", {"slip": slip})
        wins[slip] = 0
        for seed in range(200):
            (text, info), ended = env.reset(seed=seed), False
            while not ended:
                text, _, terminated, truncated, info = env.step(expert.answer(expert.moves(Observation(text))[0]))
                ended = terminated or truncated
            wins[slip] += info["success"]
    assert wins[2 / 3] == pytest.approx(148, abs=18)  # three standard deviations around 74 of 100
    assert wins[0.0] <= 18


def test_the_expert_has_a_move_if_the_goal_is_hard_to_reach() -> None:
    # A ridge between holes: going sideways on purpose falls once in three times, going straight twice.
    ridge = "\n".join(["O" * 24] * 12 + ["P" + "_" * 22 + "G"] + ["O" * 24] * 11)
    assert list(FrozenLakeExpert(size=24, slip=2 / 3).moves(Observation(ridge))) == ["up", "down"]


def test_where_every_slip_is_harmless_the_slippery_way_is_the_shortest() -> None:
    seen = Observation("P__\n___\n__G")
    assert sorted(FrozenLakeExpert(slip=0.1).moves(seen)) == sorted(FrozenLakeExpert().moves(seen)) == ["down", "right"]


def test_next_to_a_hole_the_safe_way_is_away_from_it() -> None:
    assert list(FrozenLakeExpert(slip=0.5).moves(Observation("_O_\n_P_\nG__"))) == ["down"]


@pytest.mark.parametrize(
    ("board", "is_hazardous"),
    [
        ("P_G\nO__\n___", False),  # the hole is not on the way
        ("PO_\n___\n__G", True),
        ("P__\nO__\n__G", True),
        ("PO_\n___\nG__", False),
        ("G__\n__O\n__P", True),
        ("___\nGOP\n___", True),
        ("___\nG_P\nOOO", False),
    ],
)
def test_a_state_is_tricky_if_the_straight_path_has_a_hole(board: str, is_hazardous: bool) -> None:
    assert FrozenLakeExpert().is_hazardous(Observation(f"Rules.\n\n{board}")) is is_hazardous
    shown = board.translate(str.maketrans("_OGPX√", "OG_√PX"))  # the same signs with other meanings
    assert FrozenLakeExpert(symbols="OG_√PX").is_hazardous(Observation(f"Rules.\n\n{shown}")) is is_hazardous


def _distances_to_goal(ice: str) -> dict[int, int]:
    """Distance of every cell from which the goal can be reached; written without the code that is tested."""
    rows = ice.split("\n")
    [goal] = [(row, line.index("G")) for row, line in enumerate(rows) if "G" in line]
    found = {goal: 0}
    queue = deque([goal])
    while queue:
        row, column = queue.popleft()
        for there in ((row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)):
            inside = 0 <= there[0] < len(rows) and 0 <= there[1] < len(rows)
            if inside and rows[there[0]][there[1]] != "O" and there not in found:
                found[there] = found[row, column] + 1
                queue.append(there)
    return {row * (len(rows) + 1) + column: distance for (row, column), distance in found.items()}
