"""Chooses the backend for sandboxes on this machine, by the same rules for scripts, training and servers."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from functools import cache
from typing import Literal, NamedTuple, TypeAlias, cast

from envkit import clock
from envkit.errors import UsageError
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import PLAIN_IMAGE, DockerBackend
from envkit.sandbox.machine import this_machine, with_defaults
from envkit.sandbox.pool import Pool
from envkit.sandbox.pool.health import LivenessTimes
from envkit.sandbox.pool.node import Capacity, Node
from envkit.sandbox.process.backend import ProcessBackend

_log = logging.getLogger(__name__)

BackendKind: TypeAlias = Literal["auto", "local", "docker", "process"]
Backend: TypeAlias = LocalBackend | DockerBackend | ProcessBackend

_MAY_LACK = ("memory", "pids", "cpu", "uid")
"""Limits for which bubblewrap needs root, or a control group of its own."""
KINDS = ("auto", "local", "docker", "process")


class ChosenBackend(NamedTuple):
    """A backend that works on this machine.

    Attributes:
        backend: The backend, not yet opened.
        name: Name of the backend, for messages.
        reason: Why no backend with higher priority was chosen, to append to a message: ``", because bubblewrap is not
            installed"``. Empty for the first choice.
        lacking: Limits that `choose_for_policy` accepts as missing; see `LocalBackend.capabilities`.
    """

    backend: Backend
    name: str
    reason: str = ""
    lacking: tuple[str, ...] = ()


async def choose(
    kind: BackendKind = "auto", *, image: str | None = None, may_be_process: bool = False
) -> ChosenBackend:
    """Choose a backend by its kind.

    Args:
        kind: ``"local"`` is bubblewrap, ``"docker"`` a Docker daemon, ``"process"`` a plain child process, which
            isolates nothing; ``"auto"`` is bubblewrap if it works here, otherwise Docker if it works here.
        image: Image without which ``"auto"`` does not choose Docker; None requires no image.
        may_be_process: Whether ``"auto"`` is a plain child process if neither bubblewrap nor Docker works here.

    Raises:
        UsageError: There is no such kind, or it does not work on this machine; the message names the remedy.
    """
    if kind not in KINDS:
        raise UsageError(f"backend: must be one of {', '.join(map(repr, KINDS))}, got {kind!r}")
    reasons: dict[str, str] = {}
    if kind in ("auto", "local"):
        why = await clock.to_thread(bubblewrap.why_unavailable)
        if why is None:
            return ChosenBackend(LocalBackend(), "bubblewrap")
        reasons["local"] = why
    if kind in ("auto", "docker"):
        why = await docker.why_unavailable(image if kind == "auto" else None)
        if why is None:
            return ChosenBackend(DockerBackend(), "docker", _because(reasons))
        reasons["docker"] = why
    if kind == "process" or (kind == "auto" and may_be_process):
        return ChosenBackend(ProcessBackend(), "plain child processes", _because(reasons))
    if "ENVKIT_SOCKETS" in os.environ:  # set in every sandbox
        raise UsageError(
            "a sandbox cannot start inside another sandbox, which has neither user namespaces for bubblewrap nor a "
            "Docker daemon; if an environment starts sandboxes, do not run it in one: set sandbox.kind: none in the "
            "training file, or serve with `envkit serve --backend none`"
        )
    whys = "; ".join(f"{name}: {why}" for name, why in reasons.items())
    remedy = "fix that, or choose another backend ('process' works everywhere, but isolates nothing)"
    raise UsageError(f"no sandbox: {whys}; {remedy}")


async def choose_for_policy(kind: BackendKind = "auto") -> ChosenBackend:
    """Choose the backend for programs of a policy that the user of this process plays on this machine.

    ``"auto"`` is bubblewrap if it enforces all limits, otherwise Docker if it works here, otherwise bubblewrap without
    the limits that it lacks, so that users without root and Docker can play. Servers refuse such programs there.

    Raises:
        UsageError: As in `choose`.
    """
    chosen = await choose(kind, image=PLAIN_IMAGE)
    capabilities = chosen.backend.capabilities() if isinstance(chosen.backend, LocalBackend) else {}
    lacking = tuple(name for name in _MAY_LACK if not capabilities.get(name, True))
    if not lacking:
        return chosen
    what = f"does not limit {', '.join(lacking)} here"
    if kind == "auto" and await docker.why_unavailable(PLAIN_IMAGE) is None:
        return ChosenBackend(DockerBackend(), "docker", f", because bubblewrap {what}")
    warning = (
        f", which {what}: programs of the policy can use up this machine, and change the reward where tests run beside "
        "them. Where that matters, use Docker or root; see envkit doctor"
    )
    return ChosenBackend(LocalBackend(may_lack=(*lacking, "inodes")), chosen.name, warning, lacking)


@asynccontextmanager
async def open_tool_pool(
    kind: str = "auto",
    *,
    times: LivenessTimes | None = None,
    announce: Callable[[str], None] | None = None,
    views: Sequence[tuple[str, str]] = (),
) -> AsyncIterator[Pool]:
    """Open a pool of sandboxes of this machine. `"auto"` isolates: it never chooses plain child processes.

    Args:
        kind: Kind of the backend; see `choose_for_policy`.
        times: When a sandbox that does not answer is suspected and lost.
        announce: Called with one line: the chosen backend, why it is a fallback, and which limits it lacks. With
            None, the log has one warning per process if it lacks limits.
        views: As in `Pool`.

    Raises:
        UsageError: This kind does not work on this machine; the message names the remedy.
    """
    chosen = await choose_for_policy(cast("BackendKind", kind))
    line = f"sandboxes of the environment: {chosen.name}{chosen.reason}"
    if announce is not None:
        announce(line)
    elif chosen.lacking:
        _warn_once(line)
    async with chosen.backend as backend:
        node = Node("here", backend, with_defaults(Capacity(), this_machine()))
        async with Pool([node], liveness_times=times or LivenessTimes(), views=views) as pool:
            yield pool


@cache
def _warn_once(line: str) -> None:
    """Log a warning, once per process: a vector opens a pool for each of its copies."""
    _log.warning(line)


def _because(reasons: dict[str, str]) -> str:
    return f", because {'; '.join(reasons.values())}" if reasons else ""
