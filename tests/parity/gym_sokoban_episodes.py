"""Plays random episodes in gym-sokoban's levels and writes the results as JSON, one level per line.

A program for the virtual environment of the peers (``make peers``), where envkit is not installed. Boards are lists of
the peer's codes, row by row, with 6 for the player on a target: envkit's codes, too.

    python gym_sokoban_episodes.py STEPS_A_LEVEL SIZExBOXES=LEVELS ...
"""

from __future__ import annotations

import json
import random
import sys
from typing import Any

import numpy as np
from gym_sokoban.envs.sokoban_env import SokobanEnv  # type: ignore[import-not-found]

_SEED = 2024
_TINY = "tiny_rgb_array"  # the cheaper of two pictures, one of which every step draws
_MAX_STEPS = 1_000_000  # more than are ever played


def _codes(env: Any) -> list[int]:
    codes: list[int] = np.where((env.room_state == 5) & (env.room_fixed == 2), 6, env.room_state).ravel().tolist()
    return codes


def _play(env: Any, steps: int) -> dict[str, object]:
    """Play random pushes; restart whenever the level is solved."""
    start = env.room_state.copy()
    actions, boards, rewards, ends = [], [], [], []
    first = _codes(env)
    for _ in range(steps):
        action = random.randint(1, 4)  # push up, down, left, right
        _, reward, done, _ = env.step(action, observation_mode=_TINY)
        actions.append(action)
        boards.append(_codes(env))
        rewards.append(float(reward))
        ends.append(bool(done))
        if done:
            env.room_state = start.copy()
            env.player_position = np.argwhere(start == 5)[0]
            env.boxes_on_target = 0
    return {"size": len(start), "start": first, "actions": actions, "boards": boards, "rewards": rewards, "ends": ends}


def main() -> None:
    random.seed(_SEED)
    np.random.seed(_SEED)
    words = iter(sys.argv[1:])
    steps = int(next(words))
    output = sys.stdout
    sys.stdout = sys.stderr  # the peer prints about its own retries
    for word in words:
        room, levels = word.split("=")
        size, boxes = map(int, room.split("x"))
        env = SokobanEnv((size, size), max_steps=_MAX_STEPS, num_boxes=boxes, reset=False)
        for _ in range(int(levels)):
            env.reset(render_mode=_TINY)
            print(json.dumps(_play(env, steps)), file=output)


if __name__ == "__main__":
    main()
