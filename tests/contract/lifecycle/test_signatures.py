"""The arguments of sandboxes and shells are those of the protocol, which each class has to write down again."""

from __future__ import annotations

import inspect

import pytest

from envkit.http.client.remote_sandbox import RemoteSandbox, RemoteShell
from envkit.protocols import Sandbox, Shell
from envkit.sandbox.agent_client.programs import AgentShell
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.pool.lease import Lease, WatchedShell
from envkit.wiring.sandboxes.blocking import BlockingSandbox, BlockingShell

CALLS = ["exec", "shell", "read", "write", "upload", "download", "connect", "snapshot", "stop"]
"""Those that the blocking face has just so; it has no `wait`, and its `probe` a bound of its own."""


def arguments(written: type, call: str) -> list[tuple[str, object, object]]:
    """Names, kinds and defaults; of the last, type checkers compare nothing."""
    found = inspect.signature(getattr(written, call)).parameters.values()
    return [(one.name, one.kind, one.default) for one in found]


@pytest.mark.parametrize("call", [*CALLS, "probe", "wait"])
@pytest.mark.parametrize("written", [AgentSandbox, Lease, RemoteSandbox])
def test_a_call_of_a_sandbox_has_the_names_and_defaults_of_the_protocol(written: type, call: str) -> None:
    assert arguments(written, call) == arguments(Sandbox, call)


@pytest.mark.parametrize("call", CALLS)
def test_a_call_of_the_blocking_face_has_the_names_and_defaults_of_the_protocol(call: str) -> None:
    assert arguments(BlockingSandbox, call) == arguments(Sandbox, call)


@pytest.mark.parametrize("written", [AgentShell, WatchedShell, RemoteShell, BlockingShell])
def test_a_command_of_a_shell_has_the_names_and_defaults_of_the_protocol(written: type) -> None:
    assert arguments(written, "run") == arguments(Shell, "run")
