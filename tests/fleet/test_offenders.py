"""Environments that kill their sandboxes: their losses count against their tenant only."""

from __future__ import annotations

import anyio
import pytest

from envkit.errors import EnvRejectedError, SandboxLostError
from envkit.fleet.suspects import FREE_LOSSES, Offenders
from envkit.restarts import RestartBudget
from envkit.types import Task
from tests.causes import cause
from tests.echoes import fleet_of
from tests.fleet.fleets import run
from tests.fleet.test_suspects import DEADLY, KILLED, deadly_workers
from tests.keys import key

BUDGET = RestartBudget(restarts=2, window_s=100)


def test_losses_isolate_and_then_reject_one_environment_of_one_tenant_for_a_window() -> None:
    async def main() -> None:
        offenders = Offenders(BUDGET, max_isolated=1)
        for count in range(FREE_LOSSES + BUDGET.restarts):
            assert offenders.is_isolated("ann", "Nasty-v0") is (count >= FREE_LOSSES)
            offenders.record("ann", "Nasty-v0", cause(KILLED))
            await anyio.sleep(1)
        message = "Nasty-v0 is rejected: its episodes killed 5 sandboxes within 100 s .the last: killed by signal 11.; "
        with pytest.raises(EnvRejectedError, match=f"{message}fix the environment, or wait 95 s"):
            offenders.is_isolated("ann", "Nasty-v0")
        assert not offenders.is_isolated("bob", "Nasty-v0")
        assert not offenders.is_isolated("ann", "Echo-v0")
        await anyio.sleep(95.5)
        assert offenders.is_isolated("ann", "Nasty-v0")
        await anyio.sleep(5)
        assert not offenders.is_isolated("ann", "Nasty-v0")

    run(main)


def test_an_only_suspect_that_cannot_be_rebuilt_is_guilty() -> None:
    async def main() -> None:
        offenders = Offenders(BUDGET, max_isolated=1)
        fleet = fleet_of(
            *deadly_workers(9), slots_per_sandbox=4, restarts=BUDGET, offenders=offenders, is_replayable=False
        )
        async with fleet:
            for _ in range(FREE_LOSSES):
                async with fleet.lease_as(key("1", "ann"), Task("Echo-v0", DEADLY)) as episode:
                    await episode.reset()
                    with pytest.raises(SandboxLostError):
                        await episode.step("boom")
                await anyio.sleep(1)
            assert offenders.is_isolated("ann", "Echo-v0")
            assert fleet.waiting == 0

    run(main)
