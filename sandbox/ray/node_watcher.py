"""Monitors the nodes of a Ray cluster: adds new nodes to a sandbox pool, and removes lost nodes from the pool."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
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

SANDBOXES = "envkit_sandboxes"
"""Custom Ray resource of a node: how many sandboxes it may run. Without it, the node's CPUs and memory limit them."""

_log = logging.getLogger(__name__)

_LOOK_EVERY_S = 1.0
_AGAIN_S = 15.0
"""Seconds until a node that was lost, or whose actor did not start, is tried again. Ray notices a loss in this time."""
_RECONNECT_S = 1.0
_RECONNECT_MOST_S = 30.0
_SILENT = "the head of the Ray cluster does not answer"
_LEFT = Cause(CauseKind.STOPPED, "the fleet has left its cluster")


class RayNodes:
    """Adds all nodes of a Ray cluster that can run sandboxes to a pool, and removes them when they are lost.

    Use it with ``async with``. The block begins when the actor of each node has started or failed. If the pool must
    re-attach to detached sandboxes, enter this block before that of the pool. The end of the block ends the actors, and
    stops all sandboxes except detached ones.

    While the cluster's head does not answer, nodes that answer remain in use. Ray ends the connection after a minute
    without a head, or when another head replaces it. All nodes are then lost, and `RayNodes` connects again.

    Args:
        add: Called with each new node; usually `envkit.sandbox.pool.Pool.add_node`.
        remove: Called with the name of each lost node and the cause of the loss; usually `Pool.remove_node`.
        address: Address of the cluster; see `envkit.sandbox.ray.cluster.Cluster`.
        kind: Kind of backend that starts the sandboxes on the nodes.
        orphan_ttl_s: Seconds without a client after which a sandbox ends, unless its spec sets another value.

    Raises:
        UsageError: On entering the block: Ray is not installed, or there is no cluster at `address`.
        SandboxError: On entering the block: the cluster does not answer.
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
        self._orphan_ttl_s = orphan_ttl_s
        self._is_entered = False
        self._hosted: dict[str, _HostedNode] = {}
        self._again_at: dict[str, float] = {}

    async def __aenter__(self) -> Self:
        self._tasks = await anyio.create_task_group().__aenter__()
        try:
            await self._tasks.start(self._keep_connected)
        except BaseException as error:
            await self.__aexit__(type(error), error, error.__traceback__)
            raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        await clock.end_tasks(self._tasks, error)

    async def _keep_connected(self, *, task_status: TaskStatus[None]) -> None:
        """Connect to the Ray cluster, and reconnect whenever the connection ends."""
        wait_s = 0.0
        while True:
            try:
                async with Cluster(self._address) as cluster:
                    if self._is_entered:
                        _log.warning("reconnected to the Ray cluster at %r", self._address)
                    wait_s = 0.0
                    why = await self._follow(cluster, task_status)
                if not self._is_entered:
                    raise SandboxError(why)
            except EnvkitError as error:
                if not self._is_entered:
                    raise
                why = str(error)
            wait_s = min(2 * wait_s + _RECONNECT_S, _RECONNECT_MOST_S)
            _log.warning("no connection to the Ray cluster; trying again in %g s: %s", wait_s, why)
            await anyio.sleep(wait_s)

    async def _follow(self, cluster: Cluster, status: TaskStatus[None]) -> str:
        """Keep the cluster's nodes in the pool until the connection to the cluster ends; return why it ended."""
        self._again_at = {}
        async with anyio.create_task_group() as self._node_tasks:
            try:
                why = await self._watch(cluster, status)
            except SandboxError as error:
                why = str(error)
            for hosted in self._hosted.values():
                self._lose(hosted, Cause(CauseKind.NODE_LOST, f"node {hosted.node.name} is lost: {why}"))
        return why

    async def _watch(self, cluster: Cluster, status: TaskStatus[None]) -> str:
        """Poll the list of nodes until the head does not answer and no node is in use; return this reason as text.

        Raises:
            SandboxError: The connection to the cluster has ended.
        """
        was_silent = False
        while True:
            found = await cluster.alive()
            if found is not None:
                self._update(cluster, found)
            if cluster.is_silent and not was_silent:
                _log.warning("%s; nodes are kept while they answer", _SILENT)
            if was_silent and not cluster.is_silent:
                _log.warning("the head of the Ray cluster answers again")
            was_silent = cluster.is_silent
            if cluster.is_silent and not self._hosted:
                return _SILENT
            if not self._is_entered:
                for hosted in list(self._hosted.values()):
                    await hosted.settled.wait()
                self._is_entered = True
                status.started()
            await anyio.sleep(_LOOK_EVERY_S)

    def _update(self, cluster: Cluster, found: Sequence[ClusterNode]) -> None:
        """Start actors on the new nodes in `found`, and treat nodes that are not in `found` any more as lost."""
        alive = {node.id: node for node in found}
        self._again_at = {node_id: at for node_id, at in self._again_at.items() if node_id in alive}
        for node_id, hosted in self._hosted.items():
            if node_id not in alive:
                self._lose(hosted, Cause(CauseKind.NODE_LOST, f"node {hosted.node.name} has left the Ray cluster"))
        for node in alive.values():
            is_due = clock.now() >= self._again_at.get(node.id, 0.0)
            if node.id not in self._hosted and is_due and _has_room(_capacity(node)):
                self._hosted[node.id] = hosted = _HostedNode(cluster, node, self._kind, self._orphan_ttl_s)
                self._node_tasks.start_soon(self._use, hosted)

    def _lose(self, hosted: _HostedNode, cause: Cause) -> None:
        # Remove the node from the pool first. Otherwise the pool would replace its sandboxes with new ones on it.
        self._remove(hosted.node.name, cause)
        hosted.backend.lose(cause)

    async def _use(self, hosted: _HostedNode) -> None:
        """Run the actor of a node, and keep the node in the pool until it is lost."""
        node, backend = hosted.node, hosted.backend
        cause = _LEFT
        try:
            async with backend:
                self._again_at.pop(node.id, None)
                self._add(Node(node.name, backend, _capacity(node)))
                hosted.settled.set()
                try:
                    cause = await backend.wait()
                    self._again_at[node.id] = clock.now() + _AGAIN_S
                finally:
                    self._remove(node.name, cause)
        except EnvkitError as error:
            self._again_at[node.id] = clock.now() + _AGAIN_S
            _log.warning("%s", error)
        finally:
            hosted.settled.set()
            del self._hosted[node.id]


class _HostedNode:
    """A node of the cluster on which an actor of envkit runs or is being started.

    Attributes:
        settled: Set when the actor has started or failed.
    """

    def __init__(self, cluster: Cluster, node: ClusterNode, kind: NodeKind, orphan_ttl_s: float) -> None:
        self.node = node
        self.backend = RayNodeBackend(cluster, node, kind=kind, orphan_ttl_s=orphan_ttl_s)
        self.settled = anyio.Event()


def _has_room(capacity: Capacity) -> bool:
    return bool(capacity.sandboxes if capacity.sandboxes is not None else capacity.cpus)


def _capacity(node: ClusterNode) -> Capacity:
    found = node.resources
    if SANDBOXES in found:
        return Capacity(sandboxes=int(found[SANDBOXES]))
    return Capacity(cpus=found.get("CPU", 0.0), memory_mib=int(found.get("memory", 0.0)) >> 20)
