"""The launcher for the nodes of a Ray cluster. Ray itself runs only in relays; see `ray_relay`."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence

import anyio

from envkit.errors import UsageError
from envkit.installation import why_missing
from envkit.types import Node, Place

from . import ray_relay
from .local import RelayLauncher

_CONNECT_S = 60.0


async def open_ray() -> RelayLauncher:
    """Return the launcher for the cluster at $RAY_ADDRESS or, if that is not set, the one on this machine.

    This machine must be one of its nodes.

    Raises:
        UsageError: Ray is not installed, or there is no such cluster, or it does not answer within 60 s.
    """
    if (why := why_missing("ray")) is not None:
        raise UsageError(f"placement.launcher: {why}")
    where = f"the Ray cluster at {os.environ.get('RAY_ADDRESS', 'auto')}"
    remedy = "start one (ray start --head), or name another one ($RAY_ADDRESS)"
    words, variables = _relay("nodes")
    try:
        with anyio.fail_after(_CONNECT_S):
            done = await anyio.run_process(words, env={**os.environ, **variables}, check=False, start_new_session=True)
    except TimeoutError:
        raise UsageError(f"{where} did not answer within {_CONNECT_S:g} s; {remedy}") from None
    if done.returncode:
        lines = done.stderr.decode(errors="replace").strip().splitlines()
        raise UsageError(f"cannot use {where}: {lines[-1] if lines else 'no message'}; {remedy}")
    found = json.loads(done.stdout.splitlines()[-1])
    others = [
        Node(name=f"n{number}", gpus=tuple(map(str, range(gpus))), **facts)
        for number, (gpus, facts) in enumerate(found, start=1)
    ]
    return RelayLauncher(others, relay)


def relay(
    argv: Sequence[str], env: Mapping[str, str], place: Place, node: Node
) -> tuple[Sequence[str], Mapping[str, str]]:
    """Return the relay of a program on `node`; see `local.Relay`."""
    words, variables = _relay("run")
    order = {"node": node.id, "argv": list(argv), "env": dict(env), "gpus": len(place.gpus or ())}
    return words, {**variables, ray_relay.ORDER: json.dumps(order)}  # not an argument: others could read the variables


def _relay(order: str) -> tuple[list[str], dict[str, str]]:
    paths = os.pathsep.join(path for path in sys.path if path)
    return [sys.executable, "-P", "-m", ray_relay.__name__, order], {"PYTHONPATH": paths}
