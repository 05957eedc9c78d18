"""Keys of a training file about the server that plays the episodes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from envkit import clock, config
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
            {"engine": {"model": "a/b"}, "warmup": {"kind": "demonstrations"}},
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


def test_a_model_without_warm_up_needs_no_environment_here() -> None:
    sections = {"engine": {"model": "a/b"}, "warmup": {"kind": "none"}}
    assert problems({"id": "Chess-v0", "url": URL}, **sections) == []
    run = config.parse({"env": {"id": "Chess-v0", "url": URL}, **sections})
    assert (spec_of(run).id, spec_of(run).splits) == ("Chess-v0", ())


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
    class Empty:
        """A host whose sandboxes all failed."""

        capacity = 0

        def lease(self, task: object) -> Any:
            raise NotImplementedError

    async def main(host: Any) -> list[str]:
        async with serving(host, envs=lambda: [spec_of(LAKE)]) as address:
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


def test_the_written_file_of_a_run_on_a_server_is_a_valid_training_file(tmp_path: Path) -> None:
    run = config.parse({"env": {"id": "FrozenLake-v0", "url": URL}})
    again = config.parse(yaml.safe_load(config.dump(run)))
    assert checks.check(again) == []
    assert config.dump(again) == config.dump(run)
    assert "sandbox" in yaml.safe_load(config.dump(LAKE))
