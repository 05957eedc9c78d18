"""What a hostile program tries in a sandbox that isolates, and that it fails: as agent, as grader and as root."""

from __future__ import annotations

import os
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from envkit.types import ExecResult, SandboxUser
from tests.contract.kinds import ISOLATING, Kind, run
from tests.contract.shared import AnySandbox, Shared
from tests.sandbox.containers import docker

pytestmark = ISOLATING

ANYBODY: tuple[SandboxUser, ...] = ("agent", "grader", "root")
WITHOUT_RIGHTS: tuple[SandboxUser, ...] = ("agent", "grader")
HOSTILE = {"untrusted": True, "memory_mib": 256, "pids": 64, "disk_mib": 32}

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
port = int(sys.argv[1])
for host in sys.argv[2:]:
    try:
        socket.create_connection((host, port), 1)
        print("reached", host)
    except OSError as error:
        print(error.strerror)
"""

# Opens files of /proc: those before "read" for writing, those after it for reading; says which it could open or read.
OPEN = """
import os, sys
names = sys.argv[1:]
for place in names[:names.index("read")]:
    try:
        os.open("/proc/" + place, os.O_WRONLY)
        print("opened for writing", place)
    except OSError:
        pass
for place in names[names.index("read") + 1:]:
    try:
        file = os.open("/proc/" + place, os.O_RDONLY | os.O_NONBLOCK)
        print("read" if os.read(file, 16) else "found empty", place)
    except OSError:
        pass
"""

BURN = """
import time
began, end = time.process_time(), time.time() + 1
while time.time() < end: pass
print(time.process_time() - began)
"""

DOORS = [
    "mount -t tmpfs none /tmp",
    "mount -o remount,rw /usr",
    "umount -l /proc",
    "mknod /tmp/disk b 8 0",
    "unshare -U true",
    "unshare -m true",
    "nsenter -t 1 -m true",
    "chroot /tmp /bin/true",
    "hostname other",
    "date -s 2000-01-01",
    "dmesg",
]
REFUSALS = ("not permitted", "denied", "superuser", "be root", "umount failed")

everybody = pytest.mark.parametrize("user", ANYBODY)
without_rights = pytest.mark.parametrize("user", WITHOUT_RIGHTS)


def python(kind: Kind) -> str:
    """A Python in a hostile sandbox, which is not shown our virtual environment."""
    return str(Path(kind.python).resolve()) if kind.name == "local" else kind.python


async def sh(sandbox: AnySandbox, command: str, user: SandboxUser = "agent") -> str:
    """Run a line of shell, and return all that it wrote."""
    result = await sandbox.exec(["sh", "-c", command], timeout_s=30, user=user)
    return result.stdout + result.stderr


async def require_alive(sandbox: AnySandbox) -> None:
    assert (await sandbox.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"


@pytest.fixture
def hostile(shared: Shared) -> Shared:
    for name in ("uid", "memory", "pids", "cpu", "seccomp"):
        shared.require(name)
    return shared


@pytest.fixture
def secrets(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Path]]:
    """Files that only the host's root may read, one in a folder that some sandboxes see, and a variable of ours."""
    monkeypatch.setenv("SECRET_API_KEY", "sk-leak-me")
    files = [Path(folder, f"envkit-test-secret-{os.getpid()}") for folder in ("/tmp", "/usr/share")]
    for file in files:
        file.touch(mode=stat.S_IRUSR | stat.S_IWUSR)
        file.write_text("the host's secret")
    yield files
    for file in files:
        file.unlink()


# These fill their sandbox, and have one of their own.


def test_forks_are_bounded(kind: Kind, hostile: Shared) -> None:
    async def main() -> None:
        async with kind.sandbox(**HOSTILE) as sandbox:
            for user in ANYBODY:
                done = await sandbox.exec([python(kind), "-c", FORKS], timeout_s=30, user=user)
                refusal, count = done.stdout.splitlines()
                assert (refusal, 40 <= int(count) < 64) == ("Resource temporarily unavailable", True), (user, count)

    run(main)


def test_memory_is_limited_and_the_sandbox_survives_a_program_above_the_limit(kind: Kind, hostile: Shared) -> None:
    hog = "held = bytearray(600 << 20); held[::4096] = b'x' * len(held[::4096]); print('had it all')"

    async def main() -> None:
        async with kind.sandbox(**HOSTILE) as sandbox:
            for user in ANYBODY:
                result = await sandbox.exec([python(kind), "-c", hog], timeout_s=30, user=user)
                assert (result.exit_code, result.stdout, result.is_out_of_memory) == (-9, "", True), user
                await require_alive(sandbox)

    run(main)


