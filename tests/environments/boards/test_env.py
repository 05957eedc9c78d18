"""Single board games: observations, actions, and several moves in one answer."""

from __future__ import annotations

import random
from itertools import product
from typing import Any

import gymnasium
import numpy as np
import pytest
from gymnasium.spaces import Box, Discrete
from gymnasium.utils.env_checker import check_env

import envkit
from envkit.environments.board import MOVES, UNREADABLE, find_board
from envkit.environments.frozen_lake import FrozenLake
from envkit.environments.sokoban import Sokoban
from envkit.errors import OptionError, StepOrderError, UsageError

SYMBOLS = {"FrozenLake-v0": "_OGPX√", "Sokoban-v0": "#_O√XPS"}
GAMES = pytest.mark.parametrize("env_id", list(SYMBOLS))
FACES: list[dict[str, Any]] = [
    {"observation": seen, "action": done} for seen, done in product(("text", "grid"), ("text", "index"))
]
BOTH = pytest.mark.parametrize(
    ("env_id", "options"),
    [
        ("FrozenLake-v0", {"slip": 0.5, "size": 6}),
        ("FrozenLake-v0", {"map": "8x8", "max_moves": 30}),
        ("Sokoban-v0", {}),
        ("Sokoban-v0", {"size": 8, "boxes": 3, "reward": "sparse", "max_moves": 25}),
    ],
)


def _grid(text: str, env_id: str) -> list[list[int]]:
    """Return the codes of the board that an observation ends with; written without the code that is tested."""
    return [[SYMBOLS[env_id].index(sign) for sign in row] for row in find_board(text).split("\n")]


def _answers(number: int) -> dict[str, Any]:
    """Return an action of either kind; 4 and above are no moves."""
    word = MOVES[number] if number < len(MOVES) else "jump"
    return {"text": f"<answer>{word}</answer>", "index": number if number % 2 else np.int64(number)}


@BOTH
def test_every_observation_and_action_kind_shows_the_same_episodes(env_id: str, options: dict[str, Any]) -> None:
    rng = random.Random(5)
    envs = [envkit.make(env_id, format_penalty=0.25, **face, **options) for face in FACES]
    lengths = []
    for seed in (*range(12), None, None, None):
        starts = [env.reset(seed=seed) for env in envs]
        _assert_alike(envs, env_id, starts)
        ended, length = False, 0
        while not ended:
            actions = _answers(rng.choice((0, 1, 2, 3, 0, 1, 2, 3, 4)))
            steps = [env.step(actions[face["action"]]) for face, env in zip(FACES, envs, strict=True)]
            _assert_alike(envs, env_id, steps)
            ended, length = steps[0][2] or steps[0][3], length + 1
        lengths.append(length)
    assert sum(lengths) > 60


def _assert_alike(envs: list[gymnasium.Env[Any, Any]], env_id: str, results: list[Any]) -> None:
    grid = _grid(results[0][0], env_id)
    for face, env, (seen, *rest) in zip(FACES, envs, results, strict=True):
        assert env.observation_space.contains(seen)
        assert rest == list(results[0][1:])
        if face["observation"] == "grid":
            assert (seen.dtype, seen.shape) == (np.uint8, (len(grid), len(grid)))
            assert seen.tolist() == grid
        else:
            assert seen == results[0][0]


@GAMES
def test_spaces_contain_the_observations_and_actions(env_id: str) -> None:
    side, codes = {"FrozenLake-v0": (4, 6), "Sokoban-v0": (6, 7)}[env_id]
    env = envkit.make(env_id, observation="grid", action="index")
    assert env.observation_space == Box(0, codes - 1, (side, side), np.uint8)
    assert env.action_space == Discrete(4)
    larger = envkit.make(env_id, observation="grid", size=9)
    assert larger.observation_space.shape == (9, 9)
    assert larger.action_space.contains("<answer>up</answer>")
    assert envkit.make(env_id).observation_space.contains("any text\n\N{SNOWMAN}")


