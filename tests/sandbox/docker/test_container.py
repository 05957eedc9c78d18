"""What a container is made of, and what the daemon's record of its end means."""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

import pytest

from envkit.sandbox.docker import container_config
from envkit.sandbox.docker.container_config import Image
from envkit.types import JSON, Cause, CauseKind, SandboxSpec
from envkit.types.sandboxes import SandboxLimits

IMAGE = Image("sha256:1", {"PATH": "/opt/bin", "KEY": "image"}, ("/data",))


def host(spec: SandboxSpec, *, seccomp_profile: str | None = None) -> dict[str, JSON]:
    labels = {"envkit.sandbox": "docker-1"}
    found = container_config.options(spec, IMAGE, ["python3"], labels, seccomp_profile=seccomp_profile)["HostConfig"]
    assert isinstance(found, dict)
    return found


def test_every_place_that_can_be_written_is_in_memory_and_bounded_also_those_that_the_image_declares() -> None:
    places = host(SandboxSpec(disk_mib=32))["Tmpfs"]
    assert isinstance(places, dict)
    assert sorted(places) == ["/data", "/dev/shm", "/run/envkit-grader", "/tmp", "/workspace"]
    assert "size=16m" in str(places.pop("/dev/shm"))
    assert all("size=32m" in str(options) for options in places.values())
    large = host(SandboxSpec())["Tmpfs"]
    assert isinstance(large, dict)
    assert "size=64m" in str(large["/run/envkit-grader"])


@pytest.mark.parametrize(("memory_mib", "disk_mib"), [(None, 256), (512, 128), (64, 16), (8192, 256)])
def test_places_to_write_to_leave_half_of_the_memory(memory_mib: int | None, disk_mib: int) -> None:
    assert SandboxLimits.of(SandboxSpec(memory_mib=memory_mib)).disk_mib == disk_mib
    assert SandboxLimits.of(SandboxSpec(memory_mib=memory_mib, profile="system")).disk_mib == 4096


def test_a_system_container_may_do_what_package_managers_need_and_no_more() -> None:
    found = host(SandboxSpec(profile="system"))
    assert found["ReadonlyRootfs"] is False
    for dangerous in ("NET_RAW", "MKNOD", "AUDIT_WRITE", "SETFCAP", "SYS_ADMIN"):
        assert dangerous not in str(found["CapAdd"])
    assert found["SecurityOpt"] == ["no-new-privileges"]
    bounded = host(SandboxSpec(profile="system", disk_mib=500))
    assert {"Name": "fsize", "Soft": 500 << 20, "Hard": 500 << 20} in list(bounded["Ulimits"])  # type: ignore[arg-type]
    assert "fsize" not in str(host(SandboxSpec())["Ulimits"])


@pytest.mark.parametrize(
    ("spec", "lost"),
    [
        (SandboxSpec(), ()),
        (SandboxSpec(network="open"), ("network",)),
        (SandboxSpec(profile="system"), ("disk", "uid")),
        (SandboxSpec(profile="system", network="open"), ("network", "disk", "uid")),
    ],
)
def test_unenforced_limits_are_named(spec: SandboxSpec, lost: tuple[str, ...]) -> None:
    assert container_config.unenforced(spec) == lost


def test_the_spec_s_environment_goes_over_ours_and_ours_over_the_image_s() -> None:
    found = container_config.environment(SandboxSpec(env={"KEY": "spec"}), IMAGE)
    assert found == {
        "PATH": "/opt/bin",
        "LANG": "C.UTF-8",
        "KEY": "spec",
        "HOME": "/workspace",
        "ENVKIT_SOCKETS": "/run/envkit",
        "ENVKIT_WORKDIR": "/workspace",
    }


@pytest.mark.parametrize(("profile", "default"), [("strict", "/workspace"), ("system", "/")])
def test_programs_know_the_working_directory_of_the_image(profile: Literal["strict", "system"], default: str) -> None:
    for image, workdir in ((IMAGE, default), (replace(IMAGE, workdir="/app"), "/app")):
        found = container_config.environment(SandboxSpec(profile=profile), image)
        assert found["ENVKIT_WORKDIR"] == workdir


def test_nothing_of_the_environment_is_in_what_the_daemon_shows_to_others() -> None:
    assert "open-sesame" not in str(
        container_config.options(SandboxSpec(env={"KEY": "open-sesame"}), IMAGE, ["python3"], {})
    )


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ({"Running": True, "Status": "running"}, None),
        ({"Status": "exited", "ExitCode": 3}, "exited with code 3: no luck"),
        ({"Status": "exited", "ExitCode": 137}, "killed by signal 9 (SIGKILL)"),
        ({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, "out of memory"),
        ({"Status": "exited", "ExitCode": 0, "OOMKilled": True}, "exited with code 0"),
    ],
)
def test_the_daemon_s_record_of_an_end_is_a_cause_in_one_line(state: dict[str, JSON], cause: str | None) -> None:
    found = container_config.cause(state, "no luck", out_of_memory=Cause(CauseKind.OUT_OF_MEMORY, "out of memory"))
    assert found == cause if cause is None else str(found) == cause


def test_a_container_that_survived_an_oom_kill_is_not_out_of_memory_when_it_is_killed_later() -> None:
    found = container_config.cause({"Status": "exited", "ExitCode": 137, "OOMKilled": True}, "", out_of_memory=None)
    assert found == Cause(CauseKind.KILLED, "killed by signal 9 (SIGKILL)")
