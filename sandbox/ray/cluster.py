"""Ray, as far as we use it: a connection to a cluster, its nodes, and one actor of ours on each.

Ray is imported here and nowhere else, once it is needed. What blocks says so, and is to be called in a thread.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
import signal
import socket
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from envkit.errors import SandboxError, UsageError, from_problem
from envkit.sandbox.ray.actor import Answer, NodeActor, NodeKind

_CALLS_AT_ONCE = 10_000
_REACH_S = 5.0
_SECOND_CHANCE_S = 0.5
"""A loop that was held up may see a deadline before it sees the answer that has long arrived."""
_LINE_CHARACTERS = 300
_KEEP_CHILDREN = {"RAY_kill_child_processes_on_worker_exit": "0"}
"""Else boxes that are to stay would end with the actor that started them."""


class UnreachedError(SandboxError):
    """An actor is gone, or cannot be reached."""


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node as Ray knows it.

    Attributes:
        id: Ray's id of it.
        name: Its name for people and in pools: Ray's name of it, which is its address unless it was given one, and the
            beginning of its id.
        address: Where its machine is reached.
        resources: What it has in all, by Ray's names: ``CPU``, ``memory`` in bytes, and its own.
    """

    id: str
    name: str
    address: str
    resources: Mapping[str, float]


def connect(address: str) -> bool:
    """Connect this process to a cluster, blocking, unless it is connected; say whether it was not.

    To be called in a thread other than the main one: Ray would take SIGTERM for itself there.

    Args:
        address: Of its head, such as ``"10.0.0.1:6379"``; ``"auto"`` finds it by ``$RAY_ADDRESS`` or on this machine.

    Raises:
        UsageError: Ray is not installed, or there is no cluster; says what to do.
    """
    ray = _ray()
    if address.startswith("ray://"):
        raise UsageError(f"{address}: Ray's client is not enough; run this on a machine of the cluster, with 'auto'")
    if ray.is_initialized():
        return False
    place = os.environ.get("RAY_ADDRESS", address) if address == "auto" else address
    try:
        if place != "auto":  # Ray itself would take minutes to find that nobody is there
            host, _, port = place.rpartition(":")
            socket.create_connection((host.strip("[]"), int(port)), timeout=_REACH_S).close()
        ray.init(address=address, ignore_reinit_error=True, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, RuntimeError, ValueError) as error:
        raise UsageError(f"there is no Ray cluster at {place!r} (ray start --head): {_line(error)}") from None
    return True


def take_back_signals() -> None:
    """Have SIGTERM do again what this program wants; Ray has its own handler put in, below Python's eyes.

    To be called in the main thread, once connected; elsewhere it does nothing.
    """
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGTERM, signal.getsignal(signal.SIGTERM))


def disconnect() -> None:
    """End the connection of this process, blocking."""
    _ray().shutdown()


def alive() -> list[ClusterNode]:
    """Ask, blocking, for the nodes that Ray believes to be alive; it notices a loss only after many seconds.

    Raises:
        SandboxError: The cluster's head does not answer.
    """
    ray = _ray()
    try:
        found: list[dict[str, Any]] = ray.nodes()
    except (ray.exceptions.RayError, OSError, RuntimeError) as error:
        raise SandboxError(f"the head of the Ray cluster does not answer: {_line(error)}") from None
    return [
        ClusterNode(
            id=str(node["NodeID"]),
            name=f"{node['NodeName']}-{node['NodeID'][:8]}".replace("/", "-"),
            address=str(node["NodeManagerAddress"]),
            resources=dict(node["Resources"]),
        )
        for node in found
        if node["Alive"]
    ]


def request(bundles: Sequence[Mapping[str, float]]) -> None:
    """Tell the cluster's autoscaler, blocking, for how much there is to be room in all; nothing cancels that."""
    importlib.import_module("ray.autoscaler.sdk").request_resources(bundles=[dict(bundle) for bundle in bundles])


class Actor:
    """An `envkit.sandbox.ray.actor.NodeActor` on a node. Made blocking; whether that succeeds is seen by `ask`."""

    def __init__(self, node: ClusterNode, kind: NodeKind) -> None:
        scheduling = importlib.import_module("ray.util.scheduling_strategies")
        self._ray = _ray()
        self._name = node.name
        self._handle = (
            self._ray.remote(NodeActor)
            .options(
                num_cpus=0,
                max_concurrency=_CALLS_AT_ONCE,
                max_restarts=0,
                runtime_env={"env_vars": _KEEP_CHILDREN},
                scheduling_strategy=scheduling.NodeAffinitySchedulingStrategy(node.id, soft=False),
            )
            .remote(kind, node.address)
        )
        self._handle.serve.remote()

    async def ask(self, method: str, *args: object) -> Answer:
        """Call a method. Cancelling it does not cancel the call there.

        Raises:
            UnreachedError: The actor is gone, or cannot be reached.
            EnvkitError: It refuses.
        """
        try:
            answer: Answer = await getattr(self._handle, method).remote(*args)
        except self._ray.exceptions.RayTaskError as error:  # a mistake of ours, there
            raise SandboxError(f"node {self._name}: {_line(error.cause)}") from error
        except self._ray.exceptions.RayError as error:
            raise UnreachedError(f"node {self._name}: {_line(error)}") from None
        if "problem" in answer:
            raise from_problem(answer["problem"])
        return answer

    async def is_reached(self, timeout_s: float) -> bool:
        """Say whether it gives a sign of life within `timeout_s` seconds."""
        reply = asyncio.wrap_future(self._handle.ping.remote().future())
        for wait_s in (timeout_s, _SECOND_CHANCE_S):
            if not reply.done():
                await asyncio.wait([reply], timeout=wait_s)
        if not reply.done():
            reply.cancel()
            return False
        return reply.exception() is None

    def end(self) -> None:
        """End it, blocking, wherever it is; safe to repeat."""
        self._ray.kill(self._handle)


def _ray() -> Any:
    try:
        return importlib.import_module("ray")
    except ImportError:
        raise UsageError("the package ray is not installed (pip install 'envkit[ray]')") from None


def _line(error: BaseException) -> str:
    """Return what an error says as one line that is not too long."""
    return " ".join(str(error).split())[:_LINE_CHARACTERS] or type(error).__name__
