"""Rollouts: requests to engine and environment, ends of episodes, and void episodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import (
    DeadlineError,
    EnvError,
    OptionError,
    SandboxLostError,
    SessionBrokenError,
    SessionNotFoundError,
    UnreachableError,
)
from envkit.protocols import Renderer
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.samples import samples_from, samples_of
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import Exchange, Info, Observation, Prompt, StopReason, Task, Trajectory, stable_hash
from tests.causes import cause
from tests.trainer_bridge.fakes import Answer, Call, LetterRenderer, ScriptedEngine, ScriptedHost, letters, text_of
from tests.trainer_bridge.plain import plain

A, B, C = (Task("Scripted-v0", seed) for seed in range(3))


def limits(**changes: Any) -> RolloutLimits:
    standard = {"max_turns": 4, "max_tokens": 200, "turn_tokens": 3, "step_timeout_s": 30.0, "retries": 2}
    return RolloutLimits(**{**standard, **changes})


def play(
    script: Callable[[Task, int], Sequence[Answer]],
    tasks: Sequence[Task] = (A,),
    *,
    group_size: int = 1,
    engine: ScriptedEngine | None = None,
    host: ScriptedHost | None = None,
    num_envs: int = 100,
    seed: int = 7,
    on_episode: Callable[[Trajectory], None] | None = None,
    renderer: Renderer | None = None,
    **bounds: Any,
) -> RolloutResult:
    """Play on virtual time; afterwards all leases must be released and no task may run."""
    engine, host = engine or ScriptedEngine(), host or ScriptedHost(script)
    within = limits(**bounds)
    rollout = Rollout(host, PolicyPlayer(engine, renderer or LetterRenderer(), within), within, num_envs)

    async def main() -> RolloutResult:
        try:
            return await rollout.groups(
                tasks, group_size, phase="train-1", temperature=0.8, seed=seed, on_episode=on_episode
            )
        finally:
            assert host.lent == 0
            assert [task.id for task in anyio.get_running_tasks()] == [anyio.get_current_task().id]

    return clock.run(main, virtual=True)


def script(*answers: Answer) -> Callable[[Task, int], Sequence[Answer]]:
    return lambda task, time: answers


def stops(result: RolloutResult) -> list[str]:
    return [str(trajectory.outcome.stop) for trajectory in result.trajectories]


# --- Tokens ----------------------------------------------------------------------------------------------------------


def test_a_prompt_begins_with_the_whole_history_once() -> None:
    engine = ScriptedEngine(lambda call: "up"[: 1 + len(call.prompt) % 2])
    answers = script(Answer("start"), Answer("one"), Answer("two!"), Answer("", ends="terminated"))
    (trajectory,) = play(answers, engine=engine).trajectories

    assert [text_of(call.prompt) for call in engine.calls] == [
        "[start]",
        "[start]up[one]",
        "[start]up[one]u[two!]",
    ]
    assert [text_of(turn.new_ids.tolist()) for turn in trajectory.turns] == ["[start]", "[one]", "[two!]"]
    assert [turn.action for turn in trajectory.turns] == ["up", "u", "up"]
    for earlier, later in pairwise(engine.calls):
        assert later.prompt[: len(earlier.prompt)] == earlier.prompt


def test_the_mask_is_one_on_the_tokens_of_the_policy_and_nowhere_else() -> None:
    engine = ScriptedEngine(lambda call: "xy")
    engine.version = 3
    answers = script(Answer("s"), Answer("t", reward=0.5), Answer("u", reward=-1.0, ends="truncated"))
    (sample,) = samples_of(play(answers, engine=engine).groups)

    assert text_of(sample.token_ids.tolist()) == "[s]xy[t]xy"
    assert sample.mask.tolist() == [0, 0, 0, 1, 1, 0, 0, 0, 1, 1]
    assert sample.turn_ids.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1, 1]
    assert sample.logprobs.tolist() == [0, 0, 0, -0.5, -1.0, 0, 0, 0, -0.5, -1.0]
    assert sample.versions.tolist() == [-1, -1, -1, 3, 3, -1, -1, -1, 3, 3]
    assert sample.rewards.tolist() == [0.5, -1.0]
    assert (sample.group, sample.episode, sample.stop) == (
        "train-1/00000000",
        "train-1/00000000/0000",
        StopReason.TRUNCATED,
    )
    assert sample.observations.tolist() == [stable_hash("s"), stable_hash("t")]


def test_the_environment_gets_the_renderers_action_and_the_engine_the_renderers_stop() -> None:
    host = ScriptedHost(script(Answer(), Answer(ends="terminated")))
    engine = ScriptedEngine(lambda call: "down!")
    play(script(), host=host, engine=engine, turn_tokens=5)
    assert host.episodes[0].actions == ["down!"]
    (call,) = engine.calls
    assert (call.params.stop, call.params.max_tokens, call.params.temperature) == ((ord("!"),), 5, 0.8)


class Forgetful(LetterRenderer):
    """Every third prompt starts a new sample; the others continue."""

    def extend(self, history: Sequence[Exchange], observation: Observation) -> Prompt:
        ids = letters(f"[{observation.text}]")
        return Prompt(letters("*") + ids, starts_sample=True) if len(history) % 3 == 2 else Prompt(ids)


def test_a_prompt_that_starts_a_sample_is_all_that_the_engine_is_given() -> None:
    engine = ScriptedEngine(lambda call: "u")
    answers = script(*(Answer(text) for text in "abcd"))
    (trajectory,) = play(answers, engine=engine, renderer=Forgetful(), max_turns=4).trajectories
    assert [text_of(call.prompt) for call in engine.calls] == ["[a]", "[a]u[b]", "*[c]", "*[c]u[d]"]
    assert engine.forgotten == ["train-1/00000000/0000.0"]
    assert [text_of(sample.token_ids.tolist()) for sample in samples_from(trajectory)] == ["[a]u[b]u", "*[c]u[d]u"]


def test_only_the_longest_context_counts_against_the_bound_on_tokens() -> None:
    answers = script(*(Answer(text) for text in "abcdefg"))
    (trajectory,) = play(
        answers, engine=ScriptedEngine(lambda call: "u"), renderer=Forgetful(), max_tokens=11
    ).trajectories
    assert (trajectory.outcome.stop, len(trajectory.turns)) == (StopReason.MAX_TURNS, 4)
    (cut,) = play(answers, engine=ScriptedEngine(lambda call: "u"), max_tokens=11).trajectories
    assert (cut.outcome.stop, len(cut.turns)) == (StopReason.CONTEXT_OVERFLOW, 2)


def test_rewards_are_added_up_and_metrics_are_folded_as_the_environment_declares() -> None:
    folds: Info = {"metrics": {"valid": "mean", "success": "last", "pushes": "sum"}}
    answers = script(
        Answer(info=folds),
        Answer(reward=0.25, info={"valid": True, "pushes": 2, "success": False, "other": 5}),
        Answer(reward=0.5, info={"valid": False, "pushes": 1, "success": True}, ends="terminated"),
    )
    (trajectory,) = play(answers).trajectories
    assert trajectory.outcome.reward == 0.75
    assert trajectory.outcome.values == {"valid": 0.5, "success": 1.0, "pushes": 3.0}


# --- Where episodes end ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("ends", ["terminated", "truncated"])
def test_the_environment_ends_an_episode(ends: str) -> None:
    result = play(script(Answer(), Answer(), Answer(ends=ends)), max_turns=2)
    assert stops(result) == [ends]
    assert len(result.trajectories[0].turns) == 2


@pytest.mark.parametrize(("max_tokens", "turns"), [(5, 0), (6, 1), (10, 1), (11, 2), (15, 2), (16, 3)])
def test_an_episode_is_cut_off_when_the_next_turn_might_not_fit(max_tokens: int, turns: int) -> None:
    # Every prompt is 3 tokens more and the completion at most 3; it takes only 2.
    engine = ScriptedEngine(lambda call: "ab")
    result = play(script(Answer()), engine=engine, max_tokens=max_tokens, max_turns=3)
    (trajectory,) = result.trajectories
    assert len(trajectory.turns) == len(engine.calls) == turns
    assert trajectory.outcome.stop == (StopReason.MAX_TURNS if turns == 3 else StopReason.CONTEXT_OVERFLOW)
    assert not trajectory.is_void
    assert len(samples_of(result.groups)) == (1 if turns else 0)


@pytest.mark.parametrize(
    ("place", "error", "stop", "line"),
    [
        (0, SandboxLostError("sb-1", cause("killed")), "sandbox_lost", "sandbox sb-1 lost: killed"),
        (1, UnreachableError("no answer from :7000"), "sandbox_lost", "no answer from :7000"),
        (2, SessionNotFoundError("no session 7"), "sandbox_lost", "no session 7"),
        (1, SessionBrokenError("session 7 is void"), "sandbox_lost", "session 7 is void"),
        (0, EnvError("Scripted-v0", "KeyError: 'x'"), "env_error", "Scripted-v0 raised KeyError: 'x'"),
        (2, DeadlineError("too late"), "timeout", "too late"),
    ],
)
def test_what_breaks_under_an_episode_voids_it_and_it_alone(place: int, error: Exception, stop: str, line: str) -> None:
    fine = [Answer(), Answer(), Answer(reward=1.0, ends="terminated")]
    broken = [*fine[:place], Answer(error=error), *fine[place:]]
    result = play(lambda task, time: broken if task == B else fine, (A, B, C), retries=0)

    assert stops(result) == ["terminated", stop, "terminated"]
    lost = result.trajectories[1]
    assert (lost.outcome.error, len(lost.turns)) == (line, place)
    assert result.void == (lost,)
    assert [sample.group for sample in samples_of(result.groups)] == ["train-1/00000000", "train-1/00000002"]


# --- Retries ---------------------------------------------------------------------------------------------------------

LOST = SandboxLostError("sb-1", cause("gone"))


def breaks(times: int, *, at: int = 1) -> Callable[[Task, int], Sequence[Answer]]:
    """A script with a number of lost episodes first."""
    fine = [Answer(), Answer(), Answer(reward=1.0, ends="terminated")]
    return lambda task, time: [*fine[:at], Answer(error=LOST)] if time < times else fine


def test_a_lost_episode_is_played_again_with_the_same_seeds_and_leaves_no_trace_in_its_group() -> None:
    engine, whole = ScriptedEngine(), ScriptedEngine()
    seen: list[Trajectory] = []
    result = play(breaks(1, at=2), engine=engine, on_episode=seen.append)
    (trajectory,) = result.trajectories

    assert (trajectory.outcome.stop, trajectory.outcome.error, trajectory.outcome.reward) == (
        StopReason.TERMINATED,
        None,
        1.0,
    )
    assert [one.outcome.stop for one in result.void] == [StopReason.SANDBOX_LOST]
    assert [one.outcome.stop for one in seen] == [StopReason.SANDBOX_LOST, StopReason.TERMINATED]
    seeds = [call.params.seed for call in engine.calls]
    assert seeds[:2] == seeds[2:]  # two turns, lost, and two turns again
    (never_lost,) = play(breaks(0), engine=whole).trajectories
    assert plain(replace(trajectory, attempt=0, began_s=0.0)) == plain(replace(never_lost, began_s=0.0))
    assert seeds[2:] == [call.params.seed for call in whole.calls]


def test_an_episode_that_hung_is_played_again_with_other_tokens() -> None:
    # The environment hangs on one action: with the same seeds, each attempt would hang in the same step.
    fine = [Answer("s"), Answer("t"), Answer(reward=1.0, ends="terminated")]
    hanging = [*fine[:2], Answer(after_s=3600)]
    engine = ScriptedEngine()
    result = play(lambda task, time: hanging if time < 2 else fine, engine=engine, retries=2)
    assert [one.outcome.stop for one in result.void] == [StopReason.TIMEOUT, StopReason.TIMEOUT]
    assert stops(result) == ["terminated"]
    seeds = [call.params.seed for call in engine.calls]
    assert len(set(seeds)) == len(seeds) == 3 * 2
    assert seeds[:2] == [call.params.seed for call in _played(fine)]  # the first attempt is as it was


def _played(answers: Sequence[Answer]) -> list[Call]:
    engine = ScriptedEngine()
    play(script(*answers), engine=engine)
    return engine.calls


def test_a_completion_that_took_too_long_is_sampled_again_with_another_seed() -> None:
    def fails(call: Call) -> str:
        if len(engine.calls) == 1:
            raise DeadlineError("too slow")
        return "x"

    engine = ScriptedEngine(fails)
    result = play(script(Answer("s"), Answer(ends="terminated")), engine=engine, retries=1)
    assert [one.outcome.stop for one in result.void] == [StopReason.NO_COMPLETION]
    first, second = (call.params.seed for call in engine.calls)
    assert (stops(result), first != second) == (["terminated"], True)


def test_an_episode_that_is_lost_each_time_is_tried_up_to_the_budget_and_kept_as_data() -> None:
    engine = ScriptedEngine()
    result = play(breaks(99, at=2), engine=engine, retries=2)
    (trajectory,) = result.trajectories
    assert len(result.void) == 3
    assert result.void[-1] is trajectory
    assert (trajectory.outcome.stop, len(trajectory.turns)) == (StopReason.SANDBOX_LOST, 2)
    assert samples_of(result.groups) == []
    assert engine.forgotten == [f"train-1/00000000/0000.{attempt}" for attempt in range(3)]


def test_groups_are_whole_whatever_was_lost() -> None:
    result = play(breaks(2), (A, B, C), group_size=4, retries=0)
    assert [(group.task, len(group.trajectories)) for group in result.groups] == [(A, 4), (B, 4), (C, 4)]
    for group in result.groups:
        assert [one.member for one in group.trajectories] == [0, 1, 2, 3]
        assert all(one.task == group.task for one in group.trajectories)
        assert [one.is_void for one in group.trajectories] == [True, True, False, False]
    assert len(samples_of(result.groups)) == 6


# --- Seeds -----------------------------------------------------------------------------------------------------------


def test_a_turn_is_sampled_from_the_seed_the_place_the_member_and_its_number() -> None:
    def seeds(seed: int, num_envs: int, tasks: Sequence[Task]) -> dict[tuple[str | None, int], int]:
        engine = ScriptedEngine(lambda call: "x")
        play(script(Answer("s")), tasks, group_size=2, engine=engine, seed=seed, num_envs=num_envs, max_turns=3)
        return {(call.session, len(call.prompt)): call.params.seed for call in engine.calls}

    found = seeds(7, 100, (A, A, B))
    assert len(set(found.values())) == len(found) == 3 * 2 * 3
    assert found == seeds(7, 1, (A, A, B))  # played one after another
    assert found == seeds(7, 100, (C, B, A))  # the place counts, not the task
    assert not set(found.values()) & set(seeds(8, 100, (A, A, B)).values())
    assert found["train-1/00000001/0000.0", 7] == stable_hash(stable_hash(7, 1, 0), 1)


# --- Lockstep --------------------------------------------------------------------------------------------------------


def ragged(task: Task, time: int) -> Sequence[Answer]:
    """Episodes of different speed and length: task n, member m takes n + m / 10 s per step and has n + 1 + m steps."""
    speed, steps = task.seed + time / 10, task.seed + 1 + time
    return [Answer(after_s=speed)] + [Answer(after_s=speed)] * (steps - 1) + [Answer(ends="terminated")]


def test_turn_k_of_all_live_episodes_reaches_the_engine_in_one_moment() -> None:
    engine = ScriptedEngine(lambda call: "x")
    play(ragged, (A, B, C), group_size=2, engine=engine)
    moments: dict[float, list[tuple[str | None, int]]] = {}
    for call in engine.calls:
        moments.setdefault(call.at_s, []).append((call.session, len(call.prompt)))

    members = [(index, member) for index in range(3) for member in range(2)]
    assert [sorted(moment) for moment in moments.values()] == [
        [
            (f"train-1/{index:08d}/{member:04d}.0", 3 + 4 * turn)
            for index, member in members
            if index + 1 + member > turn
        ]
        for turn in range(4)
    ]


@pytest.mark.parametrize(("repeats", "moments"), [(True, [0, 0, 10, 10]), (False, [0, 0, 0, 10])])
def test_turns_reach_an_engine_together_only_if_it_says_that_it_repeats(repeats: bool, moments: list[float]) -> None:
    engine = ScriptedEngine()
    engine.repeats = repeats

    def slow_and_fast(task: Task, time: int) -> Sequence[Answer]:
        return [Answer("s"), Answer("t", after_s=10.0 * task.seed), Answer("", ends="terminated")]

    play(slow_and_fast, (A, B), engine=engine)
    assert [call.at_s for call in engine.calls] == moments


# --- Many episodes ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("capacity", "num_envs"), [(3, 100), (100, 3)])
def test_the_capacity_limits_the_parallel_episodes(capacity: int, num_envs: int) -> None:
    host = ScriptedHost(ragged, capacity)
    engine = ScriptedEngine()
    result = play(ragged, (A, B, C), group_size=3, host=host, engine=engine, num_envs=num_envs)
    assert host.most_lent == min(capacity, num_envs)
    assert sorted(engine.forgotten) == [
        f"train-1/{index:08d}/{member:04d}.0" for index in range(3) for member in range(3)
    ]
    roomy = play(ragged, (A, B, C), group_size=3)
    assert [group.task for group in result.groups] == [A, B, C]
    assert [words(one) for one in result.trajectories] == [words(one) for one in roomy.trajectories]


def test_a_host_that_shrinks_is_asked_for_no_more_than_it_has_left() -> None:
    host = ScriptedHost(script(Answer(), Answer(), Answer(ends="terminated")), capacity=3)
    engine = ScriptedEngine(lambda call: "x")

    def shrink(trajectory: Trajectory) -> None:
        host.capacity = 1

    play(script(), (A, A, A, B, C), host=host, engine=engine, on_episode=shrink)
    played = [int((call.session or "").split("/")[1]) for call in engine.calls]
    assert played == [0, 1, 2, 0, 1, 2, 3, 3, 4, 4]


def words(trajectory: Trajectory) -> list[str]:
    return [turn.action for turn in trajectory.turns]


# --- What nobody can do anything about -------------------------------------------------------------------------------


@pytest.mark.parametrize(("error", "place"), [(OptionError("size", "must be at least 3"), 0), (ValueError("a bug"), 2)])
def test_any_other_error_ends_the_rollout_and_leaves_no_task_behind(error: Exception, place: int) -> None:
    slow = [Answer(after_s=20)]
    broken = [Answer(after_s=1)] * place + [Answer(error=error)]
    host = ScriptedHost(lambda task, time: broken if task == B else slow if task == C else [Answer()])
    engine = ScriptedEngine()
    seen: list[Trajectory] = []

    with pytest.raises(type(error)) as caught:
        play(script(), (A, B, C), group_size=1, host=host, engine=engine, on_episode=seen.append)
    assert caught.value is error
    begun = range(3) if place else [0]
    assert sorted(engine.forgotten) == [f"train-1/{index:08d}/0000.0" for index in begun]
    assert seen == []
