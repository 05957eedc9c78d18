"""What a hostile program tries in a bubblewrap box, and that it fails: as the agent, as the grader, and as the box's
root where that is more than they are.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.sandbox import cgroups, folders
from envkit.sandbox.local import LocalBackend
from envkit.types import ExecResult, SandboxSpec, SandboxUser

pytestmark = [
    pytest.mark.bwrap,
    pytest.mark.skipif(not all(LocalBackend().capabilities().values()), reason="not everything is enforced here"),
]

HOSTILE = SandboxSpec(untrusted=True, memory_mib=256, pids=64, disk_mib=32)
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

OWNER = """
import os, anyio
from envkit.sandbox import cgroups, folders
from envkit.sandbox.local import LocalBackend
from envkit.types import SandboxSpec

async def main():
    async with LocalBackend() as backend:
        await backend.start(SandboxSpec())
        owner = folders.owner_name(os.getpid())
        made = [group for place in cgroups.find().parents.values() for group in place.glob(owner + "-*")]
        print(owner, len(made), flush=True)
        os.kill(os.getpid(), 9)

anyio.run(main)
"""

CALL = """
import ctypes, os, sys
libc = ctypes.CDLL(None, use_errno=True)
print(libc.syscall(*map(int, sys.argv[1:])), os.strerror(ctypes.get_errno()))
"""


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    clock.run(bounded)


def attempts(*commands: list[str], user: SandboxUser = "agent", spec: SandboxSpec = HOSTILE) -> list[ExecResult]:
    """Run the commands one after another in one box, and return what they did."""
    results = []

    async def main() -> None:
        async with LocalBackend() as backend:
            box = await backend.start(spec)
            for command in commands:
                results.append(await box.exec(command, timeout_s=20, user=user))
            assert (await box.exec(["echo", "alive"], timeout_s=20)).stdout == "alive\n"

    run(main)
    return results


def attempt(command: str, user: SandboxUser = "agent", spec: SandboxSpec = HOSTILE) -> str:
    """Run a line of shell, and return all that it wrote."""
    (result,) = attempts(["sh", "-c", command], user=user, spec=spec)
    return result.stdout + result.stderr


def python(source: str, *arguments: object, user: SandboxUser = "agent") -> str:
    (result,) = attempts([str(Path(sys.executable).resolve()), "-c", source, *map(str, arguments)], user=user)
    return result.stdout + result.stderr


def groups(owner: str) -> set[str]:
    return {group.name for place in cgroups.find().parents.values() for group in place.glob(f"{owner}-*")}


@pytest.fixture
def secret(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that only the host's root may read, and a variable of ours."""
    monkeypatch.setenv("SECRET_API_KEY", "sk-leak-me")
    file = Path("/usr/share", f"envkit-test-{os.getpid()}")
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
    (result,) = attempts([str(Path(sys.executable).resolve()), "-c", hog], user=user)
    assert (result.exit_code, result.stdout, result.is_out_of_memory) == (-9, "", True)


def test_a_box_whose_own_program_wants_too_much_is_lost_for_that_reason() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            hog = "head -c 600000000 /dev/zero | tail -n 1"
            box = await backend.start(SandboxSpec(("sh", "-c", f"exec sh -c '{hog}; kill -9 $$'"), memory_mib=64))
            assert await box.wait() == "out of memory"

    run(main)


@pytest.mark.parametrize(
    ("place", "most_mib"), [("/tmp", 32), ("/workspace", 32), ("/dev/shm", 32), ("/run/envkit", 1)]
)
def test_what_is_written_is_bounded(place: str, most_mib: int) -> None:
    said = attempt(f"head -c 100000000 /dev/zero > {place}/file; stat -c %s {place}/file")
    assert "No space left on device" in said
    assert (most_mib - 1) << 20 <= int(said.split()[0]) <= most_mib << 20


def test_what_a_grader_writes_at_home_is_bounded() -> None:
    said = attempt("cd; head -c 100000000 /dev/zero > file; stat -c %s file", user="grader")
    assert "No space left on device" in said
    assert 31 << 20 <= int(said.split()[0]) <= 32 << 20


