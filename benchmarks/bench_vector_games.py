"""The cost of a step of 1,024 games at once, with grids and action numbers (compared with envpool), and with text.

envpool's Sokoban plays one built-in level (10x10, four boxes, 120 moves) in all environments. envkit's levels have the
same number of boxes and moves, and are drawn from a set of 1,000. envpool's lake is the slippery 4x4 map with 100
moves. envpool is measured with one thread and with two; the better rate per CPU second counts. Resets that draw new
levels are also measured, but no claim is about them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from itertools import cycle, islice
from typing import Any

from games.contestants import Peer, parser, taking_part
from games.peers import batches, stepping_all
from settings import parsed
from timing import Claim, Play, Rates, Turn, check, measure, turns

import envkit

ENVPOOL_SOKOBAN = ("envpool Sokoban-v0, 1 thread", "envpool Sokoban-v0, 2 threads")
ENVPOOL_LAKE = ("envpool FrozenLake-v1, 1 thread", "envpool FrozenLake-v1, 2 threads")
CLAIMS = (
    Claim("envkit Sokoban, 4 boxes", 5_000_000),
    Claim("envkit Sokoban, 4 boxes", 50, ENVPOOL_SOKOBAN),
    Claim("envkit FrozenLake, 4x4 map, slippery", 20, ENVPOOL_LAKE),
    Claim("envkit Sokoban, many in text", 3, ["envkit Sokoban, one in text"]),
)

ANSWERS = ("<answer>up</answer>", "<answer>down</answer>", "<answer>left</answer>", "<answer>right</answer>")
ROOM: dict[str, Any] = {"size": 10, "boxes": 4, "max_moves": 120}
LAKE: dict[str, Any] = {"map": "4x4", "max_moves": 100}
SMALL: dict[str, Any] = {"size": 6, "boxes": 1, "max_moves": 10_000}
WARM_STEPS = 1_500
"""Number of untimed steps before the measurement, which draw all 1,000 levels: 12 episodes of 1,024 environments."""
ROUNDS_OF_NEW_LEVELS = 3


def vector(num_envs: int, env_id: str, warm_steps: int = 0, **options: Any) -> Play:
    """Return a `Play` that steps envkit's vector environment with random action numbers."""
    envs = envkit.make_vec(env_id, num_envs, mode="native", observation="grid", action="index", **options)
    envs.reset(seed=0)
    play = stepping_all(envs, list(batches(num_envs)))
    play(warm_steps)
    return play


def episodes(num_envs: int, moves: int, **options: Any) -> Play:
    """Return a `Play` of whole episodes. Random moves rarely solve a room, so all rooms are reset at the same step."""
    play = vector(num_envs, "Sokoban-v0", max_moves=moves, **options)
    return lambda times: play(times * (moves + 1))


def vector_of_text(num_envs: int) -> Play:
    envs = envkit.make_vec("Sokoban-v0", num_envs, mode="native", **SMALL)
    envs.reset(seed=0)
    return stepping_all(envs, [[ANSWERS[move] for move in batch] for batch in batches(num_envs)])


def one_of_text() -> Play:
    env = envkit.make("Sokoban-v0", **SMALL)
    env.reset(seed=0)
    answers = cycle([ANSWERS[move] for move in batches(1024).ravel()])
    seeds = iter(range(1, 1 << 31))

    def play(times: int) -> int:
        for answer in islice(answers, times):
            _, _, terminated, truncated, _ = env.step(answer)
            if terminated or truncated:
                env.reset(seed=next(seeds))
        return times

    return play


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--envs", type=int, default=1024, help="number of environments that are stepped at once")
    arguments.add_argument("--levels", type=int, default=1000, help="number of levels of envkit's Sokoban")
    settings = parsed(arguments, rounds=1, round_cpu_s=0.02, envs=16, levels=10)

    def own(make: Callable[..., Play], *words: Any, **options: Any) -> Callable[[], Turn]:
        return lambda: turns(make(settings.envs, *words, **options))

    def pool(env_id: str, threads: int) -> Callable[[], Turn]:
        return partial(Peer, settings, "envpool", env_id, settings.envs, threads)

    def compete(title: str, starts: Mapping[str, Callable[[], Turn]], rounds: int = settings.rounds) -> Rates:
        print(title)
        with taking_part(starts) as present:
            return measure(present, unit="steps", rounds=rounds, round_cpu_s=settings.round_cpu_s)

    rates = {
        **compete(
            f"Sokoban 10x10, {settings.envs:,} at once: grids and numbers",
            {
                "envkit Sokoban, 4 boxes": own(vector, "Sokoban-v0", WARM_STEPS, num_levels=settings.levels, **ROOM),
                ENVPOOL_SOKOBAN[0]: pool("Sokoban-v0", 1),
                ENVPOOL_SOKOBAN[1]: pool("Sokoban-v0", 2),
            },
        ),
        **compete(
            f"FrozenLake 4x4, {settings.envs:,} at once: grids and numbers",
            {
                "envkit FrozenLake, 4x4 map, slippery": own(vector, "FrozenLake-v0", slip=2 / 3, **LAKE),
                "envkit FrozenLake, 4x4 map": own(vector, "FrozenLake-v0", slip=0.0, **LAKE),
                "envkit FrozenLake, each map new": own(vector, "FrozenLake-v0", max_moves=100),
                ENVPOOL_LAKE[0]: pool("FrozenLake-v1", 1),
                ENVPOOL_LAKE[1]: pool("FrozenLake-v1", 2),
            },
        ),
        **compete(
            "Sokoban 6x6, one box: text both ways",
            {
                "envkit Sokoban, many in text": own(vector_of_text),
                "envkit Sokoban, one in text": lambda: turns(one_of_text()),
            },
        ),
        **compete(
            f"Sokoban 10x10, {settings.envs:,} at once, a new level after each episode",
            {
                "envkit Sokoban, 1 box, 25 moves": own(episodes, 25, size=10, boxes=1),
                "envkit Sokoban, 4 boxes, 120 moves": own(episodes, 120, size=10, boxes=4),
            },
            rounds=min(settings.rounds, ROUNDS_OF_NEW_LEVELS),
        ),
    }
    check(CLAIMS, rates, is_strict=not settings.quick)


if __name__ == "__main__":
    main()
