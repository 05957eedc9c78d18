"""Every program steps its episodes in one place: `play`. Only `lessons` visits states without a player."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import envkit
from envkit.checks.tasks import check_tasks
from envkit.cli.environments.game import open_game
from envkit.env import AsyncEpisode, GymEpisode
from envkit.http.client.env_client import SessionEpisode
from envkit.wiring.api import rescore
from tests.checks.guessing import Guess, Says

RUN: dict[str, Any] = {
    "env": {"id": "FrozenLake-v0", "num_envs": 4, "options": {"size": 3}},
    "sandbox": {"kind": "none"},
    "engine": {"hidden_size": 16, "layers": 1},
    "rollout": {"group_size": 2, "max_turns": 4, "max_tokens": 256},
    "trainer": {"steps": 1, "groups_per_step": 2},
    "threads": 1,
    "evaluation": {"episodes": 4, "every": 1000},
    "imitation": {"states": 5, "updates": 4, "batch": 4, "check_episodes": 4},
}
STEPS = {one.step.__code__ for one in (GymEpisode, AsyncEpisode, SessionEpisode)}


def check_a_task() -> None:
    envkit.register("GuessOnce-v0", Guess, players={"oracle": Says("seed")})
    check_tasks("GuessOnce-v0", tasks=1, repeat=1)


def play_by_hand() -> None:
    with open_game("FrozenLake-v0", options={}) as game:
        game.begin(0)
        game.act("up")


@pytest.mark.slow
@pytest.mark.xdist_group("cli-train")
def test_the_steps_of_all_episodes_have_one_caller(tmp_path: Path) -> None:
    programs: dict[str, Callable[[], object]] = {
        "train": lambda: envkit.train(RUN, output=tmp_path / "run"),
        "eval": lambda: envkit.evaluate("FrozenLake-v0", "expert", episodes=2, output=tmp_path / "evaluation"),
        "rescore": lambda: rescore(tmp_path / "evaluation"),
        "check-env": lambda: envkit.check_env("FrozenLake-v0", episodes=2),
        "check-task": check_a_task,
        "play": play_by_hand,
    }
    callers: set[tuple[str, str]] = set()

    def profile(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code in STEPS and (caller := frame.f_back) is not None:
            callers.add((Path(caller.f_code.co_filename).name, caller.f_code.co_name))

    before = sys.getprofile()
    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        for name, program in programs.items():
            callers.clear()
            program()
            lessons = {("demonstrations.py", "lessons")} if name == "train" else set()
            assert callers == {("episode.py", "_turns"), *lessons}, name
    finally:
        sys.setprofile(before)
        threading.setprofile(None)
