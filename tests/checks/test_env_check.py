"""`envkit.check_env`: correct environments pass, and each violation has its message."""

from __future__ import annotations

import tempfile
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

import envkit
from envkit import cli
from envkit.checks import second_process
from envkit.checks.recorded import NO_SUCCESS, EnvUnderTest, Explorer
from envkit.errors import ConfigError, OptionError, UnknownEnvError
from tests.checks.broken_envs import LEFT

HERE = "tests.checks.broken_envs"


def checked(
    name: str, *, expert: str = "WalkExpert", is_apart: bool = False, **settings: Any
) -> dict[str, envkit.CheckResult]:
    """Return the results for an environment of `broken_envs`, by check; the second process is real if `is_apart`."""
    vector = settings.pop("vector", None)
    env_id = f"{name}{expert.removesuffix('Expert')}{vector or ''}-v0"
    envkit.register(
        env_id,
        f"{HERE}:{name}",
        expert=f"{HERE}:{expert}",
        vector_entry_point=None if vector is None else f"{HERE}:{vector}",
        **settings,
    )
    with nullcontext() if is_apart else patch.object(second_process, "_play_apart", play_here):
        return {result.check: result for result in envkit.check_env(env_id, episodes=3)}


def play_here(env: EnvUnderTest) -> dict[str, Any]:
    """Return what the second process finds that leaves nothing behind, without its start, which takes half a second."""
    episodes = []
    for recorded in env.episodes:
        with env.opened() as instance:
            episodes.append(env.replay(instance, recorded).as_json())
    return {"episodes": episodes, "processes": [], "files": []}


def failures(results: dict[str, envkit.CheckResult]) -> dict[str, str]:
    return {name: result.seen for name, result in results.items() if result.outcome == "fail"}


def test_a_correct_environment_passes_every_check() -> None:
    results = checked("Walk", is_apart=True)
    assert {name for name, result in results.items() if result.outcome != "pass"} == set()
    assert len(results) == 13
    assert results["options count at reset"].seen == "top: same effect when passed to make as to reset"
    assert results["expert solves"].seen == "solves 3 of 3 episodes"
    assert results["autoreset is honoured"].seen.startswith("SameStep and NextStep begin the next episode")


def test_options_of_a_class_are_tried_and_those_without_an_effect_are_named() -> None:
    with patch.object(second_process, "_play_apart", play_here):
        lake = {one.check: one.seen for one in envkit.check_env("Arithmetic-v0", episodes=2)}
    assert "same effect when passed to make as to reset" in lake["options count at reset"]
    results = checked("Declared")
    seen = "other values of unused changed none of 3 random episodes; name an option with --option KEY=VALUE"
    assert (results["options count at reset"].outcome, results["options count at reset"].seen) == ("skip", seen)


@pytest.mark.parametrize(
    ("name", "check", "messages"),
    [
        (
            "Unseeded",
            "same seed, same episode",
            ["two processes play the same seed differently (seed 0, observation of reset: ", "draw all random values"],
        ),
        (
            "Leaking",
            "nothing leaks between episodes",
            ["has played other episodes plays this one differently (seed ", "set all state of an episode in"],
        ),
        (
            "ObservesDict",
            "episodes can be played",
            [
                "ObservesDictWalk-v0 raised TypeError in reset: the observation is {'at': ",
                "return text that a language",
            ],
        ),
        (
            "NanReward",
            "episodes can be played",
            ["raised TypeError in step: the reward is nan; return a finite number", "broken_envs.py:"],
        ),
        (
            "RaisesOnBadAction",
            "bad actions are answered",
            [
                "RaisesOnBadActionWalk-v0 raised ValueError in step: ",
                "broken_envs.py:",
                "for the action ''; answer bad",
            ],
        ),
        (
            "IgnoresOptions",
            "options count at reset",
            ["option top=7 has an effect when passed to make, but reset(options=...) ignores it; the options of a"],
        ),
        (
            "KeepsOptions",
            "options count at reset",
            ["option top=7 of one reset still has an effect after the next reset", "apply it to one episode only"],
        ),
        (
            "Blocks",
            "steps do not block",
            ["a step blocks its thread for 5", "ms (limit 20 ms)", "anyio.to_thread.run_sync for blocking calls"],
        ),
        (
            "Leaves",
            "nothing is left behind",
            ["after close, a process still ran: sleep 8; end it in close"],
        ),
        (
            "LeavesFile",
            "nothing is left behind",
            ["after close, a temporary file was left: ", f"{LEFT}; remove it in close"],
        ),
    ],
)
def test_a_broken_environment_fails_one_check_with_what_is_wrong_and_what_to_change(
    name: str, check: str, messages: list[str]
) -> None:
    failed = failures(checked(name, is_apart=name in ("Unseeded", "Leaves", "LeavesFile")))
    Path(tempfile.gettempdir(), LEFT).unlink(missing_ok=True)
    assert set(failed) == {check}
    assert [words for words in messages if words not in failed[check]] == [], failed[check]


