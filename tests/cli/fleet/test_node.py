"""``envkit node drain``: when it says that a node can be stopped, and when not."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import pytest

from envkit import cli, clock
from envkit.cli.fleet import node
from envkit.http.protocol.node_messages import NodeStatus


def status(state: str, sandboxes: int, why: str = "") -> NodeStatus:
    return NodeStatus("n", "http://n:1", state, why, sandboxes, None)


@pytest.mark.parametrize(
    ("later", "code", "words"),
    [
        (status("draining", 0), 0, "n has no sandboxes; it can be stopped"),
        (status("lost", 0, "it was restarted"), 1, "it is lost (it was restarted)"),
        (status("up", 1), 1, "it is up"),
        (status("up", 0), 1, "it is up"),
        (None, 1, "it is gone from the list"),
    ],
)
def test_a_drain_ends_well_only_if_the_node_still_drains_and_is_empty(
    later: NodeStatus | None,
    code: int,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Client:
        async def drain(self, name: str) -> NodeStatus:
            return status("draining", 1)

        async def list_nodes(self) -> list[NodeStatus]:
            return [one for one in (later,) if one is not None]

    def ask(call: Callable[[Client], Awaitable[None]], *where: object) -> None:
        clock.run(call, Client())

    monkeypatch.setattr(node, "ask_server", ask)
    monkeypatch.setattr(node, "_POLL_S", 0.0)
    with pytest.raises(SystemExit) as ended:
        cli.main(["node", "drain", "n", "--url", "http://gateway:1"])
    printed = capsys.readouterr()
    assert ended.value.code == code
    assert words in (printed.err if code else printed.out)
