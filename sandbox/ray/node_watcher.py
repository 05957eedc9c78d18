"""The nodes of a Ray cluster as they come and go, handed to a pool of sandboxes."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from types import TracebackType
from typing import Self

import anyio
from anyio.abc import TaskStatus

from envkit import clock
from envkit.errors import EnvkitError, SandboxError
from envkit.types import Cause, CauseKind

from ..pool.node import Capacity, Node
from .backend import RayNodeBackend
from .cluster import Cluster, ClusterNode
from .node_agent import NodeKind

BOXES = "envkit_sandboxes"
"""The resource of a Ray node that says how many boxes it may hold; without it, its processors and memory bound them."""

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_AGAIN_S = 15.0
"""Seconds until a node that was lost, or on which no actor could be started, is tried again: so long Ray may take to
notice that it is gone."""
_RECONNECT_S = 1.0
_RECONNECT_MOST_S = 30.0
_FORGET_S = 5.0
_SILENT = "the head of the Ray cluster does not answer"
_LEFT = Cause(CauseKind.STOPPED, "the fleet has left its cluster")
_NOT_NEEDED = Cause(CauseKind.STOPPED, "its node is not needed")
_PER_BOX: Mapping[str, float] = {"CPU": 1, "memory": 1 << 30}
"""What to ask for where boxes are not counted: what most of them take."""


class RayNodes:
    """Adds every node of a cluster that has room for boxes to a pool, and removes it when it is lost.

    Used as ``async with``, around the pool if that is to find again what stayed there: entering returns once an actor
    runs on each node that there is, or could not be started. Leaving stops the boxes, except those that stay, and ends
    the actors.

    While the cluster's head does not answer, nodes stay for as long as they do. When the connection ends, as Ray has it
    when the head was away for a minute or another one is in its place, all nodes are lost, and we connect anew.

    Args:
        add: Told of each new node, as `envkit.sandbox.pool.Pool.add_node`.
        remove: Told of each node that is gone, and why, as `Pool.remove_node`.
        address: Of the cluster, see `envkit.sandbox.ray.cluster.Cluster`.
        kind: The backend that the nodes use.
        orphan_ttl_s: Seconds after which a box ends that nobody is connected to, where its spec does not say.

    Raises:
        UsageError: On entering: Ray is not installed, or there is no cluster; says what to do.
        SandboxError: On entering: the cluster does not answer.
    """

    def __init__(
        self,
        add: Callable[[Node], None],
        remove: Callable[[str, Cause], None],
        *,
        address: str = "auto",
        kind: NodeKind = "local",
        orphan_ttl_s: float = 30.0,
    ) -> None:
        self._add = add
        self._remove = remove
        self._address = address
        self._kind: NodeKind = kind
        self._lonely_s = orphan_ttl_s
        self._cluster: Cluster | None = None
        self._is_entered = False
        self._has_asked = False
        self._alive: dict[str, ClusterNode] = {}
        self._tended: dict[str, _Tended] = {}
        self._again_at: dict[str, float] = {}

    async def request(self, more: int) -> None:
        """Ask the cluster's autoscaler for room for `more` boxes beside what the nodes hold now, until we leave.

        A sandbox takes one ``envkit_sandboxes`` resource where a node has it, otherwise one CPU and 1 GiB of memory.
        With less than 0, so many fewer would do: nodes that have no box, and hold no more than that, are left, so that
        the autoscaler may take them away; asking for more comes back to those that are still there. Nothing is asked
        while the cluster's head does not answer.
        """
        if self._cluster is None or self._cluster.is_silent:
            return
        there = [node for node in self._alive.values() if self._again_at.get(node.id, 0.0) in (0.0, math.inf)]
        room = sum(map(_fitting, there))
        count = max(room + more, 0)
        are_counted = any(BOXES in node.resources for node in self._alive.values())
        if more > 0:
            self._again_at = {node_id: at for node_id, at in self._again_at.items() if at < math.inf}
        for tended in list(self._tended.values()):
            fitting = _fitting(tended.node)
            if 0 < fitting <= -more and tended.backend.is_empty:
                more += fitting
                self._again_at[tended.node.id] = math.inf
                self._remove(tended.node.name, _NOT_NEEDED)
                tended.scope.cancel()
        self._has_asked = True
        try:
            await self._cluster.request([{BOXES: 1.0} if are_counted else _PER_BOX] * count)
        except SandboxError as error:
            _log.warning("the Ray cluster's autoscaler was not told what is wanted: %s", error)

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            await self._tasks.start(self._stay)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._tasks.cancel_scope.cancel()
        # Only a cancellation is the task group's business: any other error is to leave the block as it is.
        if not isinstance(error, anyio.get_cancelled_exc_class()):
            kind = error = trace = None
        await self._tasks.__aexit__(kind, error, trace)

    async def _ask_for_nothing(self, cluster: Cluster) -> None:
        """Have the autoscaler forget what we asked for, which it would keep for ever."""
        if not self._has_asked or cluster.is_silent:
            return
        with anyio.move_on_after(_FORGET_S, shield=True):
            try:
                await cluster.request([])
            except SandboxError as error:
                _log.warning("the Ray cluster's autoscaler still keeps room for sandboxes: %s", error)

    async def _stay(self, *, task_status: TaskStatus[None]) -> None:
        """Be connected, and try again when that has ended."""
        wait_s = 0.0
        while True:
            try:
                async with Cluster(self._address) as self._cluster:
                    if self._is_entered:
                        _log.warning("connected to the Ray cluster at %r again", self._address)
                    wait_s = 0.0
                    try:
                        why = await self._follow(self._cluster, task_status)
                    finally:
                        await self._ask_for_nothing(self._cluster)
                if not self._is_entered:
                    raise SandboxError(why)
            except EnvkitError as error:
                if not self._is_entered:
                    raise
                why = str(error)
            finally:
                self._cluster = None
            wait_s = min(2 * wait_s + _RECONNECT_S, _RECONNECT_MOST_S)
            _log.warning("trying again in %g s: %s", wait_s, why)
            await anyio.sleep(wait_s)

    async def _follow(self, cluster: Cluster, status: TaskStatus[None]) -> str:
        """Have boxes on the nodes that there are, until the connection ends; return why it did."""
        self._alive, self._again_at = {}, {}
        async with anyio.create_task_group() as self._tending:
            try:
                why = await self._watch(cluster, status)
            except SandboxError as error:
                why = str(error)
            for tended in self._tended.values():
                self._lose(tended, Cause(CauseKind.NODE_LOST, f"node {tended.node.name} is lost: {why}"))
        return why

    async def _watch(self, cluster: Cluster, status: TaskStatus[None]) -> str:
        """See which nodes there are, again and again; return when the head is silent and no node is left.

        Raises:
            SandboxError: The connection has ended.
        """
        was_silent = False
        while True:
            found = await cluster.alive()
            if found is not None:
                self._see(found)
            if cluster.is_silent and not was_silent:
                _log.warning("%s; nodes stay while they answer", _SILENT)
            if was_silent and not cluster.is_silent:
                _log.warning("the head of the Ray cluster answers again")
            was_silent = cluster.is_silent
            if cluster.is_silent and not self._tended:
                return _SILENT
            if not self._is_entered:
                for tended in list(self._tended.values()):
                    await tended.settled.wait()
                self._is_entered = True
                status.started()
            await anyio.sleep(_LOOK_EVERY_S)

    def _see(self, found: Sequence[ClusterNode]) -> None:
        """Begin with new nodes, and lose those that Ray knows to be gone."""
        self._alive = {node.id: node for node in found}
        self._again_at = {node_id: at for node_id, at in self._again_at.items() if node_id in self._alive}
        for node_id, tended in self._tended.items():
            if node_id not in self._alive:
                self._lose(tended, Cause(CauseKind.NODE_LOST, f"node {tended.node.name} has left the Ray cluster"))
        for node in self._alive.values():
            is_due = clock.now() >= self._again_at.get(node.id, 0.0)
            if node.id not in self._tended and is_due and _has_room(_holds(node)) and self._cluster is not None:
                self._tended[node.id] = tended = _Tended(self._cluster, node, self._kind, self._lonely_s)
                self._tending.start_soon(self._tend, tended)

    def _lose(self, tended: _Tended, cause: Cause) -> None:
        self._remove(tended.node.name, cause)  # first, so that nothing lost is replaced there
        tended.backend.lose(cause)

    async def _tend(self, tended: _Tended) -> None:
        """Have boxes on a node until it is lost, or we leave."""
        node, backend = tended.node, tended.backend
        cause = _LEFT
        try:
            with tended.scope:
                async with backend:
                    self._again_at.pop(node.id, None)
                    self._add(Node(node.name, backend, _holds(node)))
                    tended.settled.set()
                    try:
                        cause = await backend.wait()
                        self._again_at[node.id] = clock.now() + _AGAIN_S
                    finally:
                        self._remove(node.name, cause)
        except EnvkitError as error:
            self._again_at[node.id] = clock.now() + _AGAIN_S
            _log.warning("%s", error)
        finally:
            tended.settled.set()
            del self._tended[node.id]


class _Tended:
    """A node with an actor of ours.

    Attributes:
        scope: Ends it when cancelled.
        settled: Set once the actor runs, or could not be started.
    """

    def __init__(self, cluster: Cluster, node: ClusterNode, kind: NodeKind, orphan_ttl_s: float) -> None:
        self.node = node
        self.backend = RayNodeBackend(cluster, node, kind=kind, orphan_ttl_s=orphan_ttl_s)
        self.scope = anyio.CancelScope()
        self.settled = anyio.Event()


def _fitting(node: ClusterNode) -> int:
    """Return how many boxes a node holds if nothing else is there, as the autoscaler is to count."""
    if BOXES in node.resources:
        return int(node.resources[BOXES])
    return int(min(node.resources.get(name, 0.0) // amount for name, amount in _PER_BOX.items()))


def _has_room(holds: Capacity) -> bool:
    return bool(holds.boxes if holds.boxes is not None else holds.cpus)


def _holds(node: ClusterNode) -> Capacity:
    found = node.resources
    if BOXES in found:
        return Capacity(boxes=int(found[BOXES]))
    return Capacity(cpus=found.get("CPU", 0.0), memory_mib=int(found.get("memory", 0.0)) >> 20)