@GAMES
def test_the_rules_of_the_largest_board_belong_to_the_space(env_id: str) -> None:
    size = {"FrozenLake-v0": 32, "Sokoban-v0": 15}[env_id]
    env = envkit.make(env_id, size=size, actions_per_turn=100, max_moves=10_000)
    text, _ = env.reset(seed=0)
    assert find_board(text).count("\n") == size - 1
    assert env.observation_space.contains(text)


@GAMES
def test_a_grid_does_not_change_with_later_steps(env_id: str) -> None:
    env = envkit.make(env_id, observation="grid", action="index")
    first, _ = env.reset(seed=0)
    kept = first.tolist()
    for number in (0, 2, 1, 3):
        second, *_ = env.step(number)
        second[:] = 0  # nor does writing into one change the game
    env.reset(seed=0)
    assert first.tolist() == kept
    assert env.reset(seed=0)[0].tolist() == kept


@pytest.mark.parametrize("index", [-1, 4, -(10**30), 10**30, np.int64(-3), np.uint64(2**63)])
def test_an_index_out_of_range_is_invalid_and_costs_a_move(index: Any) -> None:
    env = envkit.make("Sokoban-v0", action="index", max_moves=2, format_penalty=0.5)
    board = find_board(env.reset(seed=0)[0])
    for late in (False, True):
        seen, reward, terminated, truncated, info = env.step(index)
        assert (seen, terminated, truncated) == (f"{UNREADABLE}\n{board}", False, late)
        assert reward == pytest.approx(-0.1 - 0.5)
        assert (info["action_is_valid"], info["action_is_effective"], info["success"]) == (False, False, False)


@pytest.mark.parametrize("up", [0, False, np.int64(0), np.uint8(0), np.array(0)])
def test_integers_of_any_kind_are_moves(up: Any) -> None:
    env, other = (envkit.make("Sokoban-v0", action=action) for action in ("index", "text"))
    env.reset(seed=6)
    other.reset(seed=6)
    assert env.step(up) == other.step("<answer>up</answer>")


@pytest.mark.parametrize(
    ("action", "wrong", "hint"),
    [
        *(
            ("text", wrong, "must be text, .*action='index'")
            for wrong in (0, None, b"up", ["up"], ("up",), np.int64(1))
        ),
        *(
            ("index", wrong, "must be an integer, .*action='text'")
            for wrong in ("up", "0", 1.0, None, [1], np.zeros(1))
        ),
        ("index", np.float32(1), "must be an integer"),
        ("index", np.array([1]), "must be an integer"),
    ],
)
def test_an_action_of_the_wrong_kind_is_a_usage_error(action: str, wrong: Any, hint: str) -> None:
    env = envkit.make("FrozenLake-v0", action=action, max_moves=1)
    env.reset(seed=0)
    with pytest.raises(UsageError, match=f"(?s){hint}"):
        env.step(wrong)
    assert env.step(_answers(4)[action])[3] is True  # the only move was not taken


@GAMES
def test_all_grids_of_one_environment_have_one_size(env_id: str) -> None:
    env = envkit.make(env_id, observation="grid", size=7)
    with pytest.raises(OptionError, match=r"^size: must stay 7 for grid observations, got 6$"):
        env.reset(seed=0, options={"size": 6})
    assert env.reset(seed=0, options={"size": 7, "max_moves": 12})[0].shape == (7, 7)
    if env_id == "FrozenLake-v0":
        with pytest.raises(OptionError, match=r"^size: "):
            env.reset(seed=0, options={"map": "4x4", "size": None})