def test_all_that_can_be_written_is_bounded_together() -> None:
    fill = "for place in /tmp /workspace /dev/shm; do head -c 200000000 /dev/zero > $place/file; done 2>/dev/null; "
    said = attempt(f"{fill} du -cm /tmp/file /workspace/file /dev/shm/file", spec=SandboxSpec(memory_mib=256))
    assert int(said.split()[-2]) == 3 * 64


@pytest.mark.parametrize("user", ANYBODY)
def test_nothing_else_can_be_written(user: SandboxUser) -> None:
    own = ("/tmp", "/workspace", "/dev/shm", "/run/envkit", "/dev/pts")  # in the last, nobody can make files
    find = "find / -writable -not -type l 2>/dev/null | while read -r place; do [ -c $place ] || echo $place; done"
    found = attempt(find, user=user).split()
    assert [place for place in found if not place.startswith(own)] == []
    said = attempt("for place in /usr/bin /etc /dev /sys /root /run /proc /; do echo > $place/evil; done", user=user)
    assert said.count("Read-only file system") + said.count("Permission denied") + said.count("nonexistent") == 8


@pytest.mark.parametrize("user", WITHOUT_RIGHTS)
def test_nobody_but_root_has_a_capability_and_nobody_can_gain_one(user: SandboxUser) -> None:
    said = attempt("grep -E 'Cap|NoNewPrivs|Seccomp:' /proc/self/status", user=user).split()
    assert said[1::2] == [f"{0:016x}"] * 5 + ["1", "2"]


@pytest.mark.parametrize("user", ANYBODY)
def test_users_are_who_they_are_said_to_be(user: SandboxUser) -> None:
    uid = {"agent": 1000, "grader": 1001, "root": 0}[user]
    assert attempt("id -u; id -g; id -G", user=user).split() == [str(uid)] * 3


def test_the_boxs_root_has_only_what_the_agent_needs_under_the_same_filter() -> None:
    said = attempt("grep -E 'CapEff|NoNewPrivs|Seccomp:' /proc/self/status", user="root").split()
    chown, kill, setgid, setuid, setpcap = 1 << 0, 1 << 5, 1 << 6, 1 << 7, 1 << 8
    assert int(said[1], 16) == chown | kill | setgid | setuid | setpcap
    assert (said[3], said[5]) == ("1", "2")


@pytest.mark.parametrize("user", ANYBODY)
def test_the_kernels_settings_cannot_be_opened_for_writing_nor_its_secrets_for_reading(user: SandboxUser) -> None:
    settings = ["sysrq-trigger", "sys/kernel/core_pattern", "sys/vm/drop_caches", "1/oom_score_adj"]
    secrets = ["kcore", "keys", "kmsg", "timer_list", "sched_debug"]
    source = """
import os, sys
for place in sys.argv[2:]:
    try:
        os.open("/proc/" + place, int(sys.argv[1]))
        print(place)
    except OSError:
        pass
"""
    assert python(source, os.O_WRONLY, *settings, user=user) == ""
    assert python(source, os.O_RDONLY, *secrets, user=user) == ""


@pytest.mark.parametrize("user", ANYBODY)
def test_processes_of_the_host_are_invisible(user: SandboxUser) -> None:
    names = attempt("cat /proc/[0-9]*/comm", user=user).split()
    assert set(names) <= {Path(sys.executable).resolve().name, "python", "sh", "cat"}
    assert len(names) < 8


