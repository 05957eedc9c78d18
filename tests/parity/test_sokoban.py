"""Parity with gym-sokoban, on its levels and with the same moves."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from gymnasium.vector import AutoresetMode
from numpy.typing import NDArray

import envkit

RECORDER = Path(__file__).with_name("gym_sokoban_episodes.py")
STEPS = 100  # in each of 100 levels
LEVELS = {6: "6x1=80", 7: "7x2=15", 8: "8x2=5"}
BOXOBAN = "# .*$@+"  # by code

pytestmark = [pytest.mark.peers, pytest.mark.xdist_group("peers")]


class Record(NamedTuple):
    """The results of the N levels of one size; see the program that writes them for the codes of the C cells.

    After the step that solved it, the level was restarted.
    """

    start_NC: NDArray[np.int64]
    action_NT: NDArray[np.int64]
    grid_NTC: NDArray[np.int64]
    reward_NT: NDArray[np.float64]
    is_solved_NT: NDArray[np.bool_]


@pytest.fixture(scope="module")
def records(peers_python: Path) -> Mapping[int, Record]:
    command = [str(peers_python), str(RECORDER), str(STEPS), *LEVELS.values()]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    return {size: record_of(lines, size) for size in LEVELS}


def record_of(lines: Sequence[Mapping[str, Any]], size: int) -> Record:
    names = ("start", "actions", "boards", "rewards", "ends")
    return Record(*(np.array([line[name] for line in lines if line["size"] == size]) for name in names))


def write_levels(path: Path, start_NC: NDArray[np.int64], size: int) -> str:
    """Write the levels where envkit reads them from."""
    rows = ["".join(BOXOBAN[code] for code in row) for row in start_NC.reshape(-1, size).tolist()]
    path.write_text("\n\n".join("\n".join(rows[at : at + size]) for at in range(0, len(rows), size)), encoding="utf-8")
    return str(path)


def seeds_of(start_NC: NDArray[np.int64], **options: Any) -> list[int]:
    """Return seeds that begin in these levels, by trying some."""
    count = 12 * len(start_NC)
    grids, _ = envkit.make_vec("Sokoban-v0", count, mode="native", **options).reset(seed=0)
    seeds = {grid.tobytes(): seed for seed, grid in enumerate(grids)}
    return [seeds[start.tobytes()] for start in start_NC.astype(np.uint8)]


@pytest.mark.parametrize("size", LEVELS)
def test_rooms_rewards_and_ends_agree_with_gym_sokoban(
    records: Mapping[int, Record], size: int, tmp_path: Path
) -> None:
    record = records[size]
    options: dict[str, Any] = {
        "level_file": write_levels(tmp_path / "levels.txt", record.start_NC, size),
        "observation": "grid",
        "action": "index",
    }
    seeds = seeds_of(record.start_NC, **options)
    envs: Any = envkit.make_vec("Sokoban-v0", len(seeds), mode="native", autoreset=AutoresetMode.DISABLED, **options)
    agree(envs, record, seeds)
    envs.close()


def agree(envs: Any, record: Record, seeds: Sequence[int]) -> None:
    """Step all levels as in the record."""
    grids, _ = envs.reset(seed=seeds)
    assert (grids.reshape(len(seeds), -1) == record.start_NC).all()
    for step in range(STEPS):
        # Theirs begin with 1, which pushes up; 2 to 4 push down, left and right.
        grids, rewards, terminated, truncated, _ = envs.step(record.action_NT[:, step] - 1)
        assert (grids.reshape(len(seeds), -1) == record.grid_NTC[:, step]).all()
        assert rewards.tolist() == record.reward_NT[:, step].tolist()
        assert terminated.tolist() == record.is_solved_NT[:, step].tolist()
        assert not truncated.any()
        if terminated.any():
            envs.reset(seed=seeds, options={"reset_mask": terminated})


def test_the_record_holds_every_kind_of_reward(records: Mapping[int, Record]) -> None:
    rewards = np.concatenate([record.reward_NT.ravel() for record in records.values()])
    assert len(rewards) == 100 * STEPS
    assert {round(reward, 6) for reward in rewards.tolist()} == {-1.1, -0.1, 0.9, 10.9}
