"""Checks of an environment that play it in this process, one instance at a time."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, get_args

import anyio
import anyio.lowlevel

from envkit import clock, registry
from envkit.checks.recorded import (
    NO_SUCCESS,
    SEEDED,
    EnvUnderTest,
    Explorer,
    FailedCheckError,
    PlayedEpisode,
    SkippedCheckError,
    require_same,
    shown,
    unless_void,
)
from envkit.env import attributed
from envkit.errors import EnvkitError, OptionError
from envkit.metrics import Fold
from envkit.protocols import EpisodePlayer, Player
from envkit.trainer_bridge.rollout import RolloutLimits, play
from envkit.trainer_bridge.rollout.players import ScriptedPlayer
from envkit.types import JSON, Observation, Options, Reset, RolloutRequest, Task, Trajectory
from envkit.wiring.blocking_env import loop_thread
from envkit.wiring.environments import open_resources, slots

BAD_ACTIONS = (
    "",
    "\x00 \N{SNOWMAN} DROP TABLE",
    "<answer></answer>",
    "<answer>" * 1000,
    "x" * 2**20,
    "\ud800",
    "\\boxed{",
)
"""Actions without meaning: empty, odd characters, very long, incomplete answers."""

MAX_BLOCK_S = 0.02
"""Maximum seconds that a step may block its thread, because hundreds of other episodes may share the thread."""

_EXPERT_STEPS = 1000
_REPEATS = 5
_STEPS_TIMED = 20
_TIMED_S = 10.0
_OPTIONS_TRIED = 6
_OPTION_SEEDS = range(3)
_OPTION_STEPS = 40
_OPTIONS_S = 20.0


def episodes_can_be_played(env: EnvUnderTest) -> str:
    ended = sum(played.has_ended for played in env.episodes)
    steps = sum(len(played.actions) for played in env.episodes)
    return f"{len(env.episodes)} episodes, {steps} steps, {ended} ended"


def metrics_are_numbers(env: EnvUnderTest) -> str:
    with env.opened() as instance:
        named: Any = instance.metadata.get("metrics") or env.episodes[0].seen[0].info.get("metrics")
    if not named:
        raise SkippedCheckError("no metrics declared; to plot success, set metadata = {'metrics': {'success': 'last'}}")
    infos = [seen.info for played in env.episodes for seen in played.seen[1:]]
    for name, how in named.items():
        if how not in get_args(Fold):
            raise FailedCheckError(f"metric {name} has the aggregation {how!r}; use one of {', '.join(get_args(Fold))}")
        values = [info[name] for info in infos if name in info]
        if not values:
            raise FailedCheckError(f"metric {name} is missing in the infos of {len(infos)} steps; report it there")
        wrong = [one for one in values if not isinstance(one, (bool, int, float)) or not math.isfinite(one)]
        if wrong:
            raise FailedCheckError(f"metric {name} is {shown(wrong[0])} in an info; report a bool, int or finite float")
    return ", ".join(named)


def success_is_reported(env: EnvUnderTest) -> str:
    ended = [played.success for played in env.episodes if played.has_ended]
    known = [success for success in ended if success is not None]
    if not known:
        raise SkippedCheckError(NO_SUCCESS if ended else "no recorded episode ended")
    return f"in {len(known)} of {len(ended)} episodes that ended; {sum(known)} succeeded"


def bad_actions_are_answered(env: EnvUnderTest) -> str:
    with env.opened() as instance:
        for action in BAD_ACTIONS:
            try:
                env.play(instance, 0, ScriptedPlayer([[action]]))
            except EnvkitError as error:
                raise FailedCheckError(
                    f"{error}, for the action {shown(action)}; answer bad actions with an observation that says what "
                    "was wrong, and raise nothing"
                ) from None
    return f"{len(BAD_ACTIONS)} meaningless actions"


def replay_gives_the_same(env: EnvUnderTest) -> str:
    for played in env.episodes:
        with env.opened() as instance:
            again = env.replay(instance, played).as_json()
        require_same(played.as_json(), again, "the same actions from the same seed gave different episodes", SEEDED)
    return f"{len(env.episodes)} episodes, action by action"


def nothing_leaks(env: EnvUnderTest) -> str:
    episodes = [*env.episodes, *env.episodes]
    with env.opened() as instance:
        for played in episodes:
            again = env.replay(instance, played).as_json()
            problem = "an instance that has played other episodes plays this one differently"
            remedy = "set all state of an episode in reset, since instances are used again"
            require_same(played.as_json(), again, problem, remedy)
    return f"one instance played {len(episodes)} episodes like new ones"


def options_count_at_reset(env: EnvUnderTest) -> str:
    same: list[str] = []
    tried: list[str] = []
    until = clock.stopwatch() + _OPTIONS_S
    for name, values in _options_to_try(env):
        tried.append(name)
        if any(_counts_at_reset(env, name, value) for value in values):
            same.append(name)
        if len(same) == _OPTIONS_TRIED or clock.stopwatch() > until:
            break
    if not same:
        why = "no option has a number, true or false as its default"
        if tried:
            why = f"other values of {', '.join(tried)} changed none of {len(_OPTION_SEEDS)} random episodes"
        raise SkippedCheckError(f"{why}; name an option with --option KEY=VALUE")
    return f"{', '.join(same)}: same effect when passed to make as to reset"


def _counts_at_reset(env: EnvUnderTest, name: str, value: JSON) -> bool:
    """Check that an option has the same effect when passed to reset as to make; return whether it has any in both."""
    others = {key: one for key, one in env.options.items() if key != name}
    try:
        by_make, without = _with_options(env, {**others, name: value}), _with_options(env, others)
    except EnvkitError:  # the guessed value is invalid, or the option needs another option
        return False
    if by_make == without:
        return False
    try:
        by_reset, after = _with_options(env, others, at_reset={name: value})
    except OptionError:
        return False
    if by_reset != by_make[0]:
        ignores = "reset(options=...) ignores it"
        how = ignores if by_reset == without[0] else "has a different effect when passed to reset(options=...)"
        raise FailedCheckError(
            f"option {name}={value!r} has an effect when passed to make, but {how}; the options of a training file "
            "are passed to reset, so let reset read options too, and let them override those of __init__"
        )
    if after != without[0]:
        raise FailedCheckError(
            f"option {name}={value!r} of one reset still has an effect after the next reset, which does not pass it; "
            "apply it to one episode only"
        )
    return True


def _with_options(env: EnvUnderTest, options: Options, *, at_reset: Options | None = None) -> list[str]:
    """Play all seeds in one instance, first with `at_reset` passed to reset, if given; return the episodes as text."""
    with env.opened(options) as instance:
        return [
            repr([env.play(instance, seed, options=one, most=_OPTION_STEPS).as_json() for seed in _OPTION_SEEDS])
            for one in ([None] if at_reset is None else [at_reset, None])
        ]


def _options_to_try(env: EnvUnderTest) -> Iterator[tuple[str, Sequence[JSON]]]:
    """Yield options with values to try: the caller's, or else all options whose default is a number or bool."""
    if env.options:
        yield from ((name, [value]) for name, value in env.options.items())
        return
    for name, default in registry.option_defaults(env.spec).items():
        if isinstance(default, bool):
            yield name, [not default]
        elif isinstance(default, (int, float)):
            yield name, [default + 1, default - 1, 2 * default, default / 2]


