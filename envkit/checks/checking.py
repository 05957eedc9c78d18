"""The list of checks with their prerequisites, and the function that runs them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

from envkit.checks import env_checks as single
from envkit.checks import second_process as apart
from envkit.checks import vector_checks as many
from envkit.checks.recorded import EnvUnderTest, FailedCheckError, SkippedCheckError
from envkit.env import env_error
from envkit.errors import ConfigError, EnvkitError, UsageError
from envkit.types import JSON

Outcome: TypeAlias = Literal["pass", "fail", "skip"]


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The result of one check.

    Attributes:
        check: Name of the check.
        outcome: ``"skip"`` if the check does not apply, or if a check on which it depends has failed.
        seen: What the check measured, what is wrong and what to change, or why the check was skipped.
    """

    check: str
    outcome: Outcome
    seen: str


_PLAYED = ("episodes can be played",)
_REPEATED = (*_PLAYED, "same seed, same episode", "replay gives the same", "nothing leaks between episodes")

_CHECKS: tuple[tuple[str, Callable[[EnvUnderTest], str], tuple[str, ...]], ...] = (
    ("episodes can be played", single.episodes_can_be_played, ()),
    ("metrics are numbers", single.metrics_are_numbers, _PLAYED),
    ("success is reported", single.success_is_reported, _PLAYED),
    ("bad actions are answered", single.bad_actions_are_answered, _PLAYED),
    ("same seed, same episode", apart.same_in_two_processes, _REPEATED),
    ("replay gives the same", single.replay_gives_the_same, _REPEATED),
    ("nothing leaks between episodes", single.nothing_leaks, _REPEATED),
    ("options count at reset", single.options_count_at_reset, _REPEATED),
    ("expert solves", single.expert_solves, _PLAYED),
    ("vector equals single", many.vector_equals_single, _REPEATED),
    ("autoreset is honoured", many.autoreset_is_honoured, _REPEATED),
    ("steps do not block", single.steps_do_not_block, _PLAYED),
    ("nothing is left behind", apart.nothing_is_left_behind, _PLAYED),
)
"""Name, function and prerequisites of each check."""


def check_env(
    env_id: str,
    *,
    options: dict[str, JSON] | None = None,
    episodes: int = 5,
    on_check: Callable[[str], None] = lambda name: None,
) -> list[CheckResult]:
    """Check an environment against the contract that training and serving rely on.

    The environment runs without a sandbox, in this process and in a new one, so check only code that you trust.

    Args:
        env_id: Registered environment.
        options: Options of the environment. One check also passes them to reset, where they must have the same effect.
        episodes: Number of seeds for most checks, at least 2. A recorded episode ends after 200 steps or 5 s.
        on_check: Called with the name of each check before it starts.

    Returns:
        A result for each check, in order.

    Raises:
        UnknownEnvError: No environment has this id.
        OptionError: The environment rejects an option.
        ConfigError: `episodes` is below 2.
        UsageError: The environment needs a judge.
    """
    if episodes < 2:
        raise ConfigError([f"episodes: must be at least 2, got {episodes}"])
    env = EnvUnderTest(env_id, options or {}, range(episodes))
    if "judge" in env.spec.needs:
        raise UsageError(
            f"{env_id} needs a judge, whose answers vary; check it with envkit tasks ENV check --judge instead"
        )
    # Create an instance before the checks, so that an invalid option raises an error instead of failing a check.
    with env.opened():
        pass
    results: list[CheckResult] = []
    failed: set[str] = set()
    for name, check, after in _CHECKS:
        on_check(name)
        if missing := [one for one in after if one in failed]:
            results.append(CheckResult(name, "skip", f"needs: {missing[0]}"))
        elif after is _REPEATED and not env.spec.replayable:
            results.append(CheckResult(name, "skip", "the environment is registered with replayable=False"))
        else:
            results.append(_run(env, name, check))
            if results[-1].outcome == "fail":
                failed.add(name)
    return results


def _run(env: EnvUnderTest, name: str, check: Callable[[EnvUnderTest], str]) -> CheckResult:
    try:
        return CheckResult(name, "pass", check(env))
    except SkippedCheckError as skipped:
        return CheckResult(name, "skip", str(skipped))
    except (FailedCheckError, EnvkitError) as failed:
        return CheckResult(name, "fail", str(failed))
    except Exception as error:
        # Catch every error, because an unexpected value from the environment can break any line of a check.
        return CheckResult(name, "fail", str(env_error(error, env.env_id, name)))
