"""Sandboxes that isolate nothing: plain child processes, for machines without bubblewrap.

What is kept all the same: nothing is inherited from our environment, sockets lie in a private folder, and nothing is
left when the sandbox is stopped or we die. What runs there may read and change whatever our user may.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Self

from envkit.sandbox.box import KEEPER, KEPT_BYTES, Box, Boxes, Place, keeper_order, no_way_needed
from envkit.sandbox.child import Child
from envkit.types import SandboxSpec


class ProcessBackend:
    """Starts plain child processes; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with ProcessBackend() as backend``; leaving the block stops what still runs. A box has
    ``ENVKIT_SOCKETS``, ``HOME``, ``TMPDIR``, ``PATH`` and ``LANG`` set, and what its spec names.
    """

    def __init__(self) -> None:
        self._boxes = Boxes("process")

    def capabilities(self) -> Mapping[str, bool]:
        """Nothing is enforced."""
        return {"isolation": False, "network": False, "memory": False, "pids": False}

    async def start(self, spec: SandboxSpec) -> Box:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`. `untrusted` and `memory_mib` are refused."""
        box_id, folder = self._boxes.new_place(spec, self.capabilities())
        home = str(folder / "home")
        env = {
            "ENVKIT_SOCKETS": str(folder / "s"),
            "HOME": home,
            "TMPDIR": home,
            "PATH": "/usr/local/bin:/usr/bin:/bin",
            "LANG": "C.UTF-8",
            **spec.env,
        }
        child = Child((*KEEPER, "--announce"), env={}, keep_bytes=KEPT_BYTES, life_line=True)
        place = Place(env=env, work=home, sockets=folder / "s", enter=no_way_needed, end=child.let_go)
        box = Box(box_id, child, place, self._boxes.discard)
        self._boxes.add(box)
        await box.started(spec.start_timeout_s, order=keeper_order(home, spec.command, env))
        return box

    async def __aenter__(self) -> Self:
        await self._boxes.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._boxes.close()
