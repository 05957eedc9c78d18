"""Start of a sandbox: on its node or, after a failure, on another one, within its timeout; then its boot."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, runtime_checkable

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, SandboxSpec

from .instance import Instance
from .node import Node

_log = logging.getLogger(__name__)

_ORPHAN_TTL_S = 600.0
"""Seconds that sandboxes of a killed server wait for the next one."""
_SLACK_S = 60.0
"""Seconds added to the start timeout, for example for the queue of a backend that starts only a few at once."""
_LEAST_S = 10.0
"""Start timeout in seconds below which a timeout is the request's fault and not the node's. A start takes under 1 s
unless the node is very busy."""
_ROUNDING_S = 1e-6
_UNTRIED = "other nodes that may grant it have no room now"


@runtime_checkable
class _KnowsMemoryLimit(Protocol):
    """A backend that may distinguish a sandbox's own memory limit from the memory of the host."""

    @property
    def distinguishes_memory_limit(self) -> bool:
        """Whether `Cause.by_agent` makes that distinction for a sandbox that ran out of memory."""
        ...


async def start(
    instance: Instance,
    boot: Callable[[Sandbox], Awaitable[None]] | None,
    *,
    ledger: str | None,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> None:
    """Start a sandbox; afterwards it is up or has failed.

    Args:
        instance: The sandbox.
        boot: Returns once it may be used, see `envkit.sandbox.pool.warm_stock.WarmSpec`.
        ledger: Id of the ledger that lets it outlive this process; None for no ledger.
        nodes: All nodes; the mapping is live.
        move: Called after a failed start; moves the sandbox to one of the given nodes and returns whether it did.
    """
    spec = instance.spec
    if ledger is not None and isinstance(spec.network, str):  # the proxy of a host allowlist ends with this process
        orphan_ttl_s = _ORPHAN_TTL_S if spec.orphan_ttl_s is None else spec.orphan_ttl_s
        spec = replace(spec, detached=True, orphan_ttl_s=orphan_ttl_s, ledger=ledger)
    try:
        instance.sandbox = await _started_somewhere(instance, spec, nodes, move)
        if boot is not None:
            with anyio.move_on_after(spec.start_timeout_s) as limit:
                await boot(instance.sandbox)
            if limit.cancelled_caught:
                return instance.fail(_failed(f"not booted within {spec.start_timeout_s:g} s"))
    except SandboxStartError as error:
        return instance.fail(error.cause, error)
    except (EnvkitError, OSError) as error:
        return instance.fail(_failed(str(error)))
    except Exception as error:  # it must not end the pool
        _log.exception("unhandled exception in the start of sandbox %s", instance.id)
        return instance.fail(_failed(f"{type(error).__name__}: {error}"))
    return instance.up()


async def _started_somewhere(
    instance: Instance,
    spec: SandboxSpec,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> Sandbox:
    """Start it on its node or on another one: one retry after a failed start, all nodes after a refusal.

    A start that its own spec makes fail would fail everywhere, and is not retried.
    """
    tried: list[Node] = []
    failure: Exception | None = None
    while True:
        try:
            return await _started(instance, spec)
        except SandboxEndedError:
            raise
        except Exception as error:
            tried.append(instance.node)
            is_refused = isinstance(error, SandboxRefusedError)
            if isinstance(error, SandboxRefusedError) and error.everywhere:
                raise
            may_move = is_refused or failure is None
            failure = failure if is_refused else error
            left = [] if instance.snapshot else [one for one in nodes.values() if one not in tried]
            left = [one for one in left if one.could_hold(instance.demand)]
            if may_move and move(instance, left):
                before = tried[-1].name
                _log.warning(
                    "sandbox %s did not start on %s: %s; now on %s", instance.id, before, error, instance.node.name
                )
            elif failure is not None:  # a node that does not refuse it may start it later
                raise failure from None
            elif isinstance(error, SandboxRefusedError) and left:
                raise SandboxStartError(instance.id, error.cause.followed_by(_UNTRIED)) from None
            else:
                raise


async def _started(instance: Instance, spec: SandboxSpec) -> Sandbox:
    node, within_s = instance.node, spec.start_timeout_s + _SLACK_S
    begin = node.backend.start if instance.snapshot is None else partial(node.backend.restore, instance.snapshot)
    began = clock.now()
    try:
        with anyio.move_on_after(within_s):
            sandbox = await begin(spec)
            node.started()
            return sandbox
        raise SandboxStartError(instance.id, f"node {node.name} did not start the sandbox within {within_s:g} s")
    except (SandboxRefusedError, SandboxEndedError):
        node.not_at_fault()
        raise
    except Exception as error:
        if isinstance(error, SandboxStartError) and _had_too_little(node, spec, error.cause, clock.now() - began):
            node.not_at_fault()
            raise SandboxEndedError(error.sandbox_id, error.cause) from None
        node.failed(now=clock.now())
        raise


def _failed(text: str) -> Cause:
    return Cause(CauseKind.START_FAILED, text)


def _had_too_little(node: Node, spec: SandboxSpec, cause: Cause, took_s: float) -> bool:
    """Return whether a start failed because the memory limit or the start timeout of `spec` is too small."""
    if cause.kind is CauseKind.OUT_OF_MEMORY:
        backend = node.backend
        return cause.by_agent or not (isinstance(backend, _KnowsMemoryLimit) and backend.distinguishes_memory_limit)
    return spec.start_timeout_s < _LEAST_S and took_s >= spec.start_timeout_s - _ROUNDING_S
