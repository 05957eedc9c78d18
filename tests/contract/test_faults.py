"""What no environment may return or raise is a void episode, in every program, that names the environment's line."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

import envkit
from envkit.cli.environments.game import open_game
from envkit.errors import EnvkitError
from envkit.runs.episodes import EPISODES, read_episodes
from tests.contract import faulty
from tests.contract.faulty import FAULTS
from tests.e2e.fleet.fleet import install_environment, serving
from tests.trainer_bridge.models import write_chat

IDS = ("Faulty-v0", "AsyncFaulty-v0")
SOME = ("text None", "sys.exit", "reset: nothing")
"""Faults for the programs that play as an evaluation does, which commits all."""


@pytest.fixture(autouse=True)
def _registered() -> None:
    faulty.register_all()


@pytest.mark.parametrize("env_id", IDS)
def test_an_evaluation_has_a_void_episode_for_each_fault(env_id: str, tmp_path: Path) -> None:
    for name, (_, words) in FAULTS.items():
        with pytest.raises(EnvkitError, match=r"^0 of 1 episodes of "):
            envkit.evaluate(env_id, "random", episodes=1, options={"fault": name}, output=tmp_path / name)
        (episode,) = read_episodes(tmp_path / name / EPISODES)
        assert episode.outcome.stop == "env_error"
        assert f"{env_id} raised " in str(episode.outcome.error)
        assert words in str(episode.outcome.error)
        assert f"({faulty.__file__}:" in str(episode.outcome.error)


@pytest.mark.parametrize("env_id", IDS)
def test_a_person_sees_a_fault_in_one_line(env_id: str) -> None:
    for name in SOME:
        with open_game(env_id, options={"fault": name}) as game, pytest.raises(EnvkitError) as raised:
            [game.begin(0), game.act("a")]
        assert FAULTS[name][1] in str(raised.value)
        assert f"({faulty.__file__}:" in str(raised.value)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("served")
    install_environment(folder / "site-packages", "faults", "from tests.contract.faulty import register_all\n")
    with serving("none", folder, environments=folder / "site-packages") as gateway:
        yield gateway.url


def test_a_server_answers_a_fault_with_an_error_of_the_environment(url: str) -> None:
    for name in SOME:
        with closing(envkit.make("Faulty-v0", url=url, fault=name)) as env, pytest.raises(EnvkitError) as raised:
            [env.reset(seed=0), env.step("a")]
        assert FAULTS[name][1] in str(raised.value)
        assert "(faulty.py:" in str(raised.value)


@pytest.mark.slow
@pytest.mark.xdist_group("cli-train")
def test_a_training_run_goes_through_all_faults_and_says_that_no_episode_can_be_used(tmp_path: Path) -> None:
    groups = len(FAULTS) // 2 + 1
    run = {
        "env": {"id": "AsyncFaulty-v0", "num_envs": 4},
        "sandbox": {"kind": "none"},
        "engine": {"model": str(write_chat(tmp_path / "model", seed=0))},
        "rollout": {"group_size": 2, "max_turns": 2, "turn_tokens": 4, "max_tokens": 256},
        "trainer": {"steps": 1, "groups_per_step": groups},
        "threads": 1,
        "imitation": {"kind": "none"},
        "evaluation": {"episodes": 0},
    }
    with pytest.raises(
        EnvkitError, match=rf"all {2 * groups} episodes are void; .*AsyncFaulty-v0 raised .*faulty\.py:"
    ):
        envkit.train(run, output=tmp_path / "run")
