"""The section ``placement`` of a training file, and the notation of GPUs in it."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import AfterValidator, Field

from envkit.config.grammar import Section

_NOTATION = re.compile(r"([^\s:]+)(?::(\d{1,4}(?:-\d{1,4})?(?:,\d{1,4}(?:-\d{1,4})?)*))?")


def read_gpus(text: str) -> tuple[str, tuple[int, ...]]:
    """Return the node and the GPUs that a text such as ``n1:0-3,6`` names; a text without a colon names no GPUs.

    Raises:
        ValueError: The text is not like that, or a range has no GPUs.
    """
    found = _NOTATION.fullmatch(text)
    if found is None:
        raise ValueError("must be a node and its GPUs, such as n0:0-3,6, or only a node, such as n0")
    gpus: list[int] = []
    for part in found[2].split(",") if found[2] else ():
        first, _, last = part.partition("-")
        gpus += range(int(first), int(last or first) + 1)
        if int(last or first) < int(first):
            raise ValueError(f"the range {part} ends before it begins")
    return found[1], tuple(gpus)


def _checked(text: str) -> str:
    read_gpus(text)
    return text


Gpus = Annotated[str, AfterValidator(_checked)]
"""A node, and GPUs of it; see `read_gpus`."""


class PlacementSection(Section):
    """The machines and GPUs of the parts of a run. Without it, envkit chooses and prints its choice: the first GPU of
    this machine for the trainer, the others for the engine. n0 is the node of the run, n1 and so on are the others; a
    node may also be named by its host. n0:0-3,6 are GPUs of n0 by index.
    """

    launcher: Literal["local", "ray", "slurm"] = "local"
    """What starts processes. local: on this machine. ray: on the nodes of the Ray cluster at RAY_ADDRESS, or that of
    this machine. slurm: on the nodes of the allocation in which the run is."""
    trainer: Gpus | None = None
    """GPU of the trainer, such as n0:0. It runs in the process of the run, so the node is n0. null: the first GPU of n0
    that no server has."""
    engines: list[Gpus] = Field(default_factory=list)
    """GPUs of the servers that the run starts, such as ["n0:4-7", "n1:0-7"]; engine.replicas divides them. A node
    without GPUs gets one server for each time that it is named. []: all GPUs but the trainer's."""
    judge: Gpus | None = None
    """Node and GPUs of the server of a judge that the run serves (env.judge), such as n1:0. No other part has them.
    null: n0, if vLLM is built for CPUs or no node has GPUs; otherwise the run is refused, so name a GPU."""
    nodes: Literal["all"] | list[str] = Field(default_factory=list)
    """Machines on which the run starts nodes for sandboxes: names, or all."""
