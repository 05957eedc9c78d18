"""Batches of board games in NumPy agree with single ones, step by step."""

from __future__ import annotations

import copy
import pickle
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode

import envkit
from envkit.errors import ConfigError, OptionError, StepOrderError, UsageError
from envkit.wiring.environments import VectorMode

COPIES = 7
STEPS = 60
SEEDS: Any = [2, None, 2**70, None, 5, 2, None]
MODES: tuple[VectorMode, ...] = ("native", "sync")
ANSWERS = [
    *(f"<answer>{move}</answer>" for move in ("up", "down", "left", "right", "UP ")),
    "\\boxed{left}",
    "right",
    "nothing",
    "<answer>up || up || left</answer>",
    "<answer>right||down</answer>",
    "<answer>right||dawn</answer>",
    "",
    "\N{SNOWMAN}" * 1000,
]
WAYS: list[dict[str, Any]] = [
    {},
    {"instructions": False, "format_penalty": 0.25},
    {"spaced": True},
    {"observation": "grid", "action": "index"},
    {"observation": "grid"},
    {"action": "index", "num_levels": 3},
    {"max_moves": 4, "actions_per_turn": 3, "num_levels": 40},
]
GAMES: list[tuple[str, dict[str, Any]]] = [
    ("FrozenLake-v0", {"slip": 0.4}),
    ("FrozenLake-v0", {"size": 3, "symbols": "ab☃def", "max_moves": 3}),
    ("FrozenLake-v0", {"size": 7, "split": "train"}),
    ("Sokoban-v0", {}),
    ("Sokoban-v0", {"size": 7, "boxes": 2, "max_moves": 6, "moves": [1, 4], "reward": "sparse", "symbols": "W.GCBA@"}),
]


@pytest.mark.parametrize(
    ("game", "way"),
    [*((0, way) for way in range(len(WAYS))), (1, 0), (2, 5), (3, 1), (3, 3), (3, 6), (4, 0), (4, 4)],
)
def test_native_vectors_play_like_single_copies(game: int, way: int) -> None:
    (env_id, options), changes = GAMES[game], WAYS[way]
    autoreset = (AutoresetMode.NEXT_STEP, AutoresetMode.SAME_STEP)[(game + way) % 2]
    results = [_play(env_id, mode, autoreset, {**options, **changes}) for mode in ("native", "sync")]
    for step, (native, sync) in enumerate(zip(*results, strict=True)):
        _assert_same(native, sync, f"step {step}")


def _play(env_id: str, mode: VectorMode, autoreset: AutoresetMode, options: dict[str, Any]) -> list[Any]:
    """Return all results of 60 steps, including two resets."""
    vector = envkit.make_vec(env_id, COPIES, mode=mode, autoreset=autoreset, **options)
    act = _actor(options)
    rng = random.Random(3)
    try:
        results: list[Any] = [vector.reset(seed=11)]
        for step in range(STEPS):
            if step == 20:
                results.append(vector.reset())
            if step == 35:
                results.append(vector.reset(seed=SEEDS))
            results.append(vector.step(act(rng)))
        assert vector.single_observation_space.contains(results[0][0][0])
    finally:
        vector.close()
    return results


def _actor(options: dict[str, Any]) -> Callable[[random.Random], Any]:
    if options.get("action") == "index":
        return lambda rng: np.array([rng.choice([0, 1, 2, 3, 3, -1, 4, 2**40]) for _ in range(COPIES)])
    return lambda rng: tuple(rng.choice(ANSWERS) for _ in range(COPIES))


def _assert_same(one: Any, other: Any, where: str) -> None:
    assert type(one) is type(other), where
    if isinstance(one, dict):
        assert set(one) == set(other), where
        for key, value in one.items():
            _assert_same(value, other[key], f"{where} {key}")
    elif isinstance(one, (tuple, list)):
        assert len(one) == len(other), where
        for part, same in zip(one, other, strict=True):
            _assert_same(part, same, where)
    elif isinstance(one, np.ndarray) and one.dtype == object:
        _assert_same(list(one), list(other), where)
    elif isinstance(one, np.ndarray):
        assert one.dtype == other.dtype, where
        assert np.array_equal(one, other), (where, one, other)
    else:
        assert one == other, where


@pytest.mark.parametrize("env_id", ["FrozenLake-v0", "Sokoban-v0"])
@pytest.mark.parametrize("options", [{}, {"observation": "grid", "action": "index"}])
def test_only_the_masked_copies_start_again(env_id: str, options: dict[str, Any]) -> None:
    results = []
    for mode in MODES:
        vector = envkit.make_vec(env_id, COPIES, mode=mode, autoreset="Disabled", max_moves=3, **options)
        act, rng = _actor(options), random.Random(1)
        steps: list[Any] = [vector.reset(seed=4)]
        over = np.zeros(COPIES, np.bool_)
        for step in range(40):
            if over.any():
                seed: Sequence[int | None] | None = [step * 7 + copy for copy in range(COPIES)] if step % 3 else None
                steps.append(vector.reset(seed=seed, options={"reset_mask": over.copy()}))  # type: ignore[arg-type]
            steps.append(vector.step(act(rng)))
            over = steps[-1][2] | steps[-1][3]
        results.append(steps)
        vector.close()
    _assert_same(results[0], results[1], "")


@pytest.mark.parametrize("autoreset", list(AutoresetMode))
def test_the_grids_of_a_step_do_not_change_later(autoreset: AutoresetMode) -> None:
    vector = envkit.make_vec("FrozenLake-v0", COPIES, autoreset=autoreset, observation="grid", action="index")
    first, _ = vector.reset(seed=0)
    kept = first.copy()
    vector.step(np.zeros(COPIES, np.int64))
    assert np.array_equal(first, kept)


