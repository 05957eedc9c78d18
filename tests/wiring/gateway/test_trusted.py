"""Which environments may use the sandboxes of a gateway, according to its configuration."""

from __future__ import annotations

import pytest

from envkit import registry
from envkit.config.serving import ServeConfig
from envkit.errors import ForbiddenError, UsageError
from envkit.registry import register
from envkit.wiring.gateway.trusted import TrustedEnvs


@pytest.fixture(autouse=True)
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    for name in ("One-v0", "Two-v0"):
        register(name, "nowhere:Env", needs={"sandbox"})


def config(**envs: object) -> ServeConfig:
    return ServeConfig.model_validate({"envs": envs})


def test_all_environments_with_needs_may_use_sandboxes_unless_a_list_names_some() -> None:
    every, some = TrustedEnvs.of(config()), TrustedEnvs.of(config(trusted=["One-v0"]))
    assert [every.plays(env_id) for env_id in ("One-v0", "Two-v0", "FrozenLake-v0")] == [True, True, False]
    assert some.plays("One-v0")
    with pytest.raises(ForbiddenError, match=r"Two-v0 may not use .*; add it to envs\.trusted there"):
        some.plays("Two-v0")


@pytest.mark.parametrize(
    ("envs", "problem"),
    [
        ({"trusted": ["Three-v0"]}, r"envs\.trusted: no registered environment Three-v0 needs sandboxes"),
        ({"trusted": ["FrozenLake-v0"]}, r"envs\.trusted: no registered environment FrozenLake-v0 needs sandboxes"),
        ({"judge": "no-address"}, r"envs\.judge: .*no-address"),
    ],
)
def test_a_wrong_list_or_judge_is_refused_when_the_server_starts(envs: dict[str, object], problem: str) -> None:
    with pytest.raises(UsageError, match=problem):
        TrustedEnvs.of(config(**envs))
