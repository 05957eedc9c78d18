"""How a sandbox of a pool is started: on its node, or else on another one, within its time, and then booted."""

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

_LONELY_S = 600.0
"""Seconds that boxes wait for the next server, where the last one was killed."""
_SLACK_S = 60.0
"""Seconds that a start may take longer than its own bound, as for its turn where only a few are started at once."""
_LEAST_S = 10.0
"""Seconds that a node must have for a start before it is to blame for taking longer; it takes less than one, unless it
is very busy."""
_ROUNDING_S = 1e-6
_UNTRIED = "other nodes, which may grant it, have no room now"


@runtime_checkable
class _TellsMemoryLimit(Protocol):
    """A backend that may tell a sandbox's own memory limit from the memory of its host."""

    @property
    def tells_memory_limit(self) -> bool:
        """Whether `Cause.by_agent` of a sandbox that ran out of memory does so."""
        ...


async def start(
    member: Instance,
    boot: Callable[[Sandbox], Awaitable[None]] | None,
    *,
    ledger: str | None,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> None:
    """Start a sandbox; it is up afterwards, or has failed.

    Args:
        member: Which one.
        boot: Returns once it may be used, see `envkit.sandbox.pool.warm_stock.Stock`.
        ledger: Id of the ledger in which it is written down, and which it outlives this process with; None for none.
        nodes: All nodes, as they are now and later.
        move: Told that it did not start where it is; says whether it is now on one of these others.
    """
    spec = member.spec
    if ledger is not None and isinstance(spec.network, str):  # a list of hosts is held by a proxy in this process
        orphan_ttl_s = _LONELY_S if spec.orphan_ttl_s is None else spec.orphan_ttl_s
        spec = replace(spec, detached=True, orphan_ttl_s=orphan_ttl_s, ledger=ledger)
    try:
        member.sandbox = await _started_somewhere(member, spec, nodes, move)
        if boot is not None:
            with anyio.move_on_after(spec.start_timeout_s) as limit:
                await boot(member.sandbox)
            if limit.cancelled_caught:
                return member.fail(_failed(f"it was not booted within {spec.start_timeout_s:g} s"))
    except SandboxStartError as error:
        return member.fail(error.cause, error)
    except (EnvkitError, OSError) as error:
        return member.fail(_failed(str(error)))
    except Exception as error:  # what nobody foresaw is the end of this one, and not of all the others
        _log.exception("sandbox %s could not be started in a way that nobody foresaw", member.id)
        return member.fail(_failed(f"{type(error).__name__}: {error}"))
    return member.up()


async def _started_somewhere(
    member: Instance,
    spec: SandboxSpec,
    nodes: Mapping[str, Node],
    move: Callable[[Instance, Collection[Node]], bool],
) -> Sandbox:
    """Start it where it is, or else on another node: once where a start failed, on all where it is refused.

    What ends by what was asked for would do so everywhere, and is not tried again.
    """
    tried: list[Node] = []
    failure: Exception | None = None
    while True:
        try:
            return await _started(member, spec)
        except SandboxEndedError:
            raise
        except Exception as error:
            tried.append(member.node)
            is_refused = isinstance(error, SandboxRefusedError)
            if isinstance(error, SandboxRefusedError) and error.everywhere:
                raise
            may_move = is_refused or failure is None
            failure = failure if is_refused else error
            left = [] if member.snapshot else [one for one in nodes.values() if one not in tried]
            left = [one for one in left if one.could_hold(member.demand)]
            if may_move and move(member, left):
                before = tried[-1].name
                _log.warning(
                    "sandbox %s did not start on %s: %s; now on %s", member.id, before, error, member.node.name
                )
            elif failure is not None:  # where it would have been granted it may be another time
                raise failure from None
            elif isinstance(error, SandboxRefusedError) and left:
                raise SandboxStartError(member.id, error.cause.followed_by(_UNTRIED)) from None
            else:
                raise


async def _started(member: Instance, spec: SandboxSpec) -> Sandbox:
    node, within_s = member.node, spec.start_timeout_s + _SLACK_S
    begin = node.backend.start if member.snapshot is None else partial(node.backend.restore, member.snapshot)
    began = clock.now()
    try:
        with anyio.move_on_after(within_s):
            sandbox = await begin(spec)
            node.started()
            return sandbox
        raise SandboxStartError(member.id, f"node {node.name} did not start it within {within_s:g} s")
    except (SandboxRefusedError, SandboxEndedError):
        node.spared()
        raise
    except Exception as error:
        if isinstance(error, SandboxStartError) and _had_too_little(node, spec, error.cause, clock.now() - began):
            node.spared()
            raise SandboxEndedError(error.sandbox_id, error.cause) from None
        node.failed(now=clock.now())
        raise


def _failed(text: str) -> Cause:
    return Cause(CauseKind.START_FAILED, text)


def _had_too_little(node: Node, spec: SandboxSpec, cause: Cause, took_s: float) -> bool:
    """Say whether a start failed because `spec` bounds it too narrowly: in memory, or in time, all of which it took."""
    if cause.kind is CauseKind.OUT_OF_MEMORY:
        backend = node.backend
        return cause.by_agent or not (isinstance(backend, _TellsMemoryLimit) and backend.tells_memory_limit)
    return spec.start_timeout_s < _LEAST_S and took_s >= spec.start_timeout_s - _ROUNDING_S