@pytest.mark.parametrize("user", ANYBODY)
def test_the_doors_out_of_a_box_are_shut(user: SandboxUser) -> None:
    commands = [
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
    for command, result in zip(commands, attempts(*(["sh", "-c", one] for one in commands), user=user), strict=True):
        assert result.exit_code not in (0, 127), command
        refusals = ("not permitted", "denied", "superuser", "be root", "umount failed")
        assert any(refusal in result.stderr for refusal in refusals), (command, result.stderr)


@pytest.mark.skipif(os.uname().machine != "x86_64", reason="the numbers are those of x86_64")
@pytest.mark.parametrize("user", ANYBODY)
def test_calls_into_the_kernel_are_filtered(user: SandboxUser) -> None:
    no, none, family = "Operation not permitted", "Function not implemented", "Address family not supported by protocol"
    calls = {
        "clone of a user namespace": ((56, 0x10000000 | 17, 0, 0, 0, 0), no),
        "clone3": ((435, 0, 0), none),
        "keyctl": ((250, 0, -4, 0), no),
        "add_key": ((248, 0, 0, 0, 0, -4), no),
        "bpf": ((321, 0, 0, 0), no),
        "io_uring_setup": ((425, 1, 0), no),
        "userfaultfd": ((323, 0), no),
        "ptrace": ((101, 16, 1, 0, 0), no),
        "process_vm_readv": ((310, 1, 0, 0, 0, 0, 0), no),
        "open_by_handle_at": ((304, 0, 0, 0), no),
        "a socket to the host of a virtual machine": ((41, 40, 1, 0), family),
        "a packet socket": ((41, 17, 3, 0), family),
        "a call that is newer than the filter": ((600,), none),
        "a call of the 32-bit interface": ((0x40000000 | 39,), none),
    }
    argv = [str(Path(sys.executable).resolve()), "-c", CALL]
    results = attempts(*([*argv, *map(str, call)] for call, _ in calls.values()), user=user)
    said = dict(zip(calls, (result.stdout for result in results), strict=True))
    assert said == {name: f"-1 {refusal}\n" for name, (_, refusal) in calls.items()}


@pytest.mark.parametrize("user", ANYBODY)
def test_no_address_can_be_reached(user: SandboxUser) -> None:
    dial = """
import socket, sys
for host in ("1.1.1.1", "169.254.169.254", "172.17.0.1", "127.0.0.1"):
    try:
        socket.create_connection((host, int(sys.argv[1])), 1)
        print("reached", host)
    except OSError as error:
        print(error.strerror)
"""
    with socket.create_server(("0.0.0.0", 0)) as listener:
        said = python(dial, listener.getsockname()[1], user=user).splitlines()
    assert said == ["Network is unreachable"] * 3 + ["Connection refused"]


@pytest.mark.parametrize("user", ANYBODY)
def test_the_docker_daemon_is_not_there(user: SandboxUser) -> None:
    assert attempt("ls /run /var/run 2>/dev/null; env | grep -i docker", user=user).split() == [
        "/run:",
        "envkit",
        "envkit-grader",
    ]


@pytest.mark.parametrize("user", ANYBODY)
def test_neither_variables_nor_files_of_the_host_leak(user: SandboxUser, secret: Path) -> None:
    look = "env; cat /proc/[0-9]*/environ; cat /proc/[0-9]*/cmdline; cat /proc/1/root/root/* /root/* /etc/shadow"
    said = attempt(f"{look} 2>/dev/null", user=user)
    assert "sk-leak-me" not in said
    assert str(Path(__file__).parents[2]) not in said
    if user != "root":
        assert "Permission denied" in attempt(f"cat {secret}", user=user)


@pytest.mark.parametrize("user", WITHOUT_RIGHTS)
def test_the_agent_inside_cannot_be_read_steered_or_ended(user: SandboxUser) -> None:
    peek = "head -c 1 /proc/1/mem; cat /proc/1/environ; ls /proc/1/fd/ /proc/1/root/; kill -9 1; kill -STOP 1"
    said = attempt(peek, user=user)
    assert said.count("Permission denied") >= 3
    assert said.count("not permitted") == 2


def test_even_the_boxs_root_cannot_read_process_1() -> None:
    said = attempt("head -c 1 /proc/1/mem; cat /proc/1/environ /proc/1/maps; readlink /proc/1/fd/*; echo end", "root")
    assert said.count("Permission denied") == 3
    assert "\nend\n" in f"\n{said}"
    assert "socket:" not in said


def test_even_the_boxs_root_cannot_kill_process_1() -> None:
    attempt("kill -9 1", user="root")  # which asserts that the box lives


@pytest.mark.parametrize("user", ANYBODY)
def test_a_bound_can_be_read_but_not_raised_nor_left(user: SandboxUser) -> None:
    places = cgroups.find()
    if places.is_unified:
        limit, procs = "/sys/fs/cgroup/pids.max", "/sys/fs/cgroup/cgroup.procs"
    else:
        limit, procs = "/sys/fs/cgroup/pids/pids.max", "/sys/fs/cgroup/pids/cgroup.procs"
    said = attempt(f"cat {limit}; echo max > {limit}; echo $$ > {procs}; cat {limit}", user=user)
    assert said.splitlines()[:2] == ["64", "64"]


@pytest.mark.parametrize("user", WITHOUT_RIGHTS)
def test_orphans_leave_no_zombies(user: SandboxUser) -> None:
    orphans = "for i in 1 2 3 4 5 6 7 8 9 10; do sh -c '(sleep 0.1 &)'; done; sleep 0.4"
    count = "grep -l '^State:.Z' /proc/[0-9]*/status | wc -l"
    first, second = attempts(["sh", "-c", orphans], ["sh", "-c", count], user=user)
    assert (first.exit_code, second.stdout) == (0, "0\n")


def test_the_grader_reads_what_the_agent_wrote_and_not_the_other_way_round() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            box = await backend.start(HOSTILE)
            await box.write("/workspace/answer", b"42")
            read = await box.exec(["cat", "/workspace/answer"], timeout_s=20, user="grader")
            assert read.stdout == "42"
            hide = "umask 077; mkdir /tmp/grading; echo expected > /tmp/grading/key; echo x > /workspace/answer"
            written = await box.exec(["sh", "-c", hide], timeout_s=20, user="grader")
            assert "Permission denied" in written.stderr
            stolen = await box.exec(["sh", "-c", "cat /tmp/grading/key; rm -rf /tmp/grading"], timeout_s=20)
            assert "expected" not in stolen.stdout
            kept = await box.exec(["cat", "/tmp/grading/key"], timeout_s=20, user="grader")
            assert kept.stdout == "expected\n"

    run(main)


def test_a_hostile_box_is_not_shown_what_is_importable_here() -> None:
    said = attempt(f"ls {Path(__file__).parents[2]} {Path(sys.prefix, 'lib')}")
    assert said.count("No such file") == 2


def test_processors_are_bounded() -> None:
    places = cgroups.find()
    file = "/sys/fs/cgroup/cpu.max" if places.is_unified else "/sys/fs/cgroup/cpu/cpu.cfs_quota_us"
    assert attempt(f"cat {file}", spec=SandboxSpec(cpus=0.5)).split()[0] == "50000"


def test_of_a_box_that_forks_without_end_nothing_is_left(sleepers: Callable[[], int], marker: str) -> None:
    async def main() -> None:
        us = folders.owner_name(os.getpid())
        before = groups(us)
        async with LocalBackend() as backend:
            bomb = f"bomb() {{ sleep {marker} & bomb & bomb & wait; }}; bomb"
            box = await backend.start(HOSTILE)
            with anyio.move_on_after(1):
                await box.exec(["bash", "-c", bomb], timeout_s=20)
            await box.stop()
            assert sleepers() == 0
        assert groups(us) <= before

    run(main)


def test_the_groups_and_folders_of_an_owner_that_was_killed_are_cleared_away() -> None:
    async def main() -> None:
        done = await anyio.run_process([sys.executable, "-c", OWNER], check=False)
        owner, made = done.stdout.decode().split()
        assert (done.returncode, folders.is_owner_gone(owner)) == (-9, True)
        assert int(made) > 0
        with anyio.fail_after(5):
            while groups(owner):  # who was in it may still be dying
                async with LocalBackend():
                    pass

    run(main)
