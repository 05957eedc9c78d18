"""Starting nodes for sandboxes; the launcher is scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import anyio.lowlevel
import pytest

from envkit import clock
from envkit.errors import UsageError
from envkit.restarts import RestartBudget
from envkit.types import Node, Place
from envkit.wiring.launch.nodes import running_nodes


class Scripted:
    """A launcher of two nodes, the second of which cannot start anything if `fails`; also the processes."""

    pid, address, log, has_ended, returncode = 1, "", Path("/dev/null"), False, None

    def __init__(self, *, fails: bool = False) -> None:
        self.nodes = [Node(name=f"n{index}", id="", host="", address=f"10.0.0.{index}") for index in (0, 1)]
        self.started: list[tuple[list[str], Mapping[str, str], str]] = []
        self.killed = 0
        self.ends = anyio.Event()
        self._fails = fails

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        return next(one.address for one in self.nodes if one.name == node), 9000

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> Scripted:
        if self._fails and place.node == "n1":
            raise UsageError("no room")
        self.started.append((list(argv), env, place.node))
        return self

    async def wait(self) -> str:
        await self.ends.wait()
        return "ended"

    async def kill(self, *, grace_s: float = 25.0) -> None:
        self.killed += 1


def test_each_node_serves_at_the_address_of_its_machine_and_is_started_again_there() -> None:
    launcher = Scripted()

    async def main() -> list[str]:
        lines: list[str] = []
        opening = running_nodes(
            launcher,
            ["n0", "n1"],
            ["--backend", "local"],
            env={"A": "b"},
            budget=RestartBudget(2),
            announce=lines.append,
        )
        async with opening as urls:
            assert urls == ["http://10.0.0.0:9000", "http://10.0.0.1:9000"]
            assert launcher.killed == 0
            launcher.ends.set()
            while len(launcher.started) < 6:
                await anyio.lowlevel.checkpoint()
        return lines

    lines = clock.run(main)
    argv, env, node = launcher.started[1]
    assert argv[1:] == [
        *("-m", "envkit", "serve", "--node", "--host", "10.0.0.1", "--port", "9000", "--backend", "local")
    ]
    assert (env, node, launcher.killed) == ({"A": "b"}, "n1", 2)
    assert [launcher.started.count((argv, env, "n1")), len(launcher.started)] == [3, 6]
    assert lines.count("the node for sandboxes on n1 ended; it is started again") == 2


def test_if_one_node_cannot_be_started_the_others_end() -> None:
    launcher = Scripted(fails=True)

    async def main() -> None:
        with pytest.raises(UsageError, match="no room"):
            async with running_nodes(
                launcher, ["n0", "n1"], env={}, budget=RestartBudget(), announce=lambda line: None
            ):
                pass

    clock.run(main)
    assert (len(launcher.started), launcher.killed) == (1, 1)
