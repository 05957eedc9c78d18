"""Checks of several copies that step together."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

from gymnasium.vector import AutoresetMode

from envkit.wiring.env_check.episodes import EnvUnderTest, Played, shown, shown_apart
from envkit.wiring.env_check.verdicts import FailedCheckError, SkippedCheckError
from envkit.wiring.envs import VectorMode, attributed, find, make_vec

_COPIES = 3
_NAMES = ("observation", "reward", "terminated", "truncated")


def vector_equals_single(env: EnvUnderTest) -> str:
    modes: list[VectorMode] = ["sync"]
    if find(env.env_id).vector_entry_point is not None:
        modes.append("native")
    singles = []
    for seed in range(_COPIES):
        with env.opened() as instance:
            singles.append(env.record(instance, seed))
    count = max(len(played.steps) for played in singles)
    for mode in modes:
        vector = make_vec(env.env_id, _COPIES, mode=mode, **cast("dict[str, Any]", env.options))
        with closing(vector):
            _compare(0, (vector.reset(seed=0)[0],), [played.start[:1] for played in singles], mode)
            for number in range(count):
                actions = tuple(played.actions[min(number, len(played.actions) - 1)] for played in singles)
                rows = [played.steps[number][:4] if number < len(played.steps) else () for played in singles]
                _compare(number + 1, vector.step(actions)[:4], rows, mode)
    return f"{_COPIES} copies, {count} steps, {' and '.join(modes)}"


def _compare(number: int, batch: Sequence[Any], rows: Sequence[tuple[Any, ...]], mode: str) -> None:
    """Compare what copies return with what single ones did; a row is empty where a single one was over before."""
    for copy, row in enumerate(rows):
        for name, column, wanted in zip(_NAMES, batch, row, strict=False):
            value = _plain(column[copy])
            if value != wanted and repr(value) != repr(wanted):
                cause = (
                    "the class of vector_entry_point has to play what as many single ones do"
                    if mode == "native"
                    else "copies may share nothing, such as lists on the class"
                )
                raise FailedCheckError(
                    f"mode {mode}, copy {copy}, step {number}: the {name} is {shown_apart(value, wanted)} in a "
                    f"single one; {cause}"
                )


def autoreset_is_honoured(env: EnvUnderTest, episodes: Sequence[Played]) -> str:
    ended = [played for played in episodes if played.has_ended]
    if not ended:
        raise SkippedCheckError("no recorded episode ended")
    played = min(ended, key=lambda one: len(one.steps))
    with env.opened() as instance:
        env.replay(instance, played)
        with attributed(env.env_id, "reset"):
            following, _ = instance.reset()
    last = played.steps[-1][0]
    for mode in (AutoresetMode.SAME_STEP, AutoresetMode.NEXT_STEP):
        vector = make_vec(env.env_id, 1, autoreset=mode, **cast("dict[str, Any]", env.options))
        with closing(vector):
            vector.reset(seed=played.seed)
            for action in played.actions:
                observations, _, _, _, infos = vector.step((action,))
            if mode is AutoresetMode.SAME_STEP:
                final = infos.get("final_obs", [None])[0]
                _expect(mode, "infos['final_obs'] of the last step", final, last)
                _expect(mode, "the observation of the last step", observations[0], following)
                continue
            _expect(mode, "the observation of the last step", observations[0], last)
            observations, rewards, terminated, truncated, _ = vector.step((played.actions[-1],))
            _expect(mode, "the observation of the step after the end", observations[0], following)
            ended_again = bool(terminated[0] or truncated[0])
            _expect(mode, "the reward of the step after the end", float(rewards[0]), 0.0)
            _expect(mode, "the end of the step after the end", ended_again, False)
    return "SameStep and NextStep begin the next episode as a single one's reset does"


def _expect(mode: AutoresetMode, what: str, found: object, wanted: object) -> None:
    if found != wanted:
        raise FailedCheckError(
            f"autoreset={mode.value}: {what} is {shown(found)}, expected {shown(wanted)}; begin the next episode as "
            "gymnasium.vector.SyncVectorEnv does with this autoreset"
        )


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, "item") else json.loads(json.dumps(value, default=repr))
