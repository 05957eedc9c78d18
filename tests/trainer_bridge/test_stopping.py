"""A request to stop: what it cancels, and the messages about the wait."""

from __future__ import annotations

import anyio

from envkit import clock
from envkit.trainer_bridge.stopping import Stop


def test_a_stop_reports_each_wait_in_turn() -> None:
    lines: list[str] = []
    stop = Stop(lines.append)
    with stop.waits_for("the update of train step 3"):
        stop.request("; more advice")
        stop.request("; not again")
    for _ in range(2):
        with stop.waits_for("the checkpoint of train step 3"):
            pass
    assert lines == [
        "stopping: waiting for the update of train step 3; more advice",
        "stopping: waiting for the checkpoint of train step 3",
    ]


def test_before_a_stop_nothing_is_reported() -> None:
    lines: list[str] = []
    with Stop(lines.append).waits_for("the update of train step 3"):
        pass
    assert lines == []


def test_a_stop_cancels_the_block_that_runs_or_is_entered_later() -> None:
    async def main() -> list[str]:
        ended: list[str] = []
        stop = Stop()

        async def run(name: str) -> None:
            with stop.cancels():
                await anyio.sleep(3600)
            ended.append(f"{name} at {clock.now():g} s")

        async with anyio.create_task_group() as tasks:
            tasks.start_soon(run, "running")
            await anyio.sleep(1)
            stop.request()
        await run("later")
        return ended

    assert clock.run(main, virtual=True) == ["running at 1 s", "later at 1 s"]
