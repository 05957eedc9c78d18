"""What a bubblewrap box cannot see, reach or change."""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

import anyio
import pytest

from envkit import clock
from envkit.sandbox import folders
from envkit.sandbox.local import LocalBackend
from envkit.types import SandboxSpec

pytestmark = pytest.mark.bwrap

SLEEP = SandboxSpec(("sleep", "1000"))


def run(main: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        with anyio.fail_after(60):
            await main()

    clock.run(bounded)


def inside(*commands: str, python: bool = False) -> list[str]:
    """Run each command in one box and return what it wrote, followed by its exit code."""
    written = []

    async def main() -> None:
        async with LocalBackend() as backend:
            box = await backend.start(SLEEP)
            for command in commands:
                argv = [sys.executable, "-c", command] if python else ["sh", "-c", command]
                result = await box.exec(argv, timeout_s=20)
                written.append(f"{result.stdout}{result.stderr}{result.exit_code}")

    run(main)
    return written


def test_there_is_no_network_but_a_loopback() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
        dial = f"import socket\ntry: socket.create_connection(('127.0.0.1', {port}), 2)\nexcept OSError as e: print(e)"
        (answer,) = inside(dial, python=True)
        assert "Connection refused" in answer
    (devices,) = inside("tail -n +3 /proc/net/dev | cut -d: -f1")
    assert devices.split() == ["lo", "0"]


def test_abstract_sockets_of_the_host_are_out_of_reach() -> None:
    name = f"envkit-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        (answer,) = inside(f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')", python=True)
        assert "Connection refused" in answer


def test_files_of_the_host_are_not_there(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("the host's")
    answers = inside(f"cat {secret}", "ls /home /var /srv /mnt /opt /boot /sys", "cat /etc/shadow /etc/hostname")
    assert all("No such file" in answer for answer in answers)
    assert not any("the host's" in answer for answer in answers)


def test_of_the_home_nothing_is_visible_but_the_way_to_our_python() -> None:
    home = Path.home()
    (found,) = inside(f"ls -A {home} 2>/dev/null")
    names = set(found.split()[:-1])
    needed = {Path(sys.base_prefix), Path(sys.prefix), Path(__file__).parents[2]}
    assert names <= {path.relative_to(home).parts[0] for path in needed if path.is_relative_to(home)}


def test_the_sockets_of_other_boxes_are_not_there() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            one, other = [await backend.start(SLEEP) for _ in range(2)]
            await one.exec(["sh", "-c", "echo > $ENVKIT_SOCKETS/mine"], timeout_s=20)
            seen = await other.exec(["sh", "-c", "ls -A $ENVKIT_SOCKETS /run; find /tmp -name mine"], timeout_s=20)
            assert seen.stdout.split() == ["/run:", "envkit", "/run/envkit:"]

    run(main)


def test_processes_of_the_host_are_not_there() -> None:
    (found, _) = inside("cat /proc/[0-9]*/comm", "true")
    assert set(found.split()) <= {"bwrap", "sleep", "python3.11", "python", "python3", "sh", "cat", "0"}


def test_the_environment_of_ours_is_in_no_process_of_the_box() -> None:
    (found,) = inside("cat /proc/[0-9]*/environ | tr '\\0' '\\n' | cut -d= -f1 | sort -u")
    assert set(found.split()[:-1]) <= {"ENVKIT_SOCKETS", "HOME", "LANG", "PATH", "PWD", "OLDPWD", "SHLVL", "_"}


@pytest.mark.parametrize(
    "place", ["/usr", "/etc", "/", sys.base_prefix, str(Path(__file__).parents[2] / "envkit"), "/proc/sys/kernel"]
)
def test_what_is_shared_with_the_host_cannot_be_written(place: str) -> None:
    (answer,) = inside(f"echo x > {place}/envkit-test")
    assert any(refusal in answer for refusal in ("Read-only file system", "Permission denied", "nonexistent"))
    assert not Path(place, "envkit-test").exists()


@pytest.mark.parametrize("setting", ["sys/kernel/core_pattern", "sys/vm/swappiness", "self/oom_score_adj"])
def test_settings_of_the_kernel_cannot_be_changed(setting: str) -> None:
    (answer,) = inside(f"cat /proc/{setting} > /proc/{setting}")
    assert "Read-only file system" in answer or "Permission denied" in answer


def test_nobody_in_a_box_has_a_capability_or_can_gain_one() -> None:
    look = "grep -E 'Cap(Inh|Prm|Eff|Amb)|NoNewPrivs' /proc/{}/status | cut -f2 | sort -u"
    expected = f"{0:016x}\n1\n0"
    assert inside(look.format("self"), look.format(1), look.format(2)) == [expected] * 3
    (refused,) = inside("mount -t tmpfs tmpfs /tmp; mknod /tmp/disk b 8 0; chroot /tmp; echo $?")
    assert "Operation not permitted" in refused or "permission denied" in refused


def test_a_box_has_a_tmp_of_its_own_that_programs_can_use() -> None:
    assert inside("pwd; mktemp -p /tmp abc.XXX >/dev/null && echo made; df /tmp | tail -1 | cut -d' ' -f1") == [
        "/tmp\nmade\ntmpfs\n0"
    ]


def test_our_python_runs_with_what_is_importable_here() -> None:
    answer = inside("import anyio, gymnasium, envkit.types; print(envkit.types.Task('A-v0', 1).seed)", python=True)
    assert answer == ["1\n0"]


def test_a_socket_that_is_exchanged_for_a_link_does_not_lead_to_the_hosts(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            box = await backend.start(SLEEP)
            (run_folder,) = [place for root in folders.roots() for place in root.glob(f"envkit-*-{os.getpid()}-*")]
            # Seen from inside, the link leads nowhere; seen from outside, it would lead to the host's socket.
            await box.exec(["ln", "-s", f"{run_folder}/host.sock", "/run/envkit/env.sock"], timeout_s=20)
            with socket.socket(socket.AF_UNIX) as listener:
                listener.bind(f"{run_folder}/host.sock")
                listener.listen()
                with pytest.raises(Exception, match=r"env.sock is not a socket"):
                    await box.connect("env.sock")
                listener.setblocking(False)
                with pytest.raises(BlockingIOError):
                    listener.accept()

    run(main)
