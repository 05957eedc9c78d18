"""Device maps: what is chosen, what is possible, and why a map is refused. No GPU has run a map."""

from __future__ import annotations

from typing import Any

import pytest

from envkit import config
from envkit.config.parts import EngineSection, VllmEngineSection
from envkit.config.training import PlacementSection
from envkit.errors import ConfigError
from envkit.types import Node, Place
from envkit.wiring.launch.placement import Needs, device_map, place_run


def nodes(*gpus: int) -> list[Node]:
    return [
        Node(name=f"n{index}", id=f"id{index}", host=f"host{index}", address="", cpus=64,
             gpus=tuple(map(str, range(count))))
        for index, count in enumerate(gpus)
    ]  # fmt: skip


def mapped(gpus: tuple[int, ...], section: dict[str, Any] | None = None, **needs: Any) -> str:
    return str(device_map(PlacementSection(**(section or {})), nodes(*gpus), Needs(**needs)))


@pytest.mark.parametrize(
    ("gpus", "needs", "expected"),
    [
        ((8,), {}, "trainer n0:0, servers n0:1 n0:2 n0:3 n0:4 n0:5 n0:6 n0:7"),
        ((8,), {"replicas": 3}, "trainer n0:0, servers n0:1,2 n0:3,4 n0:5,6"),
        ((2, 2), {}, "trainer n0:0, servers n0:1 n1:0 n1:1"),
        ((2, 4), {"replicas": 2}, "trainer n0:0, servers n1:0,1 n1:2,3"),
        ((4,), {"trainer_uses_gpu": False}, "trainer n0, servers n0:0 n0:1 n0:2 n0:3"),
        ((1,), {"utilization": 0.4}, "trainer n0:0, servers n0:0"),
        ((0,), {"replicas": 2}, "trainer n0, servers n0 n0"),
        ((0, 0, 0), {"replicas": 3}, "trainer n0, servers n1 n2 n1"),
        ((2,), {"servers_use_gpus": False}, "trainer n0:0, servers n0"),
    ],
)
def test_without_a_section_no_gpu_is_used_twice_unless_there_is_only_one(
    gpus: tuple[int, ...], needs: dict[str, Any], expected: str
) -> None:
    assert mapped(gpus, **needs) == f"{expected} (chosen; see placement)"


@pytest.mark.parametrize(
    ("section", "needs", "expected"),
    [
        ({"trainer": "n0:7", "engines": ["n0:0-5"]}, {"replicas": 3}, "trainer n0:7, servers n0:0,1 n0:2,3 n0:4,5"),
        ({"trainer": "n0:0", "engines": ["host1:0-7"]}, {"replicas": 2}, "trainer n0:0, servers n1:0,1,2,3 n1:4,5,6,7"),
        ({"trainer": "n0:3", "engines": ["n0:3"]}, {"utilization": 0.5}, "trainer n0:3, servers n0:3"),
        ({"trainer": "n0", "engines": ["n1", "n1"]}, {"trainer_uses_gpu": False}, "trainer n0, servers n1 n1"),
        (
            {"judge": "n0:0"},
            {"serves_judge": True, "replicas": 2},
            "trainer n0:1, servers n0:2,3,4,5 n1:0,1,2,3, judge n0:0 (chosen; see placement)",
        ),
    ],
)
def test_disjoint_and_equal_maps_are_possible(section: dict[str, Any], needs: dict[str, Any], expected: str) -> None:
    assert mapped((8, 8), section, **needs) == expected


