"""Checks of what one instance of an environment returns."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Coroutine, Generator, Iterator, Sequence
from functools import partial
from numbers import Real
from typing import Any, get_args

import numpy as np

from envkit import clock, registry
from envkit.env import AsyncEnv, AsyncEpisode, GymEpisode, loop_thread
from envkit.errors import EnvkitError, OptionError, RequestError
from envkit.http.wire import write
from envkit.metrics import Fold
from envkit.protocols import Expert
from envkit.types import JSON, Observation, Options, Step, Task
from envkit.wiring.env_check.episodes import EnvUnderTest, Played, difference, moves_of, shown
from envkit.wiring.env_check.verdicts import FailedCheckError, SkippedCheckError
from envkit.wiring.envs import attributed, find, open_world

BAD_ACTIONS = (
    "",
    "\x00 \N{SNOWMAN} DROP TABLE",
    "<answer></answer>",
    "<answer>" * 1000,
    "x" * 2**20,
    "\ud800",
    "\\boxed{",
)
"""Nothing that an environment understands: empty, odd characters, very long, half an answer."""

MAX_BLOCK_S = 0.02
"""Seconds that a step may hold its thread, in which hundreds of other episodes wait."""

_EXPERT_STEPS = 1000
_REPEATS = 5
_STEPS_TIMED = 20
_TIMED_S = 10.0
_OPTIONS_TRIED = 6
_OPTION_SEEDS = 3
_OPTION_STEPS = 40
_NO_OPTIONS = ("render_mode", "observation", "action", "kwargs")
"""Parameters that are none for `reset`."""


def observations_are_text(episodes: Sequence[Played]) -> str:
    longest = 0
    for played in episodes:
        for number, observation in enumerate([played.start[0], *(step[0] for step in played.steps)]):
            if not isinstance(observation, str):
                raise FailedCheckError(
                    f"the observation of {_place(played, number)} is {_kind(observation)} ({shown(observation)}); "
                    "return text that a language model can read, and put the rest into info"
                )
            longest = max(longest, len(observation))
    return f"the longest has {longest} characters"


def rewards_are_finite(episodes: Sequence[Played]) -> str:
    rewards = []
    for played in episodes:
        for number, (_, reward, terminated, truncated, _) in enumerate(played.steps, start=1):
            if not isinstance(reward, Real) or not math.isfinite(reward):
                raise FailedCheckError(
                    f"the reward of {_place(played, number)} is {shown(reward)}; return a finite number, 0.0 where "
                    "nothing was earned"
                )
            for name, flag in (("terminated", terminated), ("truncated", truncated)):
                if not isinstance(flag, (bool, np.bool_)):
                    raise FailedCheckError(f"{name} of {_place(played, number)} is {shown(flag)}; return True or False")
            rewards.append(float(reward))
    return f"from {min(rewards):g} to {max(rewards):g}" if rewards else "no step was played"


def info_is_plain_data(episodes: Sequence[Played]) -> str:
    for played in episodes:
        for number, info in enumerate([played.start[1], *(step[4] for step in played.steps)]):
            try:
                write(info)
            except RequestError as error:
                raise FailedCheckError(
                    f"the info of {_place(played, number)} {error}; put only numbers, texts, lists and dicts into it"
                ) from None
    return "all infos can be sent as JSON"


def metrics_are_numbers(env: EnvUnderTest, episodes: Sequence[Played]) -> str:
    with env.opened() as instance:
        named: Any = instance.metadata.get("metrics") or episodes[0].start[1].get("metrics")
    if not named:
        raise SkippedCheckError("no metrics are named; metadata = {'metrics': {'success': 'last'}} would plot success")
    for name, how in named.items():
        if how not in get_args(Fold):
            raise FailedCheckError(f"metric {name} is folded by {how!r}; take one of {', '.join(get_args(Fold))}")
        values = [step[4][name] for played in episodes for step in played.steps if name in step[4]]
        if not values:
            raise FailedCheckError(
                f"metric {name} is named and in no info of {_count(episodes)} steps; report it there"
            )
        for value in values:
            if not isinstance(value, (bool, int, float)) or not math.isfinite(value):
                raise FailedCheckError(
                    f"metric {name} is {shown(value)} in an info; report a bool, int or finite float"
                )
    return ", ".join(named)


def bad_actions_are_answered(env: EnvUnderTest) -> str:
    with env.opened() as instance:
        for action in BAD_ACTIONS:
            with attributed(env.env_id, "reset"):
                instance.reset(seed=0)
            played = Played(0, ("", {}))
            try:
                env.step(instance, action, played)
            except EnvkitError as error:
                raise FailedCheckError(
                    f"{error}, for the action {shown(action)}; answer bad actions with an observation that says what "
                    "was wrong, and raise nothing"
                ) from None
            if not isinstance(played.steps[0][0], str):
                raise FailedCheckError(
                    f"the action {shown(action)} is answered by {_kind(played.steps[0][0])}, no text"
                )
    return f"{len(BAD_ACTIONS)} actions that mean nothing"


def replay_gives_the_same(env: EnvUnderTest, episodes: Sequence[Played]) -> str:
    for played in episodes:
        with env.opened() as instance:
            found = difference(played.as_json(), env.replay(instance, played).as_json())
        if found is not None:
            raise FailedCheckError(
                f"the same actions from the same seed gave two episodes ({found}); draw every chance from the seed of "
                "reset, as by random.Random(stable_hash(seed)), and never from global generators or the time"
            )
    return f"{len(episodes)} episodes, action by action"


def nothing_leaks(env: EnvUnderTest, episodes: Sequence[Played]) -> str:
    with env.opened() as instance:
        for played in [*episodes, *episodes]:
            found = difference(played.as_json(), env.replay(instance, played).as_json())
            if found is not None:
                raise FailedCheckError(
                    f"an instance that has played other episodes plays this one differently ({found}); set all "
                    "state of an episode in reset, since instances are used again"
                )
    return f"one instance played {2 * len(episodes)} episodes like new ones"


def options_count_at_reset(env: EnvUnderTest) -> str:
    same: list[str] = []
    make_only: list[str] = []
    for name, values in _options_to_try(env):
        for value in values:
            outcome = _try_option(env, name, value)
            if outcome is not None:
                (same if outcome else make_only).append(name)
                break
        if len(same) == _OPTIONS_TRIED:
            break
    if same or make_only:
        alone = f"; reset refuses {', '.join(make_only)}, which only make takes" if make_only else ""
        return f"{', '.join(same) or 'none'}: the same by make and by reset{alone}"
    raise SkippedCheckError("no option was found that changes an episode; name one with --option KEY=VALUE")


def _try_option(env: EnvUnderTest, name: str, value: JSON) -> bool | None:
    """Return whether reset takes the option as make does, or refuses it; None where it changes nothing to be seen."""
    others = {key: one for key, one in env.options.items() if key != name}
    try:
        by_make, without = _plays(env, {**others, name: value}), _plays(env, others)
    except (EnvkitError, ImportError):  # a guessed value, or options that need each other
        return None
    if repr(by_make) == repr(without):
        return None
    try:
        with env.opened(others) as instance:
            by_reset = [
                env.record(instance, seed, options={name: value}, most=_OPTION_STEPS).as_json()
                for seed in range(_OPTION_SEEDS)
            ]
            after = [env.record(instance, seed, most=_OPTION_STEPS).as_json() for seed in range(_OPTION_SEEDS)]
    except OptionError:
        return False
    if repr(by_reset) != repr(by_make):
        what = "ignored by" if repr(by_reset) == repr(without) else "not the same in"
        raise FailedCheckError(
            f"option {name}={value!r} changes episodes when make gets it, and is {what} reset(options=...); read "
            "options in reset too, over those of __init__, since the options of a training file arrive there"
        )
    if repr(after) != repr(without):
        raise FailedCheckError(
            f"option {name}={value!r} of one reset still holds in the next, which was given none; let it hold for one "
            "episode"
        )
    return True


def _plays(env: EnvUnderTest, options: Options) -> list[list[JSON]]:
    with env.opened(options) as instance:
        return [env.record(instance, seed, most=_OPTION_STEPS).as_json() for seed in range(_OPTION_SEEDS)]


def _options_to_try(env: EnvUnderTest) -> Iterator[tuple[str, Sequence[JSON]]]:
    """Yield what the caller gave, else options that have a number or a truth as default, with other values."""
    if env.options:
        yield from ((name, [value]) for name, value in env.options.items())
        return
    spec = find(env.env_id)
    parameters = inspect.signature(registry.load(spec.entry_point)).parameters
    usual = {name: one.default for name, one in parameters.items()} | dict(spec.options)
    for name, default in usual.items():
        if name in _NO_OPTIONS:
            continue
        if isinstance(default, bool):
            yield name, [not default]
        elif isinstance(default, int):
            yield name, [default + 1, default - 1, 2 * default]
        elif isinstance(default, float):
            yield name, [default / 2, default + 0.5, 2 * default]


def expert_solves(env: EnvUnderTest, seeds: Sequence[int]) -> str:
    if env.expert is None:
        raise SkippedCheckError("no expert is registered")
    solved = sum(_solves(env, env.expert, seed) for seed in seeds)
    if not solved:
        raise FailedCheckError(
            f"the expert solves none of {len(seeds)} episodes (success in the info of the last step); let its "
            "moves lead there from what it observes"
        )
    return f"solves {solved} of {len(seeds)} episodes"


def _solves(env: EnvUnderTest, expert: Expert, seed: int) -> bool:
    with env.opened() as instance:
        with attributed(env.env_id, "reset"):
            observation, info = instance.reset(seed=seed)
        played = Played(seed, (observation, info))
        while len(played.steps) < _EXPERT_STEPS and not played.has_ended:
            legal = moves_of(info)
            with attributed(env.env_id, "moves of the expert"):
                moves = expert.moves(Observation(observation, legal))
                if not moves:
                    return False
                action = expert.answer(moves[0])
            if legal and not set(moves) <= set(legal):
                raise FailedCheckError(
                    f"the expert plays {moves[0]!r}, which is none of legal_moves: {', '.join(legal)}"
                )
            env.step(instance, action, played)
            observation, info = played.steps[-1][0], dict(played.steps[-1][4])
        if played.has_ended and "success" not in info:
            raise SkippedCheckError("the info of the last step has no success, by which it would be judged")
        return bool(info.get("success"))


def steps_do_not_block(env: EnvUnderTest, played: Played) -> str:
    if not find(env.env_id).shares:
        raise SkippedCheckError("each episode has a sandbox of its own (shares=False)")
    actions = played.actions[:_STEPS_TIMED]
    if not actions:
        raise SkippedCheckError("no step was played")
    with loop_thread() as portal, attributed(env.env_id, "step"):
        longest_s = portal.call(_longest_step, env, played.seed, actions)
    if longest_s > MAX_BLOCK_S:
        raise FailedCheckError(
            f"a step blocks its thread for {longest_s * 1000:.0f} ms (limit {MAX_BLOCK_S * 1000:g} ms), in which no "
            "other episode goes on; await in an AsyncEnv instead (anyio.sleep; anyio.to_thread.run_sync for blocking "
            "calls), or register an environment that computes for long with shares=False"
        )
    return f"at most {longest_s * 1000:.3f} ms a step"


async def _longest_step(env: EnvUnderTest, seed: int, actions: Sequence[str]) -> float:
    """Return the longest step in seconds, each by its quickest repeat: a busy machine takes part of the others."""
    world = open_world(env.env_id, **env.options)
    task = Task(env.env_id, seed, env.options)
    episode = AsyncEpisode(world, task) if isinstance(world, AsyncEnv) else GymEpisode(world, task)
    repeats: list[list[float]] = []
    until = clock.now() + _TIMED_S
    try:
        while len(repeats) < _REPEATS and (not repeats or clock.now() < until):
            await episode.reset()
            repeats.append([])
            for action in actions:
                timed = _Timed(episode.step(action))
                step = await timed
                repeats[-1].append(timed.longest_s)
                if step.ended:
                    break
    finally:
        if isinstance(world, AsyncEnv):
            await world.close()
        else:
            world.close()
    by_step: list[tuple[float, ...]] = list(zip(*repeats, strict=False))
    return max(map(min, by_step))


class _Timed:
    """Awaits a coroutine, and measures how long it runs at most without giving way to the event loop (seconds)."""

    def __init__(self, coroutine: Coroutine[Any, Any, Step]) -> None:
        self.longest_s = 0.0
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Step]:
        advance: Callable[[], Any] = partial(self._coroutine.send, None)
        while True:
            began = clock.stopwatch()
            try:
                waited_for = advance()
            except StopIteration as end:
                step: Step = end.value
                return step
            finally:
                self.longest_s = max(self.longest_s, clock.stopwatch() - began)
            try:
                yield waited_for
                advance = partial(self._coroutine.send, None)
            except BaseException as error:  # such as a cancellation
                advance = partial(self._coroutine.throw, error)


def _place(played: Played, number: int) -> str:
    return f"{f'step {number}' if number else 'reset'} (seed {played.seed})"


def _kind(value: object) -> str:
    return f"a {type(value).__name__}"


def _count(episodes: Sequence[Played]) -> int:
    return sum(len(played.steps) for played in episodes)
