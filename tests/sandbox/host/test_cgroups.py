"""Control groups: on trees of plain files in the two layouts of the kernel, and for real where the machine has them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.runs import owners
from envkit.sandbox.host import agent_cgroup, cgroups
from envkit.types import Cause, CauseKind
from envkit.types.sandboxes import SandboxLimits

BOUNDS = SandboxLimits(memory_mib=64, pids=7, disk_mib=16, cpus=0.5)
SETTINGS = {
    "memory": ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes", "memory.oom_control"),
    "pids": ("pids.max",),
    "cpu": ("cpu.cfs_period_us", "cpu.cfs_quota_us"),
}


def files(folder: Path, *names: str) -> None:
    """Make the files that the kernel makes in a new group."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in names:
        (folder / name).touch()


def version_1(root: Path, group: str = "g") -> Path:
    for controller, settings in SETTINGS.items():
        files(root / controller, "cgroup.procs")
        files(root / controller / group, "cgroup.procs", *settings)
    return root


def version_2(root: Path, *, own: str, controllers: str = "memory pids cpu io", shared: str = "") -> tuple[Path, Path]:
    """Make a tree in which our own group is `own`; its parent gives `shared` to the groups in it."""
    place = root
    for part in ("", *own.strip("/").split("/")):
        place = place / part
        files(place, "cgroup.procs", "cgroup.subtree_control")
        (place / "cgroup.controllers").write_text(controllers)
    (place.parent / "cgroup.subtree_control").write_text(shared)
    names = root / "names"
    names.write_text(f"1:name=systemd:/\n0::{own}\n")
    return root, names


def test_a_controller_that_is_not_there_is_not_promised(tmp_path: Path) -> None:
    files(tmp_path / "pids", "cgroup.procs")
    assert list(cgroups.find(tmp_path).parents) == ["pids"]


def test_the_bounds_of_version_1_also_bound_swap(tmp_path: Path) -> None:
    cgroups.Cgroup(cgroups.find(version_1(tmp_path)), "g").make(BOUNDS)
    assert (tmp_path / "memory/g/memory.limit_in_bytes").read_text() == "67108864"
    assert (tmp_path / "memory/g/memory.memsw.limit_in_bytes").read_text() == "67108864"
    assert (tmp_path / "pids/g/pids.max").read_text() == "7"
    assert (tmp_path / "cpu/g/cpu.cfs_period_us").read_text() == "100000"
    assert (tmp_path / "cpu/g/cpu.cfs_quota_us").read_text() == "50000"


def test_swapping_is_disabled_if_the_kernel_does_not_account_swap(tmp_path: Path) -> None:
    version_1(tmp_path)
    (tmp_path / "memory/g/memory.memsw.limit_in_bytes").unlink()
    (tmp_path / "memory/g/memory.swappiness").write_text("60")
    cgroups.Cgroup(cgroups.find(tmp_path), "g").make(BOUNDS)
    assert (tmp_path / "memory/g/memory.swappiness").read_text()[0] == "0"


def test_in_version_2_the_nearest_group_that_holds_the_controllers_is_used(tmp_path: Path) -> None:
    root, own = version_2(tmp_path, own="/user.slice/app.slice/shell.scope", shared="memory pids cpu")
    places = cgroups.find(root, own)
    # In our own group nothing is switched on, and it cannot be: plain files take what is written to them literally.
    assert places.is_unified
    assert set(places.parents.values()) == {root / "user.slice/app.slice"}
    assert set(places.parents) == {"memory", "pids", "cpu"}


def test_in_version_2_without_controllers_nothing_is_promised(tmp_path: Path) -> None:
    root, own = version_2(tmp_path, own="/user.slice/shell.scope", controllers="pids")
    assert cgroups.find(root, own).parents == {}


def test_the_bounds_of_version_2_leave_no_swap(tmp_path: Path) -> None:
    root, own = version_2(tmp_path, own="/a/b", shared="cpu memory pids")
    files(root / "a/g", "cgroup.procs", "memory.max", "memory.swap.max", "pids.max", "cpu.max")
    cgroups.Cgroup(cgroups.find(root, own), "g").make(BOUNDS)
    written = {name: (root / "a/g" / name).read_text() for name in ("memory.max", "memory.swap.max", "pids.max")}
    assert written == {"memory.max": "67108864", "memory.swap.max": "0", "pids.max": "7"}
    assert (root / "a/g/cpu.max").read_text() == "50000 100000"


