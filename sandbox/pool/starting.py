"""Start a sandbox on its node or, if that fails, on another node; then wait until the sandbox has booted."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable, Collection, Mapping
from dataclasses import replace
from functools import partial

import anyio

from envkit import clock
from envkit.errors import EnvkitError, SandboxEndedError, SandboxLostError, SandboxRefusedError, SandboxStartError
from envkit.protocols import Sandbox
from envkit.types import Cause, CauseKind, SandboxSpec

from .instance import Instance
from .node import Node

_log = logging.getLogger(__name__)

_ORPHAN_TTL_S = 600.0
"""Seconds for which the sandboxes of a killed server continue to run if no later server re-attaches to them."""
_SLACK_S = 60.0
"""Seconds added to the start timeout, e.g. because a backend may limit concurrent starts and queue the others."""
_LEAST_S = 10.0
"""If a start exceeds the start timeout of its spec, the node is at fault, because a start takes under 1 s unless the
node is very busy. But a start timeout below this many seconds counts as too short, and then the spec is at fault."""
_ROUNDING_S = 1e-6
_UNTRIED = "other nodes were not tried, because they have no room now"


async def start(
    instance: Instance,
    boot: Callable[[Sandbox], Awaitable[None]] | None,
    *,
    ledger: str | None,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> None:
    """Start a sandbox, and record in `instance` whether it started or failed.

    Args:
        instance: The pool's record of the sandbox.
        boot: Called with the started sandbox; see `envkit.sandbox.pool.warm_stock.WarmSpec`.
        ledger: Id of the ledger that records the sandbox, so that it can outlive this process; None means no ledger.
        nodes: All nodes by name; the pool may change the mapping during the start.
        move: Called with `instance` and other nodes after a failed start. Moves the sandbox to one of them and returns
            True, or returns False if none has room.
    """
    spec = instance.spec
    # A sandbox with a network allowlist cannot outlive this process, because its network proxy runs here.
    if ledger is not None and isinstance(spec.network, str):
        orphan_ttl_s = _ORPHAN_TTL_S if spec.orphan_ttl_s is None else spec.orphan_ttl_s
        spec = replace(spec, detached=True, orphan_ttl_s=orphan_ttl_s, ledger=ledger)
    try:
        instance.sandbox = await _started_somewhere(instance, spec, nodes, move)
        if boot is not None:
            with anyio.move_on_after(spec.start_timeout_s) as limit:
                await boot(instance.sandbox)
            if limit.cancelled_caught:
                return instance.fail(_failed(f"not booted within {spec.start_timeout_s:g} s"))
    except (SandboxStartError, SandboxLostError) as error:
        return instance.fail(error.cause, error)
    except (EnvkitError, OSError) as error:
        return instance.fail(_failed(str(error)))
    except Exception as error:  # an unexpected error must end only this sandbox, not the pool
        _log.exception("unhandled exception in the start of sandbox %s", instance.id)
        return instance.fail(_failed(f"{type(error).__name__}: {error}"))
    return instance.up()


async def _started_somewhere(
    instance: Instance,
    spec: SandboxSpec,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> Sandbox:
    """Start a sandbox on its node or on another node.

    If a start fails, one other node is tried. If a node does not support the spec, all other nodes are tried. If the
    spec itself is at fault, e.g. its command exits at once, no other node is tried, because every start would fail.
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
            left = [] if instance.snapshot else [node for node in nodes.values() if node not in tried]
            left = [node for node in left if node.could_hold(instance.demand)]
            if may_move and move(instance, left):
                before = tried[-1].name
                _log.warning(
                    "sandbox %s did not start on %s: %s; trying %s", instance.id, before, error, instance.node.name
                )
            elif failure is not None:
                # Raise the last error that is not a refusal of the spec: the node that raised it supports the spec, so
                # a later start on this node may succeed.
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
        return cause.by_agent or not getattr(node.backend, "distinguishes_memory_limit", False)
    return spec.start_timeout_s < _LEAST_S and took_s >= spec.start_timeout_s - _ROUNDING_S