def expert_solves(env: EnvUnderTest) -> str:
    if env.expert is None:
        raise SkippedCheckError("no expert is registered")
    solved = []
    for seed in env.seeds:
        with env.opened() as instance:
            played = env.play(instance, seed, Explorer(env, only_expert=True), most=_EXPERT_STEPS)
        solved.append(played.success if played.has_ended else False)
    if None in solved:
        raise SkippedCheckError(NO_SUCCESS)
    if not any(solved):
        raise FailedCheckError(
            f"the expert solves none of {len(env.seeds)} episodes (success in the info of the last step); its "
            "moves must solve them from the observations alone"
        )
    return f"solves {sum(map(bool, solved))} of {len(env.seeds)} episodes"


def steps_do_not_block(env: EnvUnderTest) -> str:
    played = env.episodes[0]
    if not played.actions:
        raise SkippedCheckError("no step was played")
    with loop_thread() as portal, attributed(env.env_id, "step"):
        longest_s = portal.call(_longest_step, env, played)
    if longest_s > MAX_BLOCK_S:
        raise FailedCheckError(
            f"a step blocks its thread for {longest_s * 1000:.0f} ms (limit {MAX_BLOCK_S * 1000:g} ms) and stops "
            "all other episodes; await in an AsyncEnv instead (anyio.sleep; anyio.to_thread.run_sync for blocking "
            "calls), or serve an environment with long computations with as many sandboxes as episodes"
        )
    return f"at most {longest_s * 1000:.3f} ms a step"


async def _longest_step(env: EnvUnderTest, played: PlayedEpisode) -> float:
    """Return the longest time in seconds that a step of the episode blocks the event loop.

    The episode is played several times, and the shortest time of each step counts.
    """
    timer = _BlockTimer(played.actions[:_STEPS_TIMED])
    request = RolloutRequest("check-env", Task(env.env_id, played.seed, env.options), 0)
    limits = RolloutLimits(max_turns=len(timer.actions))
    until = clock.now() + _TIMED_S
    async with (
        open_resources(env.spec.needs) as resources,
        slots(1, env.options, resources) as host,
        clock.background_tasks() as tasks,
    ):
        tasks.start_soon(timer.watch)
        for repeat in range(_REPEATS):
            if repeat and clock.now() > until:
                break
            timer.finish(unless_void(await play(host, timer, limits, request)))
    return max(one for one in timer.shortest_s if one < math.inf)


class _BlockTimer(Player, EpisodePlayer):
    """Plays `actions` and measures for how long each step blocks the event loop, at least, over several episodes."""

    def __init__(self, actions: Sequence[str]) -> None:
        self.actions = actions
        self.shortest_s = [math.inf] * len(actions)
        self._blocked_s: list[float] = []

    async def watch(self) -> None:
        """Measure how long the event loop takes for each iteration, until cancelled."""
        while True:
            began = clock.stopwatch()
            await anyio.lowlevel.checkpoint()
            if self._blocked_s:
                self._blocked_s[-1] = max(self._blocked_s[-1], clock.stopwatch() - began)

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        self._blocked_s = []
        return self

    async def act(self, observation: Observation) -> str:
        # Let `watch` run, so that the last step counts up to here, and the next one only from here.
        await anyio.lowlevel.checkpoint()
        self._blocked_s.append(0.0)
        return self.actions[len(self._blocked_s) - 1]

    def finish(self, played: Trajectory) -> None:
        """Add the times of an episode. The last step blocked for at most its own duration."""
        for number, (turn, blocked_s) in enumerate(zip(played.turns, self._blocked_s, strict=True)):
            self.shortest_s[number] = min(self.shortest_s[number], blocked_s, turn.step_s)