def test_processes_killed_at_the_limit_are_counted(tmp_path: Path) -> None:
    one = cgroups.Cgroup(cgroups.find(version_1(tmp_path / "1")), "g")
    (tmp_path / "1/memory/g/memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 3\n")
    (tmp_path / "1/memory/g/memory.limit_in_bytes").write_text(f"{64 << 20}\n")
    (tmp_path / "1/memory/g/memory.max_usage_in_bytes").write_text(f"{40 << 20}\n")
    assert one.memory_counters() == cgroups.MemoryCounters(oom_kills=3, limit_hit=False)
    (tmp_path / "1/memory/g/memory.max_usage_in_bytes").write_text(f"{(64 << 20) - 4096}\n")
    assert one.memory_counters() == cgroups.MemoryCounters(oom_kills=3, limit_hit=True)
    root, own = version_2(tmp_path / "2", own="/a/b", shared="cpu memory pids")
    files(root / "a/g", "memory.events")
    (root / "a/g/memory.events").write_text("low 0\nhigh 0\nmax 9\noom 4\noom_kill 2\noom_group_kill 0\n")
    two = cgroups.Cgroup(cgroups.find(root, own), "g")
    assert two.memory_counters() == cgroups.MemoryCounters(oom_kills=2, limit_hit=True)


@pytest.mark.parametrize(
    ("counters", "survived", "found"),
    [
        (cgroups.MemoryCounters(oom_kills=1, limit_hit=True), 0, (CauseKind.OUT_OF_MEMORY, True)),
        (cgroups.MemoryCounters(oom_kills=3, limit_hit=True), 2, (CauseKind.OUT_OF_MEMORY, True)),
        (cgroups.MemoryCounters(oom_kills=1, limit_hit=False), 0, (CauseKind.OUT_OF_MEMORY, False)),
        (cgroups.MemoryCounters(oom_kills=2, limit_hit=True), 2, None),
        (cgroups.MemoryCounters(oom_kills=0, limit_hit=True), 0, None),
    ],
)
def test_only_an_oom_kill_at_the_sandbox_s_own_limit_is_by_the_agent(
    counters: cgroups.MemoryCounters, survived: int, found: tuple[CauseKind, bool] | None
) -> None:
    cause = counters.cause(survived)
    assert found == (None if cause is None else (cause.kind, cause.by_agent))


