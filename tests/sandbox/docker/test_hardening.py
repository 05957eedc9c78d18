"""What a hostile program tries in a Docker box, and that it fails: as the agent, as the grader, and as the box's root
where that is more than they are.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import pytest

from envkit.sandbox.agent_client.sandbox import Box
from envkit.sandbox.docker.backend import DockerBackend
from envkit.types import ExecResult, SandboxSpec, SandboxUser
from tests.sandbox.docker.containers import docker, image, reduced_image, run

pytestmark = pytest.mark.docker

ANYBODY: tuple[SandboxUser, ...] = ("agent", "grader", "root")
WITHOUT_RIGHTS: tuple[SandboxUser, ...] = ("agent", "grader")

FORKS = """
import os, time
children = 0
try:
    while children < 300:
        if os.fork() == 0:
            time.sleep(2)
            os._exit(0)
        children += 1
except OSError as error:
    print(error.strerror)
print(children)
"""

CONNECT = """
import socket, sys
for host in sys.argv[1:]:
    try:
        socket.create_connection((host, 80), 1)
        print("reached", host)
    except OSError as error:
        print(error.strerror)
"""

OPEN_FOR_WRITING = """
import os, sys
for path in sys.argv[1:]:
    try:
        os.close(os.open(path, os.O_WRONLY))
        print("opened", path)
    except OSError:
        pass
"""

TRACE = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
for pid in sorted(int(name) for name in os.listdir("/proc") if name.isdigit()):
    if pid != os.getpid():
        if libc.ptrace(16, pid, 0, 0) == 0:
            print("traced", pid)
        else:
            print(os.strerror(ctypes.get_errno()))
"""

READ = """
import os
for name in ("mem", "environ", "maps"):
    try:
        with open("/proc/1/" + name, "rb") as file:
            if name != "mem":
                file.read(1)
        print("opened", name)
    except OSError as error:
        print(error.strerror)
try:
    print("saw", os.readlink("/proc/1/fd/0"))
except OSError as error:
    print(error.strerror)
"""


