"""Chooses the backend for sandboxes on this machine, by the same rules for scripts, training and servers."""

from __future__ import annotations

import os
from typing import Literal, NamedTuple, TypeAlias

from envkit import clock
from envkit.errors import UsageError
from envkit.sandbox.bubblewrap import backend as bubblewrap
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker import backend as docker
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.process.backend import ProcessBackend

BackendKind: TypeAlias = Literal["auto", "local", "docker", "process"]
Backend: TypeAlias = LocalBackend | DockerBackend | ProcessBackend

KINDS = ("auto", "local", "docker", "process")


class ChosenBackend(NamedTuple):
    """A backend that works on this machine.

    Attributes:
        backend: The backend, not yet opened.
        name: Name of the backend, for messages.
        reason: Why no backend with higher priority was chosen, to append to a message: ``", because bubblewrap is not
            installed"``. Empty for the first choice.
    """

    backend: Backend
    name: str
    reason: str = ""


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


def _because(reasons: dict[str, str]) -> str:
    return f", because {'; '.join(reasons.values())}" if reasons else ""