@GAMES
def test_every_render_mode_shows_the_board_as_it_is_now(env_id: str) -> None:
    symbols = "abcdefg"[: len(SYMBOLS[env_id])]
    side = {"FrozenLake-v0": 4, "Sokoban-v0": 6}[env_id]
    shown: dict[str | None, tuple[Any, Any]] = {}
    for mode in (None, "text", "ansi", "rgb_array"):
        env = envkit.make(env_id, render_mode=mode, symbols=symbols, instructions=False)
        assert (env.render_mode, env.render()) == (mode, None)
        before, _ = env.reset(seed=0)
        first = env.render()
        after, *_ = env.step("<answer>up</answer>")
        assert before != after
        shown[mode] = (first, env.render())
    assert shown[None] == (None, None)
    assert shown["text"] == (before, after)
    for picture, board in zip(shown["ansi"], (before, after), strict=True):
        assert isinstance(picture, str)
        assert "\x1b[" in picture
        assert all(sign in picture for sign in set(board))
    one, other = (np.asarray(frame) for frame in shown["rgb_array"])
    assert one.dtype == np.uint8
    assert one.shape == (32 * side, 32 * side, 3)
    boards = (before.split("\n"), after.split("\n"))
    is_repainted = (one != other).reshape(side, 32, side, 32, 3).any(axis=(1, 3, 4))
    is_changed = [[old != new for old, new in zip(*rows, strict=True)] for rows in zip(*boards, strict=True)]
    assert is_repainted.tolist() == is_changed


@GAMES
@pytest.mark.parametrize("face", FACES, ids=lambda face: "-".join(face.values()))
def test_every_observation_and_action_kind_passes_gymnasiums_checker(env_id: str, face: dict[str, Any]) -> None:
    check_env(gymnasium.make(f"envkit/{env_id}", render_mode="rgb_array", **face).unwrapped)


@BOTH
def test_several_moves_in_one_answer_are_those_moves_one_after_another(env_id: str, options: dict[str, Any]) -> None:
    rng = random.Random(9)
    together = envkit.make(env_id, actions_per_turn=5, instructions=False, **options)
    single = envkit.make(env_id, instructions=False, **options)
    for seed in range(40):
        assert together.reset(seed=seed) == single.reset(seed=seed)
        ended = False
        while not ended:
            moves = rng.choices(MOVES, k=rng.randint(1, 6))
            turn = together.step(f"<answer>{' || '.join(moves)}</answer>")
            steps = []
            for move in moves[:5]:
                steps.append(single.step(f"<answer>{move}</answer>"))
                if steps[-1][2] or steps[-1][3]:
                    break
            assert turn[0] == steps[-1][0]
            assert turn[1] == pytest.approx(sum(float(step[1]) for step in steps))
            assert turn[2:4] == steps[-1][2:4]
            effective = any(step[4]["action_is_effective"] is True for step in steps)
            assert turn[4] == {**steps[-1][4], "action_is_effective": effective}
            ended = turn[2] or turn[3]


def test_moves_beyond_the_limit_of_a_turn_are_not_played_but_must_be_moves() -> None:
    env = Sokoban(actions_per_turn=2, instructions=False)
    env.reset(seed=0)
    seen, reward, *_, info = env.step("<answer>up || left || down || down</answer>")
    assert seen.split("\n")[1:-1] == ["##_P_#", "##_X_#", "###__#", "##O__#"]
    assert reward == pytest.approx(-0.2)
    assert (info["action_is_valid"], info["action_is_effective"]) == (True, True)

    same, reward, *_, info = env.step("<answer>down || down || dawn</answer>")
    assert (same, reward) == (seen, -0.1)
    assert (info["action_is_valid"], info["action_is_effective"]) == (False, False)


def test_a_turn_ends_with_the_episode() -> None:
    env = FrozenLake(actions_per_turn=9, instructions=False)
    env.reset(seed=3)
    results = env.step("<answer>right||up||up||right||up||down||down||down</answer>")
    assert results[:4] == ("_O_√\n____\n_O__\n____", 1.0, True, False)
    assert results[4]["success"] is True
    with pytest.raises(StepOrderError):
        env.step("<answer>up</answer>")

    env.reset(seed=3)
    assert env.step("<answer>up || up || right</answer>")[:4] == ("_O_G\n____\n_X__\n____", 0.0, True, False)
