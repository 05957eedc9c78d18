"""A service that programs in a sandbox reach."""

from __future__ import annotations

import socket
from typing import Any, cast

import anyio
import pytest

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.protocols import Sandbox
from envkit.sandbox.egress.proxy import open_service
from envkit.types import Cause, CauseKind


class RelaySandbox:
    """A sandbox whose relay runs for ever."""

    id = "relay"

    async def exec(self, argv: object, **settings: Any) -> None:
        await anyio.sleep_forever()

    async def connect(self, address: str | int) -> socket.socket:
        ours, theirs = socket.socketpair()
        theirs.setblocking(False)
        ours.detach()
        return theirs


def test_a_sandbox_that_is_lost_inside_is_reported_as_lost() -> None:
    async def connect() -> socket.socket:
        raise AssertionError("no client comes")

    async def main() -> None:
        async with open_service(cast("Sandbox", RelaySandbox()), connect):
            raise SandboxLostError("relay", Cause(CauseKind.STOPPED, "killed"))

    with pytest.raises(SandboxLostError):  # not in an exception group, which a training run would not understand
        clock.run(main)
