"""The checks in their order, and which of them another one has to pass first."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property, partial
from typing import Any

from envkit.errors import ConfigError, EnvkitError
from envkit.tracebacks import env_error
from envkit.types import JSON
from envkit.wiring.env_check import apart, many, single
from envkit.wiring.env_check.episodes import EnvUnderTest, Played
from envkit.wiring.env_check.verdicts import FailedCheckError, SkippedCheckError, Verdict
from envkit.wiring.envs import find

_PLAYS = "episodes can be played"
_TEXT = "observations are text"
_BAD = "bad actions are answered"
_SAME = "same seed, same episode"
_REPLAY = "replay gives the same"
_LEAKS = "nothing leaks between episodes"
_REPLAYABLE = "replayable"


def check_env(env_id: str, *, options: dict[str, JSON] | None = None, episodes: int = 5) -> list[Verdict]:
    """Check an environment against the contract that training and serving count on.

    It is played in this process and in two new ones, so check only what you would run here anyway.

    Args:
        env_id: Registered environment.
        options: What it is made with; also tried at reset.
        episodes: Seeds that most checks play, at least 2.

    Returns:
        A verdict for each check, in the order of the checks.

    Raises:
        UnknownEnvError: No environment has this id.
        OptionError: It refuses an option.
        ConfigError: `episodes` is below 2.
    """
    if episodes < 2:
        raise ConfigError([f"episodes: must be at least 2, got {episodes}"])
    checks = _Checks(EnvUnderTest(env_id, options or {}), range(episodes))
    with checks.env.opened():  # an option that is refused is the caller's mistake
        pass
    return checks.run()


class _Checks:
    """The checks of one environment, with the episodes that they share."""

    def __init__(self, env: EnvUnderTest, seeds: range) -> None:
        self.env = env
        self._seeds = seeds

    @cached_property
    def _episodes(self) -> list[Played]:
        """Each in an instance of its own."""
        episodes = []
        for seed in self._seeds:
            with self.env.opened() as instance:
                episodes.append(self.env.record(instance, seed))
        return episodes

    @cached_property
    def _apart(self) -> list[dict[str, Any]]:
        return apart.play_apart(self.env, self._seeds)

    def run(self) -> list[Verdict]:
        """Run each check whose preconditions held."""
        env = self.env
        broken = {} if find(env.env_id).replayable else {_REPLAYABLE: "it is registered with replayable=False"}
        verdicts: list[Verdict] = []

        def check(name: str, call: Callable[[], str], *after: str) -> None:
            reason = next((broken[one] for one in after if one in broken), None)
            verdict = self._verdict(name, call) if reason is None else Verdict(name, "skip", reason)
            verdicts.append(verdict)
            if verdict.outcome == "fail" or reason is not None:
                broken[name] = reason or f"only after: {name}"

        same = (_REPLAYABLE, _PLAYS, _TEXT, _SAME, _REPLAY)
        check(_PLAYS, self._plays)
        check(_TEXT, lambda: single.observations_are_text(self._episodes), _PLAYS)
        check("rewards are finite", lambda: single.rewards_are_finite(self._episodes), _PLAYS)
        check("info is plain data", lambda: single.info_is_plain_data(self._episodes), _PLAYS)
        check("metrics are numbers", lambda: single.metrics_are_numbers(env, self._episodes), _PLAYS)
        check(_BAD, partial(single.bad_actions_are_answered, env), _TEXT)
        check(_SAME, lambda: apart.same_in_two_processes(self._apart), _REPLAYABLE, _PLAYS, _TEXT)
        check(_REPLAY, lambda: single.replay_gives_the_same(env, self._episodes), _REPLAYABLE, _TEXT, _SAME)
        check(_LEAKS, lambda: single.nothing_leaks(env, self._episodes), *same)
        check("options count at reset", partial(single.options_count_at_reset, env), *same, _LEAKS)
        check("expert solves", partial(single.expert_solves, env, self._seeds), _PLAYS, _TEXT)
        check("vector equals single", partial(many.vector_equals_single, env), *same, _LEAKS)
        check("autoreset is honoured", lambda: many.autoreset_is_honoured(env, self._episodes), *same, _LEAKS)
        check("steps do not block", lambda: single.steps_do_not_block(env, self._episodes[0]), _PLAYS)
        check("nothing is left behind", lambda: apart.nothing_is_left_behind(self._apart), _PLAYS)
        return verdicts

    def _plays(self) -> str:
        ended = sum(played.has_ended for played in self._episodes)
        steps = sum(len(played.steps) for played in self._episodes)
        return f"{len(self._episodes)} episodes, {steps} steps, {ended} came to an end"

    def _verdict(self, name: str, call: Callable[[], str]) -> Verdict:
        try:
            return Verdict(name, "pass", call())
        except SkippedCheckError as skipped:
            return Verdict(name, "skip", str(skipped))
        except (FailedCheckError, EnvkitError) as failed:
            return Verdict(name, "fail", str(failed))
        except Exception as error:  # the environment returned something of another shape
            return Verdict(name, "fail", str(env_error(error, self.env.env_id, name)))
