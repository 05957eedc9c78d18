"""Starting nodes for sandboxes, with a scripted launcher."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.config.parts import BuiltInSandboxSection
from envkit.errors import UsageError
from envkit.types import Node, Place
from envkit.wiring.sandboxes.run_nodes import run_nodes


class Scripted:
    """A launcher of two nodes, the second of which cannot start anything if `fails`; also the processes."""

    pid, returncode = 1, None

    def __init__(self, log: Path, *, fails: bool = False) -> None:
        log.touch()
        self.log = log
        self.nodes = [Node(name=f"n{index}", id="", host="", address=f"10.0.0.{index}") for index in (0, 1)]
        self.started: list[tuple[list[str], Mapping[str, str], str]] = []
        self.killed = 0
        self.ends = anyio.Event()
        self._ports = itertools.count(9000)
        self._fails = fails

    async def endpoint(self, node: str, port: int | None = None) -> tuple[str, int]:
        return next(one.address for one in self.nodes if one.name == node), next(self._ports)

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


def test_each_node_serves_at_the_address_of_its_machine_and_is_started_again_at_another_port(tmp_path: Path) -> None:
    launcher = Scripted(tmp_path / "log")
    section = BuiltInSandboxSection.model_validate({"kind": "local", "restarts": {"budget": 2}})

    async def main() -> list[str]:
        lines: list[str] = []
        async with run_nodes(launcher, ["n0", "n1"], section, lines.append) as nodes:
            urls = [one.url for one in nodes.addresses]
            assert urls == ["http://10.0.0.0:9000", "http://10.0.0.1:9001"]
            assert launcher.killed == 0
            launcher.ends.set()
            while len(launcher.started) < 6:  # noqa: ASYNC110 - the launcher sets no event
                await anyio.sleep(1)
            assert {one.url.rpartition(":")[2] for one in nodes.addresses} == {"9004", "9005"}
        return lines

    lines = clock.run(main, virtual=True)
    argv, env, node = launcher.started[1]
    assert argv[1:] == [
        *("-m", "envkit", "serve", "--node", "--host", "10.0.0.1", "--port", "9001", "--backend", "local")
    ]
    assert (list(env), node) == (["ENVKIT_TOKEN"], "n1")
    assert launcher.killed == 2
    line = f"the node for sandboxes on n1 ended; its log is {tmp_path / 'log'}; it is started again"
    assert lines.count(line) == 2


def test_if_one_node_cannot_be_started_the_others_end(tmp_path: Path) -> None:
    launcher = Scripted(tmp_path / "log", fails=True)

    async def main() -> None:
        with pytest.raises(UsageError, match="no room"):
            async with run_nodes(launcher, ["n0", "n1"], BuiltInSandboxSection(), lambda line: None):
                pass

    clock.run(main)
    assert (len(launcher.started), launcher.killed) == (1, 1)