def test_groups_of_the_dead_are_found_and_those_of_the_living_are_not(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        dead = owners.owner_name(process.pid)
    version_1(tmp_path, dead)
    version_1(tmp_path, owners.owner_name(os.getpid()))
    version_1(tmp_path, "envkit-of-somebody-else")
    (group,) = cgroups.gone(cgroups.find(tmp_path))
    assert group.views()[0][0] == tmp_path / "memory" / dead


def test_groups_may_vanish_while_they_are_looked_at(tmp_path: Path) -> None:
    version_1(tmp_path, owners.owner_name(os.getpid()))
    places = cgroups.find(tmp_path)
    group = places.parents["memory"] / "envkit-of-somebody-else"
    come_and_go = f"import os\nwhile True: os.mkdir({str(group)!r}); os.rmdir({str(group)!r})"
    with subprocess.Popen([sys.executable, "-c", come_and_go]) as somebody:
        try:
            for _ in range(100):
                cgroups.gone(places)
        finally:
            somebody.kill()


def test_a_cgroup_is_kept_for_as_long_as_its_new_owner_lives(tmp_path: Path) -> None:
    with subprocess.Popen(["true"]) as process:
        dead = owners.owner_name(process.pid)
    version_1(tmp_path, dead)
    places = cgroups.find(tmp_path)
    with subprocess.Popen(["sleep", "60"]) as heir:
        cgroups.Cgroup(places, dead).transfer_to(heir.pid)
        assert cgroups.gone(places) == []
        heir.kill()
    assert [group.name for group in cgroups.gone(places)] == [dead]


@pytest.mark.parametrize(
    ("memory_mib", "reserve_mib"), [(16, 4), (64, 16), (128, 32), (256, 32), (400, 50), (512, 64), (4096, 64)]
)
def test_an_eighth_of_a_sandboxs_memory_is_reserved_within_bounds(memory_mib: int, reserve_mib: int) -> None:
    assert agent_cgroup.reserve_mib(memory_mib) == reserve_mib


def test_in_version_1_the_agents_group_is_a_child_with_a_lower_limit(tmp_path: Path) -> None:
    child = version_1(tmp_path) / "memory/g/agent"
    files(child, "tasks", "memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
    group = cgroups.Cgroup(cgroups.find(tmp_path), "g")
    group.make(BOUNDS)
    assert (child / "memory.limit_in_bytes").read_text() == str(48 << 20)
    assert (child / "memory.memsw.limit_in_bytes").read_text() == str(48 << 20)
    assert group.of_agent is not None
    assert group.of_agent.join_file == child / "tasks"
    group.join(4711)
    assert (tmp_path / "memory/g/cgroup.procs").read_text() == "4711"


def test_in_version_2_process_1_and_the_agents_programs_are_in_two_children(tmp_path: Path) -> None:
    root, own = version_2(tmp_path, own="/a/b", shared="cpu memory pids")
    files(root / "a/g", "cgroup.subtree_control", "memory.max", "memory.swap.max", "pids.max", "cpu.max")
    files(root / "a/g/agent", "cgroup.procs", "memory.max")
    files(root / "a/g/first", "cgroup.procs")
    group = cgroups.Cgroup(cgroups.find(root, own), "g")
    group.make(BOUNDS)
    assert (root / "a/g/cgroup.subtree_control").read_text() == "+memory"
    assert (root / "a/g/agent/memory.max").read_text() == str(48 << 20)
    group.join(4711)
    assert (root / "a/g/first/cgroup.procs").read_text() == "4711"


@pytest.fixture
def real() -> Iterator[cgroups.Cgroup]:
    places = cgroups.find()
    if set(places.parents) != set(cgroups.CONTROLLERS):
        pytest.skip("no control groups can be made on this machine")
    group = cgroups.Cgroup(places, f"envkit-test-{os.getpid()}")
    yield group
    group.kill()
    group.remove()


def joined(group: cgroups.Cgroup, command: str) -> subprocess.Popen[bytes]:
    """Start a command that begins once it is in the group."""
    process = subprocess.Popen(
        ["sh", "-c", f"read -r go; {command}"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    group.join(process.pid)
    assert process.stdin is not None
    process.stdin.write(b"go\n")
    process.stdin.flush()
    return process


def test_a_limit_of_a_real_group_must_be_hit_again_after_a_kill_that_was_survived(real: cgroups.Cgroup) -> None:
    real.make(SandboxLimits(memory_mib=64, pids=8, disk_mib=16, cpus=None))
    found = []
    for _ in range(2):
        with joined(real, "head -c 100000000 /dev/zero | tail -n 1 | wc -c") as process:
            process.communicate(timeout=20)
        found.append(real.memory_counters().limit_hit)
        real.survived()
        found.append(real.memory_counters().limit_hit)
    assert found == [True, False, True, False]


def test_hits_of_the_limit_before_a_kill_that_was_survived_are_no_evidence(tmp_path: Path) -> None:
    root, own = version_2(tmp_path, own="/a/b", shared="cpu memory pids")
    files(root / "a/g", "memory.events")
    (root / "a/g/memory.events").write_text("oom 2\noom_kill 2\n")
    group = cgroups.Cgroup(cgroups.find(root, own), "g")
    group.survived()
    (root / "a/g/memory.events").write_text("oom 2\noom_kill 3\n")  # the host ran out
    assert group.memory_counters().cause(2) == Cause(
        CauseKind.OUT_OF_MEMORY, "out of memory: the host ran out before the sandbox reached its limit"
    )
    (root / "a/g/memory.events").write_text("oom 3\noom_kill 3\n")
    assert group.memory_counters().cause(2) == Cause(CauseKind.OUT_OF_MEMORY, "out of memory", by_agent=True)
