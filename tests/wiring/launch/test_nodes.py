"""Starting nodes for sandboxes; the launcher is scripted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from envkit import clock
from envkit.errors import UsageError
from envkit.types import Node, Place
from envkit.wiring.launch.nodes import start_nodes


class Scripted:
    """A launcher of two nodes, the second of which cannot start anything if `fails`; also the processes."""

    pid, address, log, has_ended, returncode = 1, "", Path("/dev/null"), False, None

    def __init__(self, *, fails: bool = False) -> None:
        self.nodes = [Node(name=f"n{index}", id="", host="", address=f"10.0.0.{index}") for index in (0, 1)]
        self.started: list[tuple[list[str], Mapping[str, str], str]] = []
        self.killed = 0
        self._fails = fails

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        return next(one.address for one in self.nodes if one.name == node), 9000

    async def start(self, argv: Sequence[str], env: Mapping[str, str], *, place: Place, name: str) -> Scripted:
        if self._fails and place.node == "n1":
            raise UsageError("no room")
        self.started.append((list(argv), env, place.node))
        return self

    async def wait(self) -> str:
        return ""

    async def kill(self, *, grace_s: float = 25.0) -> None:
        self.killed += 1


def test_each_node_serves_at_the_address_of_its_machine() -> None:
    launcher = Scripted()

    async def main() -> list[str]:
        found = await start_nodes(launcher, ["n0", "n1"], ["--token-file", "t"], env={"A": "b"})
        return [url for url, _ in found]

    assert clock.run(main) == ["http://10.0.0.0:9000", "http://10.0.0.1:9000"]
    argv, env, node = launcher.started[1]
    assert argv[1:] == [
        *("-m", "envkit", "serve", "--node", "--host", "10.0.0.1", "--port", "9000", "--token-file", "t")
    ]
    assert (env, node, launcher.killed) == ({"A": "b"}, "n1", 0)


def test_if_one_node_cannot_be_started_the_others_end() -> None:
    launcher = Scripted(fails=True)

    async def main() -> None:
        with pytest.raises(UsageError, match="no room"):
            await start_nodes(launcher, ["n0", "n1"], env={})

    clock.run(main)
    assert (len(launcher.started), launcher.killed) == (1, 1)
