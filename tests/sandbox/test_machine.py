"""Default capacity of a machine."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from envkit.sandbox import machine
from envkit.sandbox.pool.node import Capacity, Node, ResourceRequest
from envkit.types import SandboxSpec
from tests.sandbox.fake.backend import FakeBackend

PHYSICAL_MIB = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 20


def write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


def test_unset_limits_follow_from_the_machine_and_set_ones_stay() -> None:
    large = Capacity(memory_mib=24_000, pids=32_768)
    open_ = Capacity(sandboxes=256)
    assert machine.with_defaults(open_, large) == Capacity(sandboxes=256, memory_mib=18_000, pids=16_384)
    limits = Capacity(sandboxes=8, cpus=2.0, memory_mib=64_000, disk_mib=10, pids=100_000)
    assert machine.with_defaults(limits, large) == limits
    assert machine.with_defaults(open_, Capacity()) == open_
    words = "256 sandboxes, 18,000 MiB of memory, 16,384 processes"
    assert machine.describe(machine.with_defaults(open_, large)) == words


def test_limits_of_cgroup_version_2_and_its_ancestors_apply(tmp_path: Path) -> None:
    write(tmp_path / "own", "0::/shop/server\n")
    write(tmp_path / "shop/server/memory.max", "max\n")
    write(tmp_path / "shop/memory.max", f"{96 << 20}\n")
    write(tmp_path / "pids.max", "77\n")
    assert machine.this_machine(tmp_path, tmp_path / "own") == Capacity(memory_mib=96, pids=77)


def test_limits_of_cgroup_version_1_apply(tmp_path: Path) -> None:
    write(tmp_path / "own", "8:pids:/\n5:cpu,memory:/server\n")
    write(tmp_path / "memory/server/memory.limit_in_bytes", f"{128 << 20}\n")
    write(tmp_path / "memory/memory.limit_in_bytes", "9223372036854771712\n")
    write(tmp_path / "pids/pids.max", "88\n")
    assert machine.this_machine(tmp_path, tmp_path / "own") == Capacity(memory_mib=128, pids=88)


def test_without_control_groups_the_physical_memory_applies(tmp_path: Path) -> None:
    assert machine.this_machine(tmp_path, tmp_path / "missing").memory_mib == PHYSICAL_MIB


@pytest.mark.parametrize(("memory_mib", "processors", "count"), [(96_000, 8, 8), (6_000, 8, 2), (1_100, 8, 1)])
def test_environments_get_a_sandbox_per_processor_in_half_of_the_node(
    memory_mib: int, processors: int, count: int
) -> None:
    node = Node("here", FakeBackend(), Capacity(sandboxes=256, memory_mib=memory_mib))
    assert machine.env_sandbox_count(node, ResourceRequest.of(SandboxSpec()), processors) == count
