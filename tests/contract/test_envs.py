"""What every registered environment promises."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformObservation

import envkit
from envkit.errors import OptionError, StepOrderError
from envkit.metrics import fold_infos
from envkit.types import Observation
from envkit.wiring.envs import VectorMode, find, open_expert

IDS = [spec.id for spec in envkit.registered()]
EVERY_ENV = pytest.mark.parametrize("env_id", IDS)
NONSENSE = [
    "",
    "\x00 \N{SNOWMAN} DROP TABLE",
    "<answer></answer>",
    "<answer>" * 1000,
    "x" * 2**20,
    "\ud800",
    "\\boxed{",
]


@EVERY_ENV
def test_gymnasium_finds_nothing_wrong(env_id: str) -> None:
    with envkit.make(env_id) as env:
        check_env(env, skip_render_check=True)  # that check needs a spec of Gymnasium's own registry


@EVERY_ENV
def test_nonsense_is_an_observation_not_an_exception(env_id: str) -> None:
    for text in NONSENSE:
        with envkit.make(env_id) as env:
            env.reset(seed=0)
            observation, reward, terminated, truncated, info = env.step(text)
            assert observation
            assert float(reward) <= 0
            assert (terminated, truncated) == (False, False)
            assert info["action_is_valid"] is False
            assert info["action_is_effective"] is False


@EVERY_ENV
def test_a_step_before_reset_or_after_the_end_is_refused(env_id: str) -> None:
    with envkit.make(env_id) as env:
        with pytest.raises(StepOrderError):
            env.step("<answer>up</answer>")
        env.reset(seed=0)
        while not any(env.step("nothing")[2:4]):
            pass
        with pytest.raises(StepOrderError):
            env.step("nothing")
        env.reset(seed=1)
        assert env.step("nothing")[0]


@EVERY_ENV
def test_an_episode_ends_by_the_world_or_by_its_limit_and_never_by_both(env_id: str) -> None:
    expert = open_expert(env_id)
    ends = set()
    with envkit.make(env_id) as env:
        for seed in range(60):
            text, _ = env.reset(seed=seed)
            end = (False, False)
            while end == (False, False):
                moves = expert.moves(Observation(text)) if seed % 2 else ()
                text, _, terminated, truncated, _ = env.step(expert.answer(moves[0]) if moves else "nothing")
                end = (terminated, truncated)
            ends.add(end)
    assert ends == {(True, False), (False, True)}


@EVERY_ENV
def test_an_unknown_option_is_refused_at_once_and_at_reset(env_id: str) -> None:
    with pytest.raises(OptionError, match=r"^no_such_option: "):
        envkit.make(env_id, no_such_option=1)
    with envkit.make(env_id) as env, pytest.raises(OptionError, match=r"^no_such_option: "):
        env.reset(options={"no_such_option": 1})


@EVERY_ENV
def test_the_metrics_that_are_named_are_reported_at_every_step(env_id: str) -> None:
    with envkit.make(env_id) as env:
        _, info = env.reset(seed=0)
        infos = [env.step("nothing")[4], env.step(f"<answer>{info['legal_moves'][0]}</answer>")[4]]
        folded = fold_infos(infos, env.metadata["metrics"])
    assert set(folded) == set(env.metadata["metrics"]) >= {"action_is_valid", "success"}
    assert folded["action_is_valid"] == 0.5
    json.dumps([info, *infos])


@pytest.mark.parametrize("env_id", [spec.id for spec in envkit.registered() if "slip" not in spec.options])
def test_the_expert_wins_from_what_it_reads(env_id: str) -> None:
    expert = open_expert(env_id)
    with envkit.make(env_id) as env:
        for seed in range(30):
            text, info = env.reset(seed=seed)
            end = False
            while not end:
                moves = expert.moves(Observation(text))
                assert set(moves) <= set(info["legal_moves"])
                text, _, terminated, truncated, info = env.step(expert.answer(moves[0]))
                end = terminated or truncated
            assert info["success"] is True
            assert list(expert.moves(Observation(text))) == []


@EVERY_ENV
def test_an_episode_can_be_carried_to_another_process_in_the_middle(env_id: str) -> None:
    with envkit.make(env_id) as env:
        _, info = env.reset(seed=2)
        env.step("nothing")
        copy = pickle.loads(pickle.dumps(env))
        action = f"<answer>{info['legal_moves'][-1]}</answer>"
        assert copy.step(action) == env.step(action)


@pytest.mark.parametrize("env_id", [spec.id for spec in envkit.registered() if "map" not in spec.options])
def test_without_a_seed_new_levels_come_that_the_first_seed_decides(env_id: str) -> None:
    with envkit.make(env_id) as env:
        plays = []
        for _ in range(2):
            first, _ = env.reset(seed=11)
            plays.append([first, *(env.reset()[0] for _ in range(5))])
    assert plays[0] == plays[1]
    assert len(set(plays[0])) > 3


@EVERY_ENV
def test_gymnasium_wrappers_fit(env_id: str) -> None:
    world = envkit.make(env_id)
    shouting = TransformObservation(PassiveEnvChecker(world), str.upper, world.observation_space)
    with RecordEpisodeStatistics(TimeLimit(shouting, max_episode_steps=2)) as env:
        text, _ = env.reset(seed=0)
        assert text == text.upper()
        assert env.step("nothing")[2:4] == (False, False)
        _, reward, terminated, truncated, info = env.step("nothing")
        assert (terminated, truncated) == (False, True)
        assert info["episode"]["l"] == 2
        assert info["episode"]["r"] == pytest.approx(2 * float(reward))


@EVERY_ENV
def test_copies_that_step_together_play_like_single_ones(env_id: str) -> None:
    told = []
    for seed in (20, 21, 22):
        with envkit.make(env_id) as env:
            start, _ = env.reset(seed=seed)
            told.append((start, *env.step("nothing")[:4]))
    modes: tuple[VectorMode, ...] = ("sync", "async", *(() if find(env_id).vector_entry_point is None else ("native",)))
    for mode in modes:
        vector = envkit.make_vec(env_id, 3, mode=mode)
        try:
            starts, _ = vector.reset(seed=20)
            steps = vector.step(("nothing",) * 3)
            assert list(zip(starts, *(list(part) for part in steps[:4]), strict=True)) == told
        finally:
            vector.close()


@EVERY_ENV
@pytest.mark.parametrize("mode", [None, "sync", "async"])
def test_the_last_observation_survives_starting_again_in_the_same_step(env_id: str, mode: VectorMode | None) -> None:
    with envkit.make(env_id) as env:
        env.reset(seed=5)
        last = ""
        steps, ended = 0, False
        while not ended:
            last, _, terminated, truncated, _ = env.step("nothing")
            steps, ended = steps + 1, terminated or truncated
        following, _ = env.reset()
    vector = envkit.make_vec(env_id, 1, mode=mode, autoreset=gymnasium.vector.AutoresetMode.SAME_STEP)
    try:
        vector.reset(seed=5)
        for _ in range(steps):
            observations, _, _, truncated_B, infos = vector.step(("nothing",))
        assert np.array_equal(truncated_B, [True])
        assert list(observations) == [following]
        assert list(infos["final_obs"]) == [last]
    finally:
        vector.close()


def test_episodes_and_levels_are_the_same_in_every_process() -> None:
    told = [_digest(hash_seed) for hash_seed in ("1", "2")]
    assert told[0] == told[1]
    assert len(set(told[0].values())) == len(IDS) + 6  # and no two are alike


def _digest(hash_seed: str) -> dict[str, str]:
    script = Path(__file__).parent / "envs_digest.py"
    root = Path(__file__).parents[2]
    environment = {**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(root)}
    run = subprocess.run(
        [sys.executable, str(script)], env=environment, capture_output=True, text=True, timeout=120, check=True
    )
    told: dict[str, str] = json.loads(run.stdout)
    return told