def attempts(*commands: list[str], user: SandboxUser = "agent") -> list[ExecResult]:
    """Run the commands one after another in one hostile box, and return what they did."""
    results = []

    async def main() -> None:
        spec = SandboxSpec(image=image(), untrusted=True, memory_mib=256, pids=64, disk_mib=32, cpus=1)
        async with DockerBackend() as backend:
            box = await backend.start(spec)
            assert isinstance(box, Box)
            for command in commands:
                results.append(await box.exec(command, timeout_s=30, user=user))
            assert (await box.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"

    run(main)
    return results


def attempt(command: str, user: SandboxUser = "agent") -> str:
    """Run a line of shell, and return all that it wrote."""
    (result,) = attempts(["sh", "-c", command], user=user)
    return result.stdout + result.stderr


def python(source: str, *arguments: str, user: SandboxUser = "agent") -> str:
    (result,) = attempts(["python3", "-c", source, *arguments], user=user)
    return result.stdout + result.stderr


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that only the host's root may read, and a variable of ours."""
    monkeypatch.setenv("SECRET_API_KEY", "sk-leak-me")
    file = Path("/tmp", f"envkit-test-secret-{os.getpid()}")
    file.write_text("the host's secret")
    file.chmod(0o600)
    yield file
    file.unlink()


@pytest.mark.parametrize("user", ANYBODY)
def test_forks_are_bounded(user: SandboxUser) -> None:
    said = python(FORKS, user=user).splitlines()
    assert said[0] == "Resource temporarily unavailable"
    assert 40 <= int(said[-1]) < 64


@pytest.mark.parametrize("user", ANYBODY)
def test_memory_is_bounded_and_the_box_outlives_who_wanted_more(user: SandboxUser) -> None:
    hog = "held = bytearray(600 << 20); held[::4096] = b'x' * len(held[::4096]); print('had it all')"
    (result,) = attempts(["python3", "-c", hog], user=user)
    assert (result.exit_code, result.stdout, result.is_out_of_memory) == (-9, "", True)


@pytest.mark.parametrize(
    ("place", "most_mib"), [("/tmp", 32), ("/workspace", 32), ("/dev/shm", 16), ("/run/envkit", 1)]
)
def test_what_is_written_is_bounded(place: str, most_mib: int) -> None:
    said = attempt(f"head -c 100000000 /dev/zero > {place}/file; stat -c %s {place}/file")
    assert "No space left on device" in said
    assert (most_mib - 1) << 20 <= int(said.split()[0]) <= most_mib << 20


@pytest.mark.parametrize("user", ANYBODY)
def test_nothing_else_can_be_written(user: SandboxUser) -> None:
    places = "/ /usr/bin /etc /var/tmp /var/lib /home /opt /run /sys /sys/fs/cgroup /proc /root"
    assert "WROTE" not in attempt(
        f"for place in {places}; do echo x 2>/dev/null > $place/evil && echo WROTE $place; done", user
    )


@pytest.mark.parametrize("user", WITHOUT_RIGHTS)
def test_programs_have_no_capability_and_can_gain_none(user: SandboxUser) -> None:
    status = dict(line.split(":\t", 1) for line in attempt("cat /proc/self/status", user).splitlines() if ":\t" in line)
    assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")
    assert "0" not in status["Uid"].split()


def test_the_box_s_root_has_four_capabilities_and_can_gain_none() -> None:
    status = dict(
        line.split(":\t", 1) for line in attempt("cat /proc/self/status", "root").splitlines() if ":\t" in line
    )
    four = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # CHOWN, KILL, SETGID, SETUID
    assert int(status["CapBnd"], 16) | four == four
    assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")


@pytest.mark.parametrize("user", ANYBODY)
def test_the_kernel_s_own_files_are_closed(user: SandboxUser) -> None:
    files = ("/proc/sysrq-trigger", "/proc/sys/kernel/core_pattern", "/proc/sys/vm/drop_caches", "/proc/kmsg")
    assert python(OPEN_FOR_WRITING, *files, user=user) == ""
    assert attempt("head -c 16 /proc/kcore | grep -c ELF", user).split()[0] == "0"


def test_processes_of_the_host_are_not_seen() -> None:
    said = attempt("cat /proc/[0-9]*/comm")
    assert "python3" in said
    assert "containerd" not in said
    assert "dockerd" not in said


@pytest.mark.parametrize("user", ANYBODY)
def test_mounts_devices_and_namespaces_are_refused(user: SandboxUser) -> None:
    tries = ("mount -t tmpfs x /tmp", "mknod /tmp/sda b 8 0", "unshare -Ur true", "chroot / true")
    assert "GOT" not in attempt("; ".join(f"{one} && echo GOT" for one in tries), user)


@pytest.mark.parametrize("user", ANYBODY)
def test_no_host_is_reached_neither_this_one_nor_the_cloud_s(user: SandboxUser) -> None:
    gateway = docker("network", "inspect", "bridge", "--format", "{{range .IPAM.Config}}{{.Gateway}}{{end}}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        ours = probe.getsockname()[0]
    hosts = ("1.1.1.1", "169.254.169.254", gateway or "172.17.0.1", ours)
    assert python(CONNECT, *hosts, user=user).splitlines() == ["Network is unreachable"] * len(hosts)


@pytest.mark.parametrize("user", ANYBODY)
def test_docker_itself_is_not_reached(user: SandboxUser) -> None:
    said = attempt(
        "find / -xdev -name 'docker*.sock' -o -name 'containerd*.sock'; env | grep -i docker; echo done", user
    )
    assert [line for line in said.splitlines() if "denied" not in line] == ["done"]


@pytest.mark.parametrize("user", ANYBODY)
def test_neither_files_nor_environment_of_the_host_are_seen(user: SandboxUser, secret: Path) -> None:
    said = attempt(f"env; cat /proc/1/environ; cat {secret} /proc/1/root{secret}; ls /tmp /run/envkit", user)
    assert "sk-leak-me" not in said
    assert "the host's secret" not in said
    assert secret.name not in said.replace(str(secret), "")


@pytest.mark.parametrize("user", WITHOUT_RIGHTS)
def test_the_agent_of_the_box_cannot_be_killed_stopped_traced_or_read(user: SandboxUser) -> None:
    tries = ("kill -KILL 1", "kill -STOP 1", "cat /proc/1/mem", "ls -l /proc/1/fd", "head -c 1 /proc/1/environ")
    assert "GOT" not in attempt("; ".join(f"{one} && echo GOT" for one in tries), user)


def test_orphans_leave_no_zombies() -> None:
    orphans, count = attempts(
        ["sh", "-c", "for i in 1 2 3 4 5 6 7 8 9 10; do sh -c '(sleep 0.1 &)'; done; sleep 0.5"],
        ["sh", "-c", "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"],
    )
    assert orphans.exit_code == 0
    assert count.stdout.strip() == "0"


def test_the_grader_s_files_are_closed_to_the_agent() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=image(), untrusted=True))
            assert isinstance(box, Box)
            hide = "umask 077; mkdir /tmp/graders; echo answer > /tmp/graders/key"
            assert (await box.exec(["sh", "-c", hide], timeout_s=20, user="grader")).exit_code == 0
            steal = "cat /tmp/graders/key; rm -r /tmp/graders; mv /tmp/graders /tmp/mine; ls /tmp"
            result = await box.exec(["sh", "-c", steal], timeout_s=20)
            assert result.stdout == "graders\n"

    run(main)


