"""What a step of Sokoban costs in text: whole answers in, text out, in one environment that starts anew when it ends.

6x6 rooms with one box and 10,000 moves; each contestant plays the same random moves. ROLL and RAGEN need their
checkouts: ``--roll PATH --ragen PATH``. RAGEN's environment is given numbers, since it reads no answers itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import count, cycle, islice
from random import Random
from typing import Any

import peers
from timing import Claim, Play, check, measure

import envkit

CLAIMS = (
    Claim("envkit", 600, ["ROLL"]),
    Claim("envkit", 600, ["RAGEN"]),
    Claim("envkit", 6, ["GEM"]),
)

SIZE, BOXES, MAX_MOVES = 6, 1, 10_000
MOVES = [Random(0).choice(("up", "down", "left", "right")) for _ in range(1 << 16)]


def stepping(env: Any, actions: Sequence[object]) -> Play:
    """Step `env` with `actions` over and over, with a reset at each end."""
    following = cycle(actions)
    seeds = count(1)
    env.reset(seed=0)

    def play(times: int) -> int:
        for action in islice(following, times):
            if True in env.step(action)[2:-1]:  # what stands between reward and info says whether it ended
                env.reset(seed=next(seeds))
        return times

    return play


def envkit_text() -> Play:
    env = envkit.make("Sokoban-v0", size=SIZE, boxes=BOXES, max_moves=MAX_MOVES)
    return stepping(env, [f"<answer>{move}</answer>" for move in MOVES])


def gem_text() -> Play:
    return stepping(peers.gem_sokoban(SIZE, BOXES, max_turns=MAX_MOVES), [f"\\boxed{{{move}}}" for move in MOVES])


def roll_text(checkout: Any) -> Play:
    env = peers.roll_sokoban(checkout, SIZE, BOXES, max_steps=MAX_MOVES)
    return stepping(env, [f"<answer>{move}</answer>" for move in MOVES])


def ragen_text(checkout: Any) -> Play:
    env = peers.ragen_sokoban(checkout, SIZE, BOXES, max_steps=MAX_MOVES)
    numbers = {"up": 1, "down": 2, "left": 3, "right": 4}
    return stepping(env, [numbers[move] for move in MOVES])


def main() -> None:
    told = peers.arguments(__doc__).parse_args()
    print("Sokoban 6x6, one box: text steps in one environment")
    starts: dict[str, Callable[[], Play]] = {
        "envkit": envkit_text,
        "GEM": gem_text,
        "ROLL": partial(roll_text, told.roll),
        "RAGEN": partial(ragen_text, told.ragen),
    }
    contestants = peers.those_present(starts)
    check(CLAIMS, measure(contestants, unit="steps", rounds=told.rounds, round_cpu_s=told.round_cpu_s))


if __name__ == "__main__":
    main()
