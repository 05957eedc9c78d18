"""Parity with Gymnasium's FrozenLake-v1, on its maps and with the same random numbers.

The vector plays like single copies, see ``tests/environments/boards/test_vector.py``.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np
import pytest
from numpy.typing import NDArray

import envkit
from envkit.environments.counter_rng import chance

NUM_ENVS = 50
STEPS = 500  # of each of them; the four lakes make 100,000 together
MAX_MOVES = 100  # as FrozenLake-v1
SEED = 11

TENDENCY = (0.15, 0.35, 0.15, 0.35)  # of up, down, left, right: the goal is in the lower right corner
THEIRS = np.array([3, 1, 0, 2])  # Gymnasium's number for up, down, left, right
CODES = {b"S": 0, b"F": 0, b"H": 1, b"G": 2}
PLAYER = 3  # more, for the player on a cell


class Chances:
    """Replaces Gymnasium's generator with the random numbers of envkit after a reset with `seed`."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._moves = 0

    def random(self) -> float:
        self._moves += 1
        return chance(self._seed, self._moves - 1)


class Peer:
    """Gymnasium's lake with envkit's random numbers; it restarts in the step after an end."""

    def __init__(self, map: str, slip: float, seed: int) -> None:
        self._env = gymnasium.make(
            "FrozenLake-v1",
            map_name=map,
            is_slippery=slip > 0,
            success_rate=1 - slip,
            max_episode_steps=MAX_MOVES,
            disable_env_checker=True,
        )
        desc: NDArray[np.bytes_] = self._env.get_wrapper_attr("desc")
        self._grid = np.vectorize(CODES.__getitem__)(desc)
        self._chances = Chances(seed)
        self._is_over = False
        self.start = self._begin()

    def step(self, action: int) -> tuple[NDArray[np.int64], float, bool, bool]:
        if self._is_over:
            self._is_over = False
            return self._begin(), 0.0, False, False
        cell, reward, terminated, truncated, _ = self._env.step(action)
        self._is_over = terminated or truncated
        # Gymnasium also calls truncated what ends by itself with its last move.
        return self._draw(cell), float(reward), terminated, truncated and not terminated

    def _begin(self) -> NDArray[np.int64]:
        cell, _ = self._env.reset(seed=0)  # with a generator of its own, since there is one start and nothing to draw
        self._env.unwrapped.np_random = self._chances  # type: ignore[assignment]
        return self._draw(cell)

    def _draw(self, cell: int) -> NDArray[np.int64]:
        grid: NDArray[np.int64] = self._grid.copy()
        grid.ravel()[cell] += PLAYER
        return grid


@pytest.mark.parametrize("map", ["4x4", "8x8"])
@pytest.mark.parametrize("slip", [0.0, 2 / 3])
def test_moves_rewards_and_ends_agree_with_gymnasium(map: str, slip: float) -> None:
    options: dict[str, Any] = {"observation": "grid", "action": "index", "map": map, "slip": slip}
    envs = envkit.make_vec("FrozenLake-v0", NUM_ENVS, mode="native", max_moves=MAX_MOVES, **options)
    peers = [Peer(map, slip, SEED + number) for number in range(NUM_ENVS)]
    grids, _ = envs.reset(seed=SEED)
    assert (grids == [peer.start for peer in peers]).all()

    ended = won = 0
    for actions in np.random.default_rng(0).choice(4, (STEPS, NUM_ENVS), p=TENDENCY):
        wanted = [peer.step(action) for peer, action in zip(peers, THEIRS[actions].tolist(), strict=True)]
        wanted_grids, *wanted_rest = zip(*wanted, strict=True)
        grids, rewards, terminated, truncated, _ = envs.step(actions)
        assert (grids == wanted_grids).all()
        assert [rewards.tolist(), terminated.tolist(), truncated.tolist()] == [list(each) for each in wanted_rest]
        ended += sum(one or other for one, other in zip(*wanted_rest[1:], strict=True))
        won += int(sum(wanted_rest[0]))
    assert ended > 200
    assert won > 0
    envs.close()
