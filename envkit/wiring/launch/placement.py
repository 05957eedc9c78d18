"""The device map of a run: which GPU the trainer has, and which places its servers have. Pure functions of the nodes.

No GPU has run a map yet. What was never run and could fail late is refused: overlapping maps, a trainer on several GPUs
or on another machine.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

from envkit.config import RunConfig
from envkit.config.parts import BuiltInSandboxSection, VllmEngineSection
from envkit.config.training import PlacementSection, read_gpus
from envkit.errors import ConfigError
from envkit.trainer_bridge.engines.vllm.launch import find_python, is_built_for_cpus
from envkit.types import Node, Place
from envkit.wiring.training.resolve import lag_of

_MAX_SHARED = 0.7
"""Highest engine.gpu_memory_utilization of a server on the trainer's GPU."""

Gpu = tuple[str, int]
"""Name of a node, and index of a GPU of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Needs:
    """What the parts of a run need.

    Attributes:
        replicas: Number of the servers that the run starts; None: one for each GPU.
        trainer_uses_gpu: Whether the trainer uses a GPU if this node has one.
        ahead: Batches of episodes ahead of the trainer; if there are some, trainer and servers work at the same time.
        utilization: Share of a GPU's memory that a server may use; None if it was not chosen.
    """

    servers: bool = True
    replicas: int | None = None
    servers_use_gpus: bool = True
    trainer_uses_gpu: bool = True
    ahead: int = 0
    utilization: float | None = None
    serves_judge: bool = False


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Where the parts of a run are.

    Attributes:
        engines: Place of each server.
        nodes: Names of the nodes that get nodes for sandboxes.
        is_chosen: Whether envkit chose a part of it.
    """

    trainer: Place
    engines: tuple[Place, ...]
    judge: Place | None = None
    nodes: tuple[str, ...] = ()
    is_chosen: bool = False

    def __str__(self) -> str:
        engines = f", servers {' '.join(map(str, self.engines))}" if self.engines else ""
        judge = "" if self.judge is None else f", judge {self.judge}"
        return f"trainer {self.trainer}{engines}{judge}{' (chosen; see placement)' if self.is_chosen else ''}"


def place_run(run: RunConfig, nodes: Sequence[Node], *, trains: bool = True) -> DeviceMap:
    """Return the map of a run on the nodes of a launcher. `trains` is false if it only samples.

    Raises:
        ConfigError: The map is impossible, or was never run and is refused.
        UsageError: The interpreter of engine.python does not work.
    """
    engine = run.engine
    needs = Needs(
        servers=isinstance(engine, VllmEngineSection) and not engine.urls,
        replicas=getattr(engine, "replicas", None),
        trainer_uses_gpu=trains and getattr(run.trainer, "device", "cpu") != "cpu",
        ahead=lag_of(run.rollout)[0],
        serves_judge=trains and run.served_judge is not None,
    )
    if needs.servers or needs.serves_judge:
        python = getattr(engine, "python", None)
        uses_gpus = any(node.gpus for node in nodes) and not is_built_for_cpus(find_python(python))
        needs = replace(needs, servers_use_gpus=uses_gpus)
    if isinstance(engine, VllmEngineSection) and "gpu_memory_utilization" in engine.model_fields_set:
        needs = replace(needs, utilization=engine.gpu_memory_utilization)
    placed = device_map(run.placement, nodes, needs)
    if placed.nodes and run.envs[0].url is not None:
        raise ConfigError(["placement.nodes: the server at env.url has the sandboxes; leave it out"])
    if placed.nodes and (run.sandbox.kind == "none" or not isinstance(run.sandbox, BuiltInSandboxSection)):
        raise ConfigError([f"placement.nodes: sandbox.kind {run.sandbox.kind} has no nodes; leave it out"])
    return placed