def test_the_array_of_actions_is_not_modified() -> None:
    vector = envkit.make_vec("FrozenLake-v0", COPIES, max_moves=1, action="index")
    actions = np.array([0, 1, 2, 3, -5, 99, 2])
    kept = actions.copy()
    vector.reset(seed=0)
    for _ in range(5):
        vector.step(actions)
    assert np.array_equal(actions, kept)


def test_options_without_native_support_are_refused_with_an_alternative() -> None:
    with pytest.raises(ConfigError, match="use 'sync' or 'async'"):
        envkit.make_vec("FrozenLake-v0", 2, mode="native", url="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match="must be one of 'NextStep', 'SameStep', 'Disabled'"):
        envkit.make_vec("FrozenLake-v0", 2, autoreset="never")
    with pytest.raises(ConfigError, match="mode: must be 'native', 'sync' or 'async'"):
        envkit.make_vec("FrozenLake-v0", 2, mode="threads")  # type: ignore[arg-type]


def test_misuse_raises_errors_with_the_cause() -> None:
    vector = envkit.make_vec("FrozenLake-v0", 3, autoreset="Disabled", max_moves=1)
    with pytest.raises(StepOrderError, match="before reset"):
        vector.step(("up",) * 3)
    with pytest.raises(UsageError, match="3 copies, got 2 seeds"):
        vector.reset(seed=SEEDS[:2])
    with pytest.raises(UsageError, match="integers of at least 0, got -1"):
        vector.reset(seed=-1)
    with pytest.raises(UsageError, match="reset_mask"):
        vector.reset(options={"reset_mask": np.zeros(3, np.bool_)})
    with pytest.raises(OptionError, match="size: reset cannot change it in native mode"):
        vector.reset(options={"size": 5, "max_moves": 1})
    vector.reset(seed=0)
    with pytest.raises(UsageError, match="3 copies, got 2 actions"):
        vector.step(("up", "up"))
    with pytest.raises(UsageError, match="must be strings"):
        vector.step((1, 2, 3))
    vector.step(("up",) * 3)
    with pytest.raises(StepOrderError, match=r"copies \[0, 1, 2\] have ended"):
        vector.step(("up",) * 3)
    numbers = envkit.make_vec("FrozenLake-v0", 3, action="index")
    numbers.reset(seed=0)
    with pytest.raises(UsageError, match="must be integers"):
        numbers.step(np.zeros(3))


def test_without_a_seed_copies_and_vectors_differ() -> None:
    one, other = (envkit.make_vec("FrozenLake-v0", 5, size=6, instructions=False).reset()[0] for _ in range(2))
    assert len({*one, *other}) == 10


def test_every_copy_is_rendered() -> None:
    vector = envkit.make_vec("FrozenLake-v0", 2, render_mode="rgb_array")
    vector.reset(seed=0)
    frames = vector.render()
    assert frames is not None
    single = envkit.make("FrozenLake-v0", render_mode="rgb_array")
    single.reset(seed=1)
    assert np.array_equal(frames[1], single.render())  # type: ignore[arg-type]


@pytest.mark.parametrize(("env_id", "options"), [GAMES[0], GAMES[3]])
@pytest.mark.parametrize("way", [{}, {"observation": "grid", "action": "index"}], ids=["text", "grid"])
def test_pickled_vectors_continue_identically(env_id: str, options: dict[str, Any], way: dict[str, Any]) -> None:
    vector = envkit.make_vec(env_id, COPIES, **{**options, "max_moves": 8, **way})
    act, rng = _actor(way), random.Random(5)
    vector.reset(seed=3)
    for _ in range(5):
        vector.step(act(rng))
    others = [copy.deepcopy(vector), pickle.loads(pickle.dumps(vector))]
    for step in range(30):
        actions = act(rng)
        expected = vector.step(actions)
        for other in others:
            _assert_same(expected, other.step(actions), f"step {step}")


def test_a_room_may_hold_hundreds_of_boxes(tmp_path: Path) -> None:
    side, boxes = 32, 256  # and one more; after its push the number left does not fit into a byte
    cells = "$" * boxes + "." * boxes + "@$."
    inside = [cells[at : at + side - 2].ljust(side - 2) for at in range(0, len(cells), side - 2)]
    inside += [" " * (side - 2)] * (side - 2 - len(inside))
    rows = ["#" * side, *(f"#{row}#" for row in inside), "#" * side]
    room = tmp_path / "room.txt"
    room.write_text("\n".join(["; 0", *rows, ""]))
    vector = envkit.make_vec("Sokoban-v0", 2, mode="native", action="index", level_file=str(room))
    vector.reset(seed=0)
    _, rewards, terminated, _, infos = vector.step(np.array([3, 0]))
    assert rewards.tolist() == [0.9, -0.1]
    assert terminated.tolist() == [False, False]
    assert infos["success"].tolist() == [False, False]


@pytest.mark.parametrize("mode", MODES)
def test_a_refused_reset_counts_no_episode(mode: VectorMode) -> None:
    results = []
    for refused in (True, False):
        vector = envkit.make_vec("Sokoban-v0", 2, mode=mode)
        vector.reset(seed=4)
        if refused:
            with pytest.raises(OptionError, match="moves"):
                vector.reset(seed=9, options={"moves": [90, 95], "max_moves": 10})
            with pytest.raises(StepOrderError):
                vector.step(("up", "up"))
        results.append(vector.reset())
    _assert_same(results[0], results[1], "")
