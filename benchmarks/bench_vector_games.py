"""What a step of 1,024 games at once costs: grids out and numbers in, beside envpool; and text both ways.

envpool's Sokoban plays one built-in level of 10x10 with four boxes and 120 moves in all its environments; envkit's has
as many boxes and moves, and draws from 1,000 levels. envpool's lake is the 4x4 map, always slippery, with 100 moves.
envpool is measured with one thread and with two, and the better of both per CPU-second counts. New levels at every
reset are only shown.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from itertools import cycle, islice
from typing import Any

import numpy as np
import peers
from timing import Claim, Play, Rates, check, measure

import envkit

ENVPOOL_SOKOBAN = ("envpool Sokoban-v0, 1 thread", "envpool Sokoban-v0, 2 threads")
ENVPOOL_LAKE = ("envpool FrozenLake-v1, 1 thread", "envpool FrozenLake-v1, 2 threads")
CLAIMS = (
    Claim("envkit Sokoban, 4 boxes", 5_000_000),
    Claim("envkit Sokoban, 4 boxes", 50, ENVPOOL_SOKOBAN),
    Claim("envkit FrozenLake, 4x4 map, slippery", 20, ENVPOOL_LAKE),
    Claim("envkit Sokoban, 1,024 in text", 3, ["envkit Sokoban, one in text"]),
)

NUM_ENVS = 1024
ANSWERS = ("<answer>up</answer>", "<answer>down</answer>", "<answer>left</answer>", "<answer>right</answer>")
ROOM: dict[str, Any] = {"size": 10, "boxes": 4, "max_moves": 120}
LAKE: dict[str, Any] = {"map": "4x4", "max_moves": 100}
SMALL: dict[str, Any] = {"size": 6, "boxes": 1, "max_moves": 10_000}
BATCHES = np.random.default_rng(0).integers(0, 4, (64, NUM_ENVS))
WARM_STEPS = 1_500
"""Enough that every one of 1,000 levels was drawn: 12 episodes in each environment."""
ROUNDS_OF_NEW_LEVELS = 3


def vector(env_id: str, warm_steps: int = 0, **options: Any) -> Play:
    """Step envkit's native environments with random numbers."""
    envs = envkit.make_vec(env_id, NUM_ENVS, mode="native", observation="grid", action="index", **options)
    envs.reset(seed=0)
    play = stepping(envs, list(BATCHES))
    play(warm_steps)
    return play


def episodes(moves: int, **options: Any) -> Play:
    """Play whole episodes, since random moves solve next to nothing and so all rooms begin again at once."""
    play = vector("Sokoban-v0", max_moves=moves, **options)
    return lambda times: play(times * (moves + 1))


def envpool(env_id: str, num_threads: int) -> Play:
    envs = import_module("envpool").make_gymnasium(env_id, num_envs=NUM_ENVS, num_threads=num_threads, seed=0)
    envs.reset()
    return stepping(envs, list(BATCHES.astype(np.int32)))


def vector_of_text() -> Play:
    envs = envkit.make_vec("Sokoban-v0", NUM_ENVS, mode="native", **SMALL)
    envs.reset(seed=0)
    return stepping(envs, [[ANSWERS[move] for move in batch] for batch in BATCHES])


def one_of_text() -> Play:
    env = envkit.make("Sokoban-v0", **SMALL)
    env.reset(seed=0)
    answers = cycle([ANSWERS[move] for move in BATCHES.ravel()])
    seeds = iter(range(1, 1 << 31))

    def play(times: int) -> int:
        for answer in islice(answers, times):
            _, _, terminated, truncated, _ = env.step(answer)
            if terminated or truncated:
                env.reset(seed=next(seeds))
        return times

    return play


def stepping(envs: Any, batches: list[Any]) -> Play:
    """Step all of `envs` with one of `batches` after the other; they start again by themselves."""
    following = cycle(batches)

    def play(times: int) -> int:
        for actions in islice(following, times):
            envs.step(actions)
        return times * NUM_ENVS

    return play


def main() -> None:
    told = peers.arguments(__doc__).parse_args()

    def compete(title: str, starts: dict[str, Callable[[], Play]], rounds: int = told.rounds) -> Rates:
        print(title)
        present = peers.those_present(starts)
        return measure(present, unit="steps", rounds=rounds, round_cpu_s=told.round_cpu_s)

    rates = {
        **compete(
            "Sokoban 10x10, 1,024 at once: grids and numbers",
            {
                "envkit Sokoban, 4 boxes": partial(vector, "Sokoban-v0", WARM_STEPS, num_levels=1000, **ROOM),
                ENVPOOL_SOKOBAN[0]: partial(envpool, "Sokoban-v0", 1),
                ENVPOOL_SOKOBAN[1]: partial(envpool, "Sokoban-v0", 2),
            },
        ),
        **compete(
            "FrozenLake 4x4, 1,024 at once: grids and numbers",
            {
                "envkit FrozenLake, 4x4 map, slippery": partial(vector, "FrozenLake-v0", slip=2 / 3, **LAKE),
                "envkit FrozenLake, 4x4 map": partial(vector, "FrozenLake-v0", slip=0.0, **LAKE),
                "envkit FrozenLake, each map new": partial(vector, "FrozenLake-v0", max_moves=100),
                ENVPOOL_LAKE[0]: partial(envpool, "FrozenLake-v1", 1),
                ENVPOOL_LAKE[1]: partial(envpool, "FrozenLake-v1", 2),
            },
        ),
        **compete(
            "Sokoban 6x6, one box: text both ways",
            {"envkit Sokoban, 1,024 in text": vector_of_text, "envkit Sokoban, one in text": one_of_text},
        ),
        **compete(
            "Sokoban 10x10, 1,024 at once, a new level after each episode",
            {
                "envkit Sokoban, 1 box, 25 moves": partial(episodes, 25, size=10, boxes=1),
                "envkit Sokoban, 4 boxes, 120 moves": partial(episodes, 120, size=10, boxes=4),
            },
            rounds=ROUNDS_OF_NEW_LEVELS,
        ),
    }
    check(CLAIMS, rates)


if __name__ == "__main__":
    main()
