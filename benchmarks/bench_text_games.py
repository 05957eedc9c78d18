"""The cost of a Sokoban step, from an answer as text to an observation as text, with a reset after each episode.

Rooms are 6x6 with one box and 10,000 moves. All contestants play the same random moves. ROLL and RAGEN require
checkouts: ``--roll PATH --ragen PATH``. RAGEN's environment receives numbers, since it does not parse answers itself.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from games.contestants import Peer, parser, taking_part
from games.peers import BOXES, MAX_MOVES, MOVES, SIZE, stepping
from settings import parsed
from timing import Claim, Turn, check, measure, turns

import envkit

CLAIMS = (
    Claim("envkit", 600, ["ROLL"]),
    Claim("envkit", 600, ["RAGEN"]),
    Claim("envkit", 6, ["GEM"]),
)


def envkit_text() -> Turn:
    env = envkit.make("Sokoban-v0", size=SIZE, boxes=BOXES, max_moves=MAX_MOVES)
    return turns(stepping(env, [f"<answer>{move}</answer>" for move in MOVES]))


def main() -> None:
    settings = parsed(parser(__doc__), rounds=1, round_cpu_s=0.05)
    print("Sokoban 6x6, one box: text steps in one environment")
    starts: dict[str, Callable[[], Turn]] = {
        "envkit": envkit_text,
        "GEM": partial(Peer, settings, "gem_text"),
        "ROLL": partial(Peer, settings, "roll_text", settings.roll),
        "RAGEN": partial(Peer, settings, "ragen_text", settings.ragen),
    }
    with taking_part(starts) as contestants:
        rates = measure(contestants, unit="steps", rounds=settings.rounds, round_cpu_s=settings.round_cpu_s)
    check(CLAIMS, rates, is_strict=not settings.quick)


if __name__ == "__main__":
    main()