def device_map(section: PlacementSection, nodes: Sequence[Node], needs: Needs) -> DeviceMap:
    """Return the map that the section describes, completed with what envkit chooses; the first node is this one.

    Raises:
        ConfigError: The map is impossible, or was never run and is refused.
    """
    here = nodes[0]
    if section.engines and not needs.servers:
        raise ConfigError(["placement.engines: the run starts no servers; leave it out, or use engine.kind: vllm"])
    named = [_read("placement.engines", text, nodes) for text in section.engines]
    taken = [(node.name, gpu) for node, gpus in named for gpu in gpus]
    if twice := [gpu for gpu, count in Counter(taken).items() if count > 1]:
        raise ConfigError([f"placement.engines: {_shown(twice[0])} occurs twice; a GPU has one server"])
    if taken and not all(gpus for _, gpus in named):
        raise ConfigError(["placement.engines: name GPUs of all nodes, or of none"])
    judge = _judge(section, nodes, needs)
    of_judge = [] if judge is None else [(judge.node, gpu) for gpu in judge.gpus or ()]
    trainer = _trainer(section, nodes, needs, [*taken, *of_judge])
    own = [(here.name, gpu) for gpu in trainer.gpus or ()]
    if needs.servers and not section.engines and needs.servers_use_gpus:
        every = [(node.name, gpu) for node in nodes for gpu in range(len(node.gpus))]
        present = [gpu for gpu in every if gpu not in of_judge]
        taken = [gpu for gpu in present if gpu not in own] or present
    if shared := [gpu for gpu in of_judge if gpu in (*own, *taken)]:
        raise ConfigError([f"placement.judge: another part has {_shown(shared[0])}; give the judge another GPU"])
    if set(own) & set(taken):
        _check_shared(own[0], taken, needs)
    places: list[Place] = []
    if taken:
        groups = _divided if section.engines else _chosen
        places = [Place(group[0][0], tuple(gpu for _, gpu in group)) for group in groups(taken, needs.replicas)]
    elif section.engines:
        if needs.replicas not in (None, len(named)):
            raise ConfigError([f"engine.replicas: {needs.replicas}, but placement.engines names {len(named)} servers"])
        places = [Place(node.name) for node, _ in named]
    elif needs.servers:
        others = nodes[1:] or nodes
        places = [Place(others[index % len(others)].name) for index in range(needs.replicas or 1)]
    chosen = section.nodes if section.nodes != "all" else [node.name for node in nodes]
    return DeviceMap(
        trainer,
        _with_cpus(places, nodes),
        judge,
        tuple(_read("placement.nodes", name, nodes)[0].name for name in chosen),
        is_chosen=(section.trainer is None and bool(own)) or (needs.servers and not section.engines),
    )


def _read(key: str, text: str, nodes: Sequence[Node]) -> tuple[Node, tuple[int, ...]]:
    """Return the node and the GPUs that a text names."""
    name, gpus = read_gpus(text)
    node = next((one for one in nodes if name in (one.name, one.host)), None)
    if node is None:
        there = ", ".join(f"{one.name} ({one.host}, {len(one.gpus)} GPUs)" for one in nodes)
        raise ConfigError([f"{key}: there is no node {name}; there are {there}"])
    if missing := [gpu for gpu in gpus if gpu >= len(node.gpus)]:
        last = len(node.gpus) - 1
        has = "no GPUs" if last < 0 else "one GPU, 0" if last == 0 else f"GPUs 0 to {last}"
        raise ConfigError([f"{key}: {node.name} has {has}, and {text} names {missing[0]}"])
    return node, gpus


def _trainer(section: PlacementSection, nodes: Sequence[Node], needs: Needs, taken: Sequence[Gpu]) -> Place:
    """Return the place of the trainer; `taken` are the GPUs that the section gives to servers."""
    here = nodes[0]
    if section.trainer is not None:
        node, gpus = _read("placement.trainer", section.trainer, nodes)
        if node is not here:
            raise ConfigError([f"placement.trainer: the trainer runs in this process, on {here.name}, not {node.name}"])
        if len(gpus) > 1:
            reason = f"the trainer uses one GPU, and {section.trainer} names {len(gpus)}; give the others to engines"
            raise ConfigError([f"placement.trainer: {reason}"])
        if gpus and not needs.trainer_uses_gpu:
            raise ConfigError(["placement.trainer: the trainer uses no GPU (trainer.device: cpu); leave out the GPU"])
        if gpus or not needs.trainer_uses_gpu:
            return Place(here.name, gpus or None)
    if not needs.trainer_uses_gpu or not here.gpus:
        return Place(here.name)
    free = [gpu for gpu in range(len(here.gpus)) if (here.name, gpu) not in taken]
    if not free and len(taken) > 1:
        raise ConfigError([f"placement.engines: no GPU of {here.name} is left for the trainer; leave one out"])
    return Place(here.name, (free[0] if free else 0,))


