"""What every registered environment promises."""

from __future__ import annotations

import pickle

import gymnasium
import numpy as np
import pytest
from gymnasium.utils.env_checker import check_env
from gymnasium.wrappers import PassiveEnvChecker, RecordEpisodeStatistics, TimeLimit, TransformObservation

import envkit
from envkit.errors import OptionError, StepOrderError
from envkit.types import JSON, Observation
from envkit.wiring.environments import find, open_expert

IDS = [spec.id for spec in envkit.registered() if not spec.needs]
BOARDS = [id for id in IDS if id not in ("Arithmetic-v0", "Questions-v0", "WebShop-v0")]
EVERY_ENV = pytest.mark.parametrize("env_id", IDS)
EVERY_BOARD = pytest.mark.parametrize("env_id", BOARDS)
IN_PROCESSES = pytest.mark.parametrize("env_id", ["Sokoban-v0", "WebShop-v0"])
"""For cases of copies in processes of their own; `check_env` plays copies in this process."""
OPTIONS: dict[str, dict[str, JSON]] = {
    **{id: {"max_moves": 99 if "Lake" in id else 12} for id in BOARDS},
    "Arithmetic-v0": {"terms": 3},
    "Questions-v0": {"prompt": "What is 1+1?", "answer": "2"},
    "WebShop-v0": {"instructions": False},
}
"""Options that are tried at reset."""


@EVERY_ENV
def test_gymnasium_finds_nothing_wrong(env_id: str) -> None:
    with envkit.make(env_id) as env:
        check_env(env, skip_render_check=True)  # that check needs a spec of Gymnasium's own registry


@EVERY_ENV
def test_every_check_passes_and_the_expert_always_wins_where_nothing_slips(env_id: str) -> None:
    verdicts = {verdict.check: verdict for verdict in envkit.check_env(env_id, options=OPTIONS[env_id], episodes=10)}
    has_expert = find(env_id).expert is not None
    passed = {name for name, verdict in verdicts.items() if verdict.outcome == "pass"}
    assert set(verdicts) - passed == (set() if has_expert else {"expert solves"})
    more = "action_is_effective, " if env_id in BOARDS else "bought, score, " if env_id == "WebShop-v0" else ""
    assert verdicts["metrics are numbers"].seen == f"action_is_valid, {more}success"
    if has_expert and "slip" not in find(env_id).options:
        solved = (9, 10) if env_id == "WebShop-v0" else (10,)  # its searches do not find every goal
        assert verdicts["expert solves"].seen in [f"solves {count} of 10 episodes" for count in solved]


@EVERY_BOARD
def test_what_cannot_be_read_earns_nothing_and_is_reported_as_such(env_id: str) -> None:
    with envkit.make(env_id) as env:
        env.reset(seed=0)
        _, reward, terminated, truncated, info = env.step("\x00 \N{SNOWMAN} DROP TABLE")
        assert float(reward) <= 0
        assert (terminated, truncated) == (False, False)
        assert (info["action_is_valid"], info["action_is_effective"]) == (False, False)


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


@EVERY_BOARD
def test_an_episode_ends_by_the_environment_or_by_its_limit_and_never_by_both(env_id: str) -> None:
    expert = open_expert(env_id)
    ends = set()
    with envkit.make(env_id) as env:
        for seed in range(20):
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


@pytest.mark.parametrize("env_id", [*BOARDS, "WebShop-v0"])
def test_an_episode_can_be_carried_to_another_process_in_the_middle(env_id: str) -> None:
    with envkit.make(env_id) as env:
        _, info = env.reset(seed=2)
        env.step("nothing")
        copy = pickle.loads(pickle.dumps(env))
        action = f"<answer>{info['legal_moves'][-1]}</answer>"
        assert copy.step(action) == env.step(action)


@pytest.mark.parametrize("env_id", [id for id in IDS if "map" not in find(id).options])
def test_without_a_seed_new_levels_come_that_the_first_seed_decides(env_id: str) -> None:
    with envkit.make(env_id) as env:
        plays = []
        for _ in range(2):
            first, _ = env.reset(seed=11)
            plays.append([first, *(env.reset()[0] for _ in range(5))])
    assert plays[0] == plays[1]
    assert len(set(plays[0])) > 3


def test_gymnasium_wrappers_fit() -> None:
    inner = envkit.make("Sokoban-v0")
    shouting = TransformObservation(PassiveEnvChecker(inner), str.upper, inner.observation_space)
    with RecordEpisodeStatistics(TimeLimit(shouting, max_episode_steps=2)) as env:
        text, _ = env.reset(seed=0)
        assert text == text.upper()
        assert env.step("nothing")[2:4] == (False, False)
        _, reward, terminated, truncated, info = env.step("nothing")
        assert (terminated, truncated) == (False, True)
        assert info["episode"]["l"] == 2
        assert info["episode"]["r"] == pytest.approx(2 * float(reward))


@IN_PROCESSES
def test_copies_in_processes_of_their_own_play_like_single_ones(env_id: str) -> None:
    played = []
    for seed in (20, 21, 22):
        with envkit.make(env_id) as env:
            start, _ = env.reset(seed=seed)
            played.append((start, *env.step("nothing")[:4]))
    vector = envkit.make_vec(env_id, 3, mode="async")
    try:
        starts, _ = vector.reset(seed=20)
        steps = vector.step(("nothing",) * 3)
        assert list(zip(starts, *(list(part) for part in steps[:4]), strict=True)) == played
    finally:
        vector.close()


@IN_PROCESSES
def test_the_last_observation_survives_starting_again_in_the_same_step(env_id: str) -> None:
    with envkit.make(env_id) as env:
        env.reset(seed=5)
        last = ""
        steps, ended = 0, False
        while not ended:
            last, _, terminated, truncated, _ = env.step("nothing")
            steps, ended = steps + 1, terminated or truncated
        following, _ = env.reset()
    vector = envkit.make_vec(env_id, 1, mode="async", autoreset=gymnasium.vector.AutoresetMode.SAME_STEP)
    try:
        vector.reset(seed=5)
        for _ in range(steps):
            observations, _, terminated_B, truncated_B, infos = vector.step(("nothing",))
        assert np.array_equal([terminated_B, truncated_B], [[terminated], [truncated]])
        assert list(observations) == [following]
        assert list(infos["final_obs"]) == [last]
    finally:
        vector.close()