def test_what_is_written_is_bounded(kind: Kind, hostile: Shared) -> None:
    shared_memory_mib = 16 if kind.name == "docker" else 32
    places: list[tuple[str, SandboxUser, int]] = [
        ("/tmp", "agent", 32),
        ("/workspace", "agent", 32),
        ("/dev/shm", "agent", shared_memory_mib),
        ("/run/envkit", "agent", 1),
        ("/run/envkit-grader", "grader", 32),
    ]

    async def main() -> None:
        async with kind.sandbox(**HOSTILE) as sandbox:
            for place, user, most_mib in places:
                fill = f"head -c 100000000 /dev/zero > {place}/file; stat -c %s {place}/file; rm {place}/file"
                reported = await sh(sandbox, fill, user)
                assert "No space left on device" in reported, place
                assert (most_mib - 1) << 20 <= int(reported.split()[0]) <= most_mib << 20, place

    run(main)


def test_processors_are_bounded(kind: Kind, hostile: Shared) -> None:
    async def main() -> None:
        async with kind.sandbox(untrusted=True, cpus=0.2) as sandbox:
            done = await sandbox.exec([python(kind), "-c", BURN], timeout_s=30)
            assert float(done.stdout) < 0.45

    run(main)


# These only try, and use one hostile sandbox one after another.


@everybody
def test_nothing_else_can_be_written(kind: Kind, hostile: Shared, user: SandboxUser) -> None:
    own: tuple[str, ...] = ("/tmp", "/workspace", "/dev/shm", "/dev/mqueue", "/run/envkit", "/dev/pts", "/proc")
    find = "find / -writable -not -type l 2>/dev/null | while read -r place; do [ -c $place ] || echo $place; done"
    if kind.name == "docker" and user == "root":
        # A folder in memory that Docker makes, and the file with which process 1 moves the agent's programs.
        own = (*own, "/dev", "/sys/fs/cgroup/memory/agent/tasks")
    places = "/ /usr/bin /etc /var/tmp /var/lib /home /opt /run /sys /sys/fs/cgroup /proc /root"

    async def main(sandbox: AnySandbox) -> None:
        found = (await sh(sandbox, find, user)).split()
        assert [place for place in found if not place.startswith(own)] == []
        reported = await sh(
            sandbox, f"for place in {places}; do echo x 2>&1 > $place/evil && echo WROTE $place; done", user
        )
        assert "WROTE" not in reported

    hostile.run(main, **HOSTILE)