def test_a_vector_class_that_ignores_autoreset_fails() -> None:
    failed = failures(checked("Walk", vector="IgnoresAutoreset"))
    assert set(failed) == {"autoreset is honoured"}
    sentence = failed["autoreset is honoured"]
    assert sentence.startswith("autoreset=SameStep: infos['final_obs'] of the last step is None, expected 'You are at ")
    assert "begin the next episode as gymnasium.vector.SyncVectorEnv does" in sentence


def test_an_expert_that_never_succeeds_fails() -> None:
    failed = failures(checked("Walk", expert="LostExpert"))
    assert set(failed) == {"expert solves"}
    assert failed["expert solves"].startswith("the expert solves none of 3 episodes (success in the info of the last")


def test_an_environment_without_success_says_how_to_declare_it() -> None:
    results = checked("TellsNothing")
    assert failures(results) == {}
    assert {results[name].seen for name in ("success is reported", "expert solves")} == {NO_SUCCESS}
    by_return = checked("TellsNothing", expert="LostExpert", success_return=1.0)
    assert by_return["success is reported"].outcome == "pass"
    assert set(failures(by_return)) == {"expert solves"}


@pytest.mark.alone  # it measures milliseconds
def test_an_environment_that_awaits_does_not_block() -> None:
    results = checked("Waits")
    assert failures(results) == {}
    assert results["steps do not block"].outcome == "pass"


def test_an_environment_without_replay_is_not_compared() -> None:
    results = checked("Unseeded", expert="LostExpert", replayable=False)
    assert set(failures(results)) == {"expert solves"}
    skipped = {name for name, result in results.items() if result.outcome == "skip"}
    assert {"same seed, same episode", "replay gives the same", "vector equals single"} <= skipped
    assert results["same seed, same episode"].seen == "the environment is registered with replayable=False"


def test_a_recorded_episode_ends_when_its_time_is_up() -> None:
    envkit.register("Walk-v0", f"{HERE}:Walk")
    env = EnvUnderTest("Walk-v0", {}, range(2))
    with env.opened() as instance:
        assert env.play(instance, 0, Explorer(env, within_s=0.0)).actions == []
        assert env.play(instance, 0).has_ended


def test_invalid_arguments_raise() -> None:
    with pytest.raises(UnknownEnvError):
        envkit.check_env("FrozenLakes-v0")
    with pytest.raises(OptionError, match="size"):
        envkit.check_env("FrozenLake-v0", options={"size": -1})
    with pytest.raises(ConfigError, match="episodes: must be at least 2, got 1"):
        envkit.check_env("FrozenLake-v0", episodes=1)


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["FrozenLake-v0", "--episodes", "2"], 0),
        (["NanReward-v0", "--episodes", "2"], 1),
    ],
)
def test_the_command_prints_a_table_and_its_exit_code_is_the_verdict(
    words: list[str], code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    envkit.register("NanReward-v0", f"{HERE}:NanReward")
    with pytest.raises(SystemExit) as ended:
        cli.main(["check-env", *words])
    out, _ = capsys.readouterr()
    assert ended.value.code == code
    head, *rows = out.splitlines()
    assert head.split() == ["CHECK", "VERDICT", "SEEN"]
    assert len(rows) == 13
    assert sum("  fail " in row for row in rows) == code
