"""Which environments may use the sandboxes of a gateway, according to its configuration."""

from __future__ import annotations

import anyio
import pytest

from envkit import clock, registry
from envkit.config.serving import ServeConfig
from envkit.environments.tasks.prepared import lease_prepared
from envkit.errors import ForbiddenError, UsageError
from envkit.protocols import Sandbox
from envkit.registry import register
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.node import Node
from envkit.sandbox.process.backend import ProcessBackend
from envkit.types import SandboxSpec, Task
from envkit.wiring.env_server import _resources
from envkit.wiring.gateway.trusted import RoutedHosts, TrustedEnvs, trusted_host
from tests.echoes import Worker, fleet_of
from tests.http.envs import serving, slots
from tests.http.pools import pool_of
from tests.sandbox.fake.backend import FakeBackend


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


@pytest.mark.parametrize("env_id", ["Three-v0", "FrozenLake-v0"])
def test_a_list_with_another_environment_is_refused_when_the_server_starts(env_id: str) -> None:
    with pytest.raises(UsageError, match=rf"envs\.trusted: no registered environment {env_id} needs sandboxes"):
        TrustedEnvs.of(config(trusted=[env_id]))


def test_an_invalid_judge_is_refused_when_the_server_starts() -> None:
    async def main() -> None:
        async with ProcessBackend() as backend, Pool([Node("here", backend)]) as pool:
            with pytest.raises(UsageError, match=r"envs\.judge: .*no-address"):
                async with trusted_host(config(judge="no-address"), pool):
                    pass

    clock.run(main)


def test_environments_with_needs_are_played_by_the_trusted_worker_which_keeps_running() -> None:
    def is_trusted(env_id: str) -> bool:
        if env_id == "Refused-v0":
            raise ForbiddenError("not in the list")
        return env_id == "Tooled-v0"

    async def main() -> None:
        fleet = fleet_of(Worker("shared"), slots_per_sandbox=9)
        trusted = fleet_of(Worker("trusted"), slots_per_sandbox=4, on_demand=True)
        async with fleet, trusted:
            routed = RoutedHosts(fleet, trusted, is_trusted)
            assert routed.capacity == 13
            assert routed.partition_of("Tooled-v0", "") == ("environments with tools", 4)
            assert routed.partition_of("Light-v0", "") == ("environments", 9)
            assert not trusted.pool.views()
            for _ in range(2):
                for env_id, worker in (("Tooled-v0", "trusted"), ("Light-v0", "shared")):
                    async with routed.lease(Task(env_id, 1)) as episode:
                        await episode.reset()
                        assert (await episode.step("go")).info == {"worker": worker}
                await anyio.sleep(5)
            with pytest.raises(ForbiddenError):
                routed.lease(Task("Refused-v0", 1))

    clock.run(main, virtual=True)


def test_a_worker_that_is_stopped_removes_its_snapshots_from_the_server() -> None:
    async def prepare(sandbox: Sandbox) -> None:
        await sandbox.write("/workspace/a", b"a")

    async def main() -> None:
        async with (
            FakeBackend() as backend,
            slots() as host,
            pool_of(backend) as pool,
            serving(host, pool=pool) as address,
        ):
            with anyio.CancelScope() as scope:
                async with _resources(address, None) as found:
                    assert found.sandboxes is not None
                    async with lease_prepared(found.sandboxes, SandboxSpec(), "key", prepare):
                        assert backend._snapshots
                    scope.cancel()
                    await anyio.sleep_forever()
            assert not backend._snapshots

    clock.run(main)