def _judge(section: PlacementSection, nodes: Sequence[Node], needs: Needs) -> Place | None:
    """Return the place of the server of the judge; None if the run serves none."""
    if not needs.serves_judge:
        if section.judge is not None:
            raise ConfigError(["placement.judge: the run serves no judge; leave it out, or name a model in env.judge"])
        return None
    node, gpus = _read("placement.judge", section.judge or nodes[0].name, nodes)
    if needs.servers_use_gpus and any(one.gpus for one in nodes) and not gpus:
        raise ConfigError(["placement.judge: the server of the judge needs a GPU of its own; name one, such as n0:1"])
    return Place(node.name, gpus or None)


def _check_shared(own: Gpu, taken: Sequence[Gpu], needs: Needs) -> None:
    """Check that the trainer and a server can have the same GPU, `own`."""
    if len(taken) > 1:
        reason = f"trainer and engines overlap in {_shown(own)}; give the engines other GPUs, or only that one"
        raise ConfigError([f"placement: {reason}"])
    if needs.ahead:
        reason = f"trainer and server would work on {_shown(own)} at the same time; use 0, or a GPU for each"
        raise ConfigError([f"rollout.ahead: {reason}"])
    if needs.utilization is None or needs.utilization > _MAX_SHARED:
        reason = f"trainer and server share {_shown(own)}; set it to at most {_MAX_SHARED:g}, such as 0.4"
        raise ConfigError([f"engine.gpu_memory_utilization: {reason}"])


def _divided(taken: Sequence[Gpu], replicas: int | None) -> Sequence[Sequence[Gpu]]:
    """Divide all GPUs, in their order, among the servers."""
    count = replicas or len(taken)
    if len(taken) % count:
        raise ConfigError([f"engine.replicas: {count} servers cannot share {len(taken)} GPUs of placement.engines"])
    size = len(taken) // count
    groups = [taken[first : first + size] for first in range(0, len(taken), size)]
    for group in groups:
        if group[0][0] != group[-1][0]:
            between = f"{_shown(group[0])} and {_shown(group[-1])}"
            raise ConfigError([f"engine.replicas: with {count} servers, one would be on two nodes, {between}"])
    return groups


def _chosen(free: Sequence[Gpu], replicas: int | None) -> Sequence[Sequence[Gpu]]:
    """Choose GPUs for the servers. Each has one, or with fewer servers the largest power of two that is possible."""
    by_node = {node: [gpu for gpu in free if gpu[0] == node] for node, _ in free}
    size = 1
    while replicas is not None and sum(len(gpus) // (2 * size) for gpus in by_node.values()) >= replicas:
        size *= 2
    groups = [
        gpus[first : first + size]
        for gpus in by_node.values()
        for first in range(0, len(gpus) - size + 1, size)
    ]  # fmt: skip
    if replicas is not None and len(groups) < replicas:
        raise ConfigError([f"engine.replicas: {replicas} servers, but only {len(free)} GPUs are left for them"])
    return groups[:replicas]


def _with_cpus(places: Sequence[Place], nodes: Sequence[Node]) -> tuple[Place, ...]:
    """Divide the cores of each node among its servers."""
    counts = Counter(place.node for place in places)
    cores = {node.name: node.cpus for node in nodes}
    return tuple(replace(place, cpus=max(1, cores[place.node] // counts[place.node])) for place in places)


def _shown(gpu: Gpu) -> str:
    return f"{gpu[0]}:{gpu[1]}"