def test_processors_are_bounded() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=image(), untrusted=True, cpus=0.2))
            busy = "import time; began = time.process_time(); end = time.time() + 1\nwhile time.time() < end: pass\n"
            result = await box.exec(["python3", "-c", f"{busy}print(time.process_time() - began)"], timeout_s=30)
            assert float(result.stdout) < 0.45

    run(main)


@pytest.mark.parametrize("profile", ["strict", "system"])
@pytest.mark.parametrize("user", ANYBODY)
def test_what_starts_programs_is_not_traced_not_even_by_the_box_s_root(profile: str, user: SandboxUser) -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=image(), profile=profile))  # type: ignore[arg-type]
            assert isinstance(box, Box)
            await box.shell(user="root").run("true", timeout_s=20)
            said = (await box.exec(["python3", "-c", TRACE], timeout_s=20, user=user)).stdout.splitlines()
            # Bash is a program like any other, and may be traced by who has its rights.
            assert len([line for line in said if line.startswith("traced")]) <= 1
            assert said[0] == "Operation not permitted"
            assert said.count("Operation not permitted") >= 3
            assert (await box.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"

    run(main)


@pytest.mark.parametrize("profile", ["strict", "system"])
@pytest.mark.parametrize("whole", [True, False])
def test_memory_and_files_of_the_agent_are_closed_to_the_box_s_root(profile: str, whole: bool) -> None:
    async def main(name: str) -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=name, profile=profile))  # type: ignore[arg-type]
            assert isinstance(box, Box)
            said = (await box.exec(["python3", "-c", READ], timeout_s=20, user="root")).stdout.splitlines()
            assert said == ["Permission denied"] * 4

    # A Python without ctypes hides its process in another way.
    with nullcontext(image()) if whole else reduced_image() as name:
        run(partial(main, name))


def test_a_root_that_kills_everybody_leaves_a_box_that_answers(tmp_path: Path) -> None:
    (tmp_path / "one").write_text("1")
    everybody = "kill -9 -1; kill -9 1; kill -STOP 1; sleep 600"

    async def main() -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=image(), profile="system"))
            assert isinstance(box, Box)
            shell = box.shell()
            await shell.run("X=1", timeout_s=20)
            killed = await box.exec(["sh", "-c", everybody], timeout_s=20)
            assert (killed.exit_code, killed.timed_out) == (-9, False)
            lost = await shell.run("echo on", timeout_s=20)
            assert (lost.exit_code, lost.is_shell_lost) == (-9, True)
            lost = await shell.run(everybody, timeout_s=20)
            assert (lost.exit_code, lost.is_shell_lost, lost.timed_out) == (-9, True, False)
            assert (await shell.run("echo on", timeout_s=20)).stdout == "on\n"
            assert (await box.exec(["echo", "on"], timeout_s=20, user="grader")).stdout == "on\n"
            await box.upload(tmp_path / "one", "one")
            assert await box.read("one") == b"1"

    run(main)


def test_a_root_that_stops_everybody_holds_no_call_back_for_longer_than_its_time() -> None:
    async def main() -> None:
        async with DockerBackend() as backend:
            box = await backend.start(SandboxSpec(image=image(), profile="system"))
            assert isinstance(box, Box)
            await box.shell().run("(sleep 0.3; kill -STOP -1) &", timeout_s=20)
            waiting = await box.exec(["sh", "-c", "sleep 0.6; echo on"], timeout_s=2)
            assert (waiting.exit_code, waiting.timed_out) == (None, True)
            stopped = await box.shell().run("echo on", timeout_s=1)
            assert (stopped.timed_out, stopped.is_shell_lost) == (True, True)
            assert (await box.shell().run("echo on", timeout_s=20)).stdout == "on\n"
            assert (await box.exec(["echo", "on"], timeout_s=20)).stdout == "on\n"

    run(main)