@without_rights
def test_programs_have_no_capability_and_can_gain_none(kind: Kind, hostile: Shared, user: SandboxUser) -> None:
    async def main(sandbox: AnySandbox) -> None:
        reported = await sh(sandbox, "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status", user)
        status = dict(line.split(":\t") for line in reported.splitlines())
        assert {status[name] for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")} == {"0" * 16}
        assert kind.name == "docker" or status["CapBnd"] == "0" * 16
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")

    hostile.run(main, **HOSTILE)


def test_root_has_only_the_capabilities_that_starting_programs_needs(kind: Kind, hostile: Shared) -> None:
    needed = 1 << 0 | 1 << 5 | 1 << 6 | 1 << 7  # CHOWN, KILL, SETGID, SETUID
    if kind.name == "local":
        needed |= 1 << 8  # SETPCAP

    async def main(sandbox: AnySandbox) -> None:
        reported = await sh(sandbox, "grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status", "root")
        status = dict(line.split(":\t") for line in reported.splitlines())
        for name in ("CapEff", "CapBnd"):
            assert int(status[name], 16) | needed == needed, name
        assert (status["NoNewPrivs"], status["Seccomp"]) == ("1", "2")

    hostile.run(main, **HOSTILE)


@everybody
def test_the_kernels_settings_cannot_be_written_nor_its_secrets_read(
    kind: Kind, hostile: Shared, user: SandboxUser
) -> None:
    settings = ["sysrq-trigger", "sys/kernel/core_pattern", "sys/vm/drop_caches", "kmsg"]
    if kind.name == "local":
        settings.append("1/oom_score_adj")
    secrets = ["kcore", "keys", "kmsg", "timer_list", "sched_debug"]

    async def main(sandbox: AnySandbox) -> None:
        tried = await sandbox.exec([python(kind), "-c", OPEN, *settings, "read", *secrets], timeout_s=30, user=user)
        assert (tried.exit_code, tried.stderr) == (0, "")
        # Docker puts empty files in their places.
        reported = [line for line in tried.stdout.splitlines() if kind.name != "docker" or "found empty" not in line]
        assert reported == []

    hostile.run(main, **HOSTILE)


@everybody
def test_processes_of_the_host_are_invisible(kind: Kind, hostile: Shared, user: SandboxUser) -> None:
    own = {Path(python(kind)).name, "python3", "python", "sh", "cat"}

    async def main(sandbox: AnySandbox) -> None:
        names = (await sh(sandbox, "cat /proc/[0-9]*/comm", user)).split()
        assert {"sh"} <= set(names) <= own
        assert len(names) < 16

    hostile.run(main, **HOSTILE)


@everybody
def test_known_escapes_from_a_sandbox_fail(hostile: Shared, user: SandboxUser) -> None:
    async def main(sandbox: AnySandbox) -> None:
        for command in DOORS:
            result = await sandbox.exec(["sh", "-c", command], timeout_s=20, user=user)
            assert result.exit_code not in (0, 127), command
            assert any(refusal in result.stderr for refusal in REFUSALS), (command, result.stderr)

    hostile.run(main, **HOSTILE)


@everybody
def test_no_address_can_be_reached(kind: Kind, hostile: Shared, user: SandboxUser) -> None:
    gateway = "172.17.0.1"
    if kind.name == "docker":
        found = docker("network", "inspect", "bridge", "--format", "{{range .IPAM.Config}}{{.Gateway}}{{end}}")
        gateway = found or gateway
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect(("192.0.2.1", 9))
        ours = probe.getsockname()[0]
    hosts = ["1.1.1.1", "169.254.169.254", gateway, ours]

    async def main(sandbox: AnySandbox) -> None:
        with socket.create_server(("0.0.0.0", 0)) as listener:
            port = str(listener.getsockname()[1])
            done = await sandbox.exec([python(kind), "-c", CONNECT, port, *hosts, "127.0.0.1"], timeout_s=30, user=user)
        assert done.stdout.splitlines() == ["Network is unreachable"] * len(hosts) + ["Connection refused"]

    hostile.run(main, **HOSTILE)


@everybody
def test_the_docker_daemon_is_not_reached(kind: Kind, hostile: Shared, user: SandboxUser) -> None:
    sockets = "find / -xdev '(' -name 'docker*.sock' -o -name 'containerd*.sock' ')' 2>/dev/null; env | grep -i docker"

    async def main(sandbox: AnySandbox) -> None:
        assert await sh(sandbox, sockets, user) == ""
        if kind.name == "local":
            assert (await sh(sandbox, "ls /run /var/run 2>/dev/null", user)).split() == [
                "/run:",
                "envkit",
                "envkit-grader",
            ]

    hostile.run(main, **HOSTILE)


@everybody
def test_neither_files_nor_variables_of_the_host_are_seen(
    kind: Kind, hostile: Shared, user: SandboxUser, secrets: list[Path]
) -> None:
    look = "env; cat /proc/[0-9]*/environ /proc/[0-9]*/cmdline /proc/1/root/root/* /root/* /etc/shadow; ls /tmp"
    if kind.name == "local" and user == "root":
        secrets = secrets[:1]  # it has a view of the host's /usr, with the rights of the host's root or of nobody

    async def main(sandbox: AnySandbox) -> None:
        reported = await sh(sandbox, f"({look}) 2>/dev/null", user)
        assert secrets[0].name not in reported
        for secret in secrets:
            reported += await sh(sandbox, f"cat {secret} /proc/1/root{secret}", user)
        assert "sk-leak-me" not in reported
        assert "the host's secret" not in reported
        assert str(Path(__file__).parents[3]) not in reported

    hostile.run(main, **HOSTILE)


@without_rights
def test_process_1_cannot_be_read_steered_or_ended(hostile: Shared, user: SandboxUser) -> None:
    reads = "head -c 1 /proc/1/mem; head -c 1 /proc/1/environ; ls /proc/1/fd/ /proc/1/root/"

    async def main(sandbox: AnySandbox) -> None:
        reported = await sh(sandbox, f"{reads}; kill -9 1; kill -STOP 1", user)
        assert reported.count("Permission denied") == 4
        assert reported.count("not permitted") == 2
        await require_alive(sandbox)

    hostile.run(main, **HOSTILE)


def test_not_even_root_reads_or_ends_process_1(hostile: Shared) -> None:
    reads = "head -c 1 /proc/1/mem; cat /proc/1/environ /proc/1/maps; readlink /proc/1/fd/*; kill -9 1; echo end"

    async def main(sandbox: AnySandbox) -> None:
        reported = await sh(sandbox, reads, "root")
        assert reported.count("Permission denied") == 3
        assert "\nend\n" in f"\n{reported}"
        assert "socket:" not in reported
        await require_alive(sandbox)

    hostile.run(main, **HOSTILE)


@everybody
def test_a_bound_can_be_read_but_not_raised_nor_left(hostile: Shared, user: SandboxUser) -> None:
    find = "cd /sys/fs/cgroup; [ -e pids.max ] || cd pids"
    tries = "cat pids.max; echo max > pids.max; echo $$ > cgroup.procs; cat pids.max"

    async def main(sandbox: AnySandbox) -> None:
        result = await sandbox.exec(["sh", "-c", f"{find}; {tries}"], timeout_s=20, user=user)
        assert result.stdout == "64\n64\n"

    hostile.run(main, **HOSTILE)


def test_orphans_leave_no_zombies(hostile: Shared) -> None:
    orphans = "for i in 1 2 3 4 5 6 7 8 9 10; do sh -c '(sleep 0.1 &)'; done; sleep 0.4"
    count = "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"

    async def main(sandbox: AnySandbox) -> None:
        first: ExecResult = await sandbox.exec(["sh", "-c", orphans], timeout_s=20)
        assert (first.exit_code, await sh(sandbox, count)) == (0, "0\n")

    hostile.run(main, **HOSTILE)