@pytest.mark.parametrize(
    ("section", "needs", "why"),
    [
        ({"engines": ["n0:8"]}, {}, "placement.engines: n0 has GPUs 0 to 7, and n0:8 names 8"),
        ({"trainer": "n2:0"}, {}, r"placement.trainer: there is no node n2; there are n0 \(host0, 8 GPUs\), n1"),
        ({"engines": ["n0:1-3", "n0:3"]}, {}, "placement.engines: n0:3 occurs twice"),
        ({"trainer": "n0:1", "engines": ["n0:1-2"]}, {}, "placement: trainer and engines overlap in n0:1; give"),
        ({"engines": ["n0:0-7"]}, {}, "placement.engines: no GPU of n0 is left for the trainer"),
        ({"trainer": "n1:0"}, {}, "placement.trainer: the trainer runs in this process, on n0, not n1"),
        ({"trainer": "n0:0-3"}, {}, "placement.trainer: the trainer uses one GPU, and n0:0-3 names 4"),
        ({"trainer": "n0:0"}, {"trainer_uses_gpu": False}, "placement.trainer: the trainer uses no GPU"),
        ({"engines": ["n0:1-3"]}, {"replicas": 2}, "engine.replicas: 2 servers cannot share 3 GPUs"),
        ({"engines": ["n0:5-7", "n1:0"]}, {"replicas": 2}, "would be on two nodes, n0:7 and n1:0"),
        ({"engines": ["n0:1", "n1"]}, {}, "placement.engines: name GPUs of all nodes, or of none"),
        ({"engines": ["n1"]}, {"replicas": 2}, "engine.replicas: 2, but placement.engines names 1 servers"),
        ({"engines": ["n0:1"]}, {"servers": False}, "placement.engines: the run starts no servers"),
        ({}, {"replicas": 16}, "engine.replicas: 16 servers, but only 15 GPUs are left"),
        ({"nodes": ["n5"]}, {}, "placement.nodes: there is no node n5"),
        ({"judge": "n1:0"}, {}, "placement.judge: the run serves no judge"),
        ({}, {"serves_judge": True}, "placement.judge: the server of the judge needs a GPU of its own"),
        ({"judge": "n1:0", "engines": ["n1:0-3"]}, {"serves_judge": True}, "placement.judge: another part has n1:0"),
        ({"trainer": "n0:3", "engines": ["n0:3"]}, {"utilization": 0.4, "ahead": 1}, "rollout.ahead: .* n0:3 at the s"),
        ({"trainer": "n0:3", "engines": ["n0:3"]}, {}, "engine.gpu_memory_utilization: .* share n0:3; .* at most 0.7"),
    ],
)
def test_a_map_that_is_impossible_or_was_never_run_is_refused(
    section: dict[str, Any], needs: dict[str, Any], why: str
) -> None:
    with pytest.raises(ConfigError, match=why):
        mapped((8, 8), section, **needs)


@pytest.mark.parametrize("text", ["n0:", "n0:3-", ":1", "n0:a", "n0:3-1"])
def test_malformed_gpus_are_named_with_their_key(text: str) -> None:
    with pytest.raises(ConfigError, match=r"placement\.engines\.0: "):
        config.parse({"env": {"id": "Sokoban-v0"}, "placement": {"engines": [text]}})


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"env": {"id": "Sokoban-v0", "url": "http://h"}}, "env.url has the sandboxes"),
        ({"sandbox": {"kind": "none"}}, "none has no nodes"),
    ],
)
def test_a_run_without_sandboxes_of_its_own_starts_no_nodes_for_them(changes: dict[str, Any], why: str) -> None:
    content = {"env": {"id": "Sokoban-v0"}, "placement": {"nodes": "all"}, **changes}
    with pytest.raises(ConfigError, match=rf"placement\.nodes: .*{why}"):
        place_run(config.parse(content), nodes(0, 0))


@pytest.mark.parametrize(
    "engine", [EngineSection(kind="mine"), VllmEngineSection(url="http://h:1")], ids=["another package's", "urls"]
)
def test_an_engine_without_servers_of_the_run_leaves_the_only_gpu_to_the_trainer(engine: EngineSection) -> None:
    run = config.parse({"env": {"id": "Sokoban-v0"}}).model_copy(update={"engine": engine})
    placed = place_run(run, nodes(1))
    assert (placed.trainer, placed.engines) == (Place("n0", (0,)), ())


def test_the_cores_of_a_node_are_divided_among_its_servers() -> None:
    placed = device_map(PlacementSection(), nodes(1, 4), Needs())
    assert [place.cpus for place in placed.engines] == [16] * 4
