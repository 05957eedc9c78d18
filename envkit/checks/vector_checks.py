"""Checks that a vector environment plays the same episodes as a single environment."""

from __future__ import annotations

import json
from collections.abc import Sequence
from contextlib import closing
from typing import Any, cast

from gymnasium.vector import AutoresetMode

from envkit.checks.recorded import (
    EnvUnderTest,
    FailedCheckError,
    Seen,
    SkippedCheckError,
    differs,
    shown,
    shown_apart,
    step_name,
)
from envkit.env import attributed
from envkit.wiring.environments import VectorMode, make_vec

_COPIES = 3
_CAUSES: dict[VectorMode, str] = {
    "sync": "copies must not share state, such as lists on the class",
    "native": "the class of vector_entry_point must play the same as single environments",
}


def vector_equals_single(env: EnvUnderTest) -> str:
    modes: list[VectorMode] = ["sync"] if env.spec.vector_entry_point is None else ["sync", "native"]
    singles = env.episodes[:_COPIES]
    count = max(len(played.actions) for played in singles)
    for mode in modes:
        vector = make_vec(env.env_id, len(singles), mode=mode, **cast("dict[str, Any]", env.options))
        with closing(vector):
            batch: Sequence[Any] = vector.reset(seed=singles[0].seed)[:1]
            for number in range(count + 1):
                if number:
                    batch = vector.step(tuple(played.actions[:number][-1] for played in singles))[:4]
                for copy, played in enumerate(singles):
                    row = played.seen[number][: len(batch)] if number < len(played.seen) else ()
                    for name, column, expected in zip(Seen._fields, batch, row, strict=False):
                        if differs(value := _plain(column[copy]), expected):
                            raise FailedCheckError(
                                f"mode {mode}, copy {copy}, {step_name(number)}: the {name} in make_vec and in make "
                                f"differs: {shown_apart(value, expected)}; {_CAUSES[mode]}"
                            )
    return f"{len(singles)} copies, {count} steps, {' and '.join(modes)}"


def autoreset_is_honoured(env: EnvUnderTest) -> str:
    ended = [played for played in env.episodes if played.has_ended]
    if not ended:
        raise SkippedCheckError("no recorded episode ended")
    played = min(ended, key=lambda one: len(one.actions))
    with env.opened() as instance:
        env.replay(instance, played)
        with attributed(env.env_id, "reset"):
            following, _ = instance.reset()
    last = played.seen[-1].observation
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
            _expect(mode, "the reward of the step after the end", float(rewards[0]), 0.0)
            _expect(mode, "terminated or truncated after the end", bool(terminated[0] or truncated[0]), False)
    return "SameStep and NextStep begin the next episode as reset of a single environment does"


def _expect(mode: AutoresetMode, what: str, found: object, expected: object) -> None:
    if found != expected:
        raise FailedCheckError(
            f"autoreset={mode.value}: {what} is {shown(found)}, expected {shown(expected)}; begin the next episode as "
            "gymnasium.vector.SyncVectorEnv does with this autoreset"
        )


def _plain(value: Any) -> object:
    return value.item() if hasattr(value, "item") else json.loads(json.dumps(value, default=repr))
