"""Keys of a training file about the server that plays the episodes."""

from __future__ import annotations

from typing import Any

import pytest
import yaml

from envkit import clock, config
from envkit.protocols import EnvHost
from envkit.wiring.training import checks, remote
from envkit.wiring.training.resolve import spec_of
from tests.http.envs import serving, slots

URL = "http://127.0.0.1:9"


def problems(env: dict[str, Any], **sections: Any) -> list[str]:
    run = config.parse({"env": {"id": "FrozenLake-v0", **env}, **sections})
    return checks.check(run)


@pytest.mark.parametrize(
    ("env", "sections", "problem"),
    [
        (
            {"url": URL},
            {"sandbox": {"kind": "auto"}},
            "sandbox: the server of env.url plays the episodes in its own sandboxes; leave it out",
        ),
        ({"ca": "ca.pem"}, {}, "env.ca: only for a server; set env.url too, or leave it out"),
        ({"token_file": "token"}, {}, "env.token_file: only for a server; set env.url too, or leave it out"),
        ({"id": "Chess-v0", "url": URL}, {}, "env.id: Chess-v0 is not installed here, but a new tiny policy and the "),
        (
            {"id": "Chess-v0", "url": URL},
            {"engine": {"model": "a/b"}, "imitation": {"kind": "demonstrations"}},
            "env.id: Chess-v0 is not installed here, ",
        ),
        ({"url": URL, "options": {"size": 1}}, {}, "env.options.size: "),
    ],
)
def test_a_problem_is_one_line_that_begins_with_its_key(
    env: dict[str, Any], sections: dict[str, Any], problem: str
) -> None:
    (found,) = problems(env, **sections)
    assert found.startswith(problem)


def test_one_server_plays_all_environments_and_each_problem_names_its_section() -> None:
    def found(*envs: dict[str, Any], **sections: Any) -> list[str]:
        return checks.check(config.parse({"env": list(envs), **sections}))

    lake, sokoban = {"id": "FrozenLake-v0", "url": URL}, {"id": "Sokoban-v0", "url": URL}
    assert found(lake, sokoban) == []
    reason = "must be that of env.0, because one server plays all environments of a run"
    assert found(lake, {"id": "Sokoban-v0"}) == [f"env.1.url: {reason}"]
    others = [f"env.1.{key}: {reason}" for key in ("token_file", "ca", "outage_timeout_s")]
    assert found(lake, {**sokoban, "token_file": "t", "ca": "c", "outage_timeout_s": 1.0}) == others
    (unused,) = found({"id": "FrozenLake-v0", "ca": "c"})
    assert unused == "env.0.ca: only for a server; set env.0.url too, or leave it out"
    (unknown,) = found(lake, {"id": "Chess-v0", "url": URL})
    assert unknown.startswith("env.1.id: Chess-v0 is not installed here, ")
    served = {"engine": {"model": "a/b"}, "imitation": {"kind": "none"}}
    assert found({"id": "Chess-v0", "url": URL}, {**lake, "options": {"size": 1}}, **served)[0].startswith(
        "env.1.options.size: "
    )
    again = yaml.safe_load(config.dump(config.parse({"env": [lake, sokoban]})))
    assert "sandbox" not in again
    assert checks.check(config.parse(again)) == []


def test_the_server_must_have_every_environment() -> None:
    async def main() -> list[str]:
        async with slots() as host, serving(host, envs=lambda: [spec_of(LAKE.envs[0])]) as address:
            envs = [{"id": name, "url": address} for name in ("FrozenLake-v0", "Chess-v0")]
            run = config.parse({"env": envs})
            return [line.replace(address, "URL") for line in await remote.check_server(run)]

    (problem,) = clock.run(main)
    assert problem.startswith("env.1.id: URL has no environment 'Chess-v0'")


def test_a_model_without_imitation_needs_no_environment_here() -> None:
    sections = {"engine": {"model": "a/b"}, "imitation": {"kind": "none"}}
    assert problems({"id": "Chess-v0", "url": URL}, **sections) == []
    run = config.parse({"env": {"id": "Chess-v0", "url": URL}, **sections})
    assert (spec_of(run.envs[0]).id, spec_of(run.envs[0]).splits) == ("Chess-v0", ())


@pytest.mark.parametrize(
    ("env", "problem"),
    [
        ({"url": "fleet"}, "env.url: 'fleet' is not a server address, such as http://127.0.0.1:8000 or "),
        ({"url": URL}, f"env.url: {URL} does not answer: "),
        ({"url": URL, "token_file": "no/token"}, "env.token_file: cannot read a token from no/token: "),
        ({"url": URL, "ca": "no/ca.pem"}, "env.ca: "),
    ],
)
def test_a_server_that_cannot_be_asked_is_a_problem(env: dict[str, str], problem: str) -> None:
    run = config.parse({"env": {"id": "FrozenLake-v0", **env}})
    (found,) = clock.run(remote.check_server, run)
    assert found.startswith(problem)


def test_a_server_without_slots_is_a_problem() -> None:
    class Empty(EnvHost):
        """A host whose sandboxes all failed."""

        capacity = 0

        def lease(self, task: object) -> Any:
            raise NotImplementedError

    async def main(host: Any) -> list[str]:
        async with serving(host, envs=lambda: [spec_of(LAKE.envs[0])]) as address:
            run = config.parse({"env": {"id": "FrozenLake-v0", "url": address}})
            return [line.replace(address, "URL") for line in await remote.check_server(run)]

    async def with_slots() -> list[str]:
        async with slots() as host:
            return await main(host)

    assert clock.run(with_slots) == []
    assert clock.run(main, Empty()) == [
        "env.url: URL has no episode slots, because all its sandboxes failed; restart it"
    ]


LAKE = config.parse({"env": {"id": "FrozenLake-v0"}})
