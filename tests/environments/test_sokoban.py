"""Sokoban's rules and rewards, on rooms drawn by hand."""

from __future__ import annotations

import pytest

from envkit.environments.board import UNREADABLE, find_board
from envkit.environments.sokoban import Sokoban, SokobanExpert, play
from envkit.environments.sokoban.rules import is_solved, reward_of
from envkit.types import Observation


@pytest.mark.parametrize(
    ("row", "move", "after"),
    [
        ("#_P__#", "right", "#__P_#"),
        ("#_P__#", "left", "#P___#"),
        ("#_PX_#", "right", "#__PX#"),
        ("#OPX_#", "left", "#S_X_#"),
        ("#SX__#", "right", "#OPX_#"),
        ("#_PXO#", "right", "#__P√#"),
        ("#P√__#", "right", "#_SX_#"),
        ("#P√O_#", "right", "#_S√_#"),
        ("#S√O_#", "right", "#OS√_#"),
        ("#__X_P#", "left", "#__XP_#"),
        ("#_X_S#", "left", "#_XPO#"),
    ],
)
def test_a_move_walks_or_pushes_one_cell(row: str, move: str, after: str) -> None:
    wall = "#" * len(row)
    assert play(f"{wall}\n{row}\n{wall}", move) == f"{wall}\n{after}\n{wall}"


@pytest.mark.parametrize("row", ["#P#__#", "#_PXX_#", "#_PX√_#", "#_P√X_#", "#__PX#", "#__P√#", "#__PX#_#", "#_S√#"])
def test_what_stands_in_the_way_stays(row: str) -> None:
    wall = "#" * len(row)
    room = f"{wall}\n{row}\n{wall}"
    assert play(room, "right") is room


def test_moves_up_and_down_follow_the_columns() -> None:
    room = "####\n#_O#\n#_X#\n#_P#\n#__#\n####"
    assert play(room, "up") == "####\n#_√#\n#_P#\n#__#\n#__#\n####"
    assert play(room, "down") == "####\n#_O#\n#_X#\n#__#\n#_P#\n####"
    assert play(play(room, "up"), "up") == play(room, "up")


@pytest.mark.parametrize(
    ("before", "after", "reward"),
    [
        ("#PX_X_#", "#_PXX_#", -0.1),  # a push that changes no target
        ("#PXOX_#", "#_P√X_#", 0.9),  # onto a target
        ("#P√_X_#", "#_SXX_#", -1.1),  # off a target
        ("#P√OX_#", "#_S√X_#", -0.1),  # from one target to the next
        ("#PXO#", "#_P√#", 10.9),  # the solution
    ],
)
def test_rewards_are_those_of_the_literature(before: str, after: str, reward: float) -> None:
    assert reward_of(before, after) == pytest.approx(reward)


def test_a_room_is_solved_when_no_box_is_away_from_a_target() -> None:
    assert is_solved("#P√√#")
    assert is_solved("#S√O#")
    assert not is_solved("#P√X#")


def test_an_episode_by_hand_is_paid_drawn_and_ended() -> None:
    # Seed 0 is pinned: a change of this room is a change of every recorded result.
    env = Sokoban(instructions=False)
    start, info = env.reset(seed=0)
    assert start == "######\n##___#\n##_XP#\n###__#\n##O__#\n######"
    assert info == {"success": False, "legal_moves": ["up", "down", "left", "right"], "level": {"shortest": 7}}

    answers = [env.step(f"<answer>{move}</answer>") for move in ("up", "left", "down", "down", "right", "down", "left")]
    assert [answer[0].split("\n")[1:-1] for answer in answers] == [
        ["##__P#", "##_X_#", "###__#", "##O__#"],
        ["##_P_#", "##_X_#", "###__#", "##O__#"],
        ["##___#", "##_P_#", "###X_#", "##O__#"],
        ["##___#", "##___#", "###P_#", "##OX_#"],
        ["##___#", "##___#", "###_P#", "##OX_#"],
        ["##___#", "##___#", "###__#", "##OXP#"],
        ["##___#", "##___#", "###__#", "##√P_#"],
    ]
    assert [answer[1] for answer in answers] == pytest.approx([-0.1] * 6 + [10.9])
    assert [answer[2:4] for answer in answers] == [(False, False)] * 6 + [(True, False)]
    assert answers[-1][4] == {
        "action_is_valid": True,
        "action_is_effective": True,
        "success": True,
        "legal_moves": ["up", "down", "left", "right"],
    }


def test_a_blocked_push_is_valid_and_not_effective_and_costs_a_move() -> None:
    env = Sokoban(instructions=False)
    before, _ = env.reset(seed=0)
    after, reward, *_, info = env.step("\\boxed{right}")
    assert (after, reward) == (before, -0.1)
    assert (info["action_is_valid"], info["action_is_effective"]) == (True, False)


def test_an_unreadable_answer_is_noticed_and_fined_as_asked() -> None:
    env = Sokoban(format_penalty=0.15)
    board = find_board(env.reset(seed=0)[0])
    observation, reward, *_, info = env.step("push it")
    assert observation == f"{UNREADABLE}\n{board}"
    assert reward == -0.25
    assert (info["action_is_valid"], info["action_is_effective"]) == (False, False)

    env.reset(seed=0, options={"instructions": False, "format_penalty": 0})
    assert env.step("push it")[:2] == (board, -0.1)


def test_solving_with_the_last_move_is_an_end_and_no_truncation() -> None:
    env, expert = Sokoban(max_moves=7, min_solution=7), SokobanExpert()
    text, _ = env.reset(seed=0)
    ends = []
    for _ in range(7):
        text, *_, terminated, truncated, _ = env.step(expert.answer(expert.moves(Observation(text))[0]))
        ends.append((terminated, truncated))
    assert ends == [(False, False)] * 6 + [(True, False)]


def test_rendering_shows_the_room_as_it_is_now() -> None:
    env = Sokoban(render_mode="ansi")
    env.reset(seed=0)
    assert env.render() == "######\n##___#\n##_XP#\n###__#\n##O__#\n######"
    env.step("<answer>up</answer>")
    assert env.render() == "######\n##__P#\n##_X_#\n###__#\n##O__#\n######"


def test_the_move_limit_truncates() -> None:
    env = Sokoban(max_moves=3)
    env.reset(seed=1)
    assert [env.step("nothing")[2:4] for _ in range(3)] == [(False, False), (False, False), (False, True)]


def test_the_rules_name_what_the_player_must_know() -> None:
    text, _ = Sokoban(max_moves=21).reset(seed=0)
    rules, _, board = text.rpartition("\n\n")
    for word in ("P is you", "S is you on a target", "# is a wall", "_ is floor", "X is a box", "O is a target"):
        assert word in rules
    for word in ("√ is a box on a target", "<answer>up</answer>", "21 moves"):
        assert word in rules
    assert board == Sokoban(instructions=False, max_moves=21).reset(seed=0)[0]
