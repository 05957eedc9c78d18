"""What a bubblewrap sandbox cannot see, reach or change."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import anyio
import pytest

from envkit.errors import SandboxRefusedError, SandboxStartError
from envkit.sandbox.bubblewrap import detached
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.types import SandboxSpec
from tests.contract.kinds import new_marker, run

pytestmark = pytest.mark.bwrap

SLEEP = SandboxSpec(("sleep", "1000"))


def inside(*commands: str, python: bool = False) -> list[str]:
    """Run each command in one sandbox and return what it wrote, followed by its exit code."""
    written = []

    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SLEEP)
            for command in commands:
                argv = [sys.executable, "-c", command] if python else ["sh", "-c", command]
                result = await sandbox.exec(argv, timeout_s=20)
                written.append(f"{result.stdout}{result.stderr}{result.exit_code}")

    run(main)
    return written


def test_abstract_sockets_of_the_host_are_out_of_reach() -> None:
    name = f"envkit-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        (answer,) = inside(f"import socket; socket.socket(socket.AF_UNIX).connect('\\0{name}')", python=True)
        assert "Connection refused" in answer


def test_the_sockets_of_other_sandboxes_are_not_there() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            one, other = [await backend.start(SLEEP) for _ in range(2)]
            await one.exec(["sh", "-c", "echo > $ENVKIT_SOCKETS/mine"], timeout_s=20)
            seen = await other.exec(["sh", "-c", "ls -A $ENVKIT_SOCKETS /run; find /tmp -name mine"], timeout_s=20)
            assert seen.stdout.split() == ["/run:", "envkit", "envkit-grader", "/run/envkit:"]

    run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="without root there is one user")
def test_the_work_folder_is_the_agents_so_that_git_trusts_it() -> None:
    assert inside("stat -c '%U %a' /workspace /run/envkit; id -un") == ["agent 755\nagent 755\nagent\n0"]


@pytest.mark.parametrize(
    ("spec", "reason"),
    [
        (SandboxSpec(profile="system"), "use docker"),
        (SandboxSpec(image="debian:bookworm"), "not a folder with a root file system"),
        (SandboxSpec(runtime="runsc"), "runtime 'runsc' is only supported by docker"),
        (SandboxSpec(network="open", untrusted=True), "the host's network"),
    ],
)
def test_what_bubblewrap_cannot_do_is_refused(spec: SandboxSpec, reason: str) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            if spec.untrusted and not all(backend.capabilities().values()):
                pytest.skip("untrusted programs are refused anyway: not everything is enforced here")
            with pytest.raises(SandboxRefusedError, match=reason):
                await backend.start(spec)

    run(main)


def test_an_open_network_is_the_hosts_and_is_listed_as_unenforced() -> None:
    async def main() -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            dial = (
                f"import socket; socket.create_connection(('127.0.0.1', {listener.getsockname()[1]}), 2); print('in')"
            )
            async with LocalBackend() as backend:
                sandbox = await backend.start(SandboxSpec(network="open"))
                closed = await backend.start(SandboxSpec())
                assert sandbox.unenforced == ("network", *closed.unenforced)
                assert (await sandbox.exec([sys.executable, "-c", dial], timeout_s=20)).stdout == "in\n"

    run(main)


def test_an_image_is_a_folder_whose_files_the_sandbox_sees_read_only(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(image=str(image(tmp_path))))
            look = "cat /etc/motd; ls /; id -un; echo x > /etc/motd"
            result = await sandbox.exec(["sh", "-c", look], timeout_s=20)
            assert "Read-only file system" in result.stderr
            first, *places, user = result.stdout.splitlines()
            assert (first, user) == ("from the image", "agent" if os.geteuid() == 0 else user)
            own = {"dev", "proc", "run", "sys", "tmp", "workspace"}
            assert set(places) - own == {"bin", "etc", "lib", "lib64", "opt", "usr"}
            assert (await sandbox.exec(["cat", "/opt/tool"], timeout_s=20)).stdout == "1\n"

    run(main)


def test_an_image_without_python_is_refused(tmp_path: Path) -> None:
    async def main() -> None:
        (tmp_path / "etc").mkdir()
        async with LocalBackend() as backend:
            with pytest.raises(SandboxStartError, match="no Python 3"):
                await backend.start(SandboxSpec(image=str(tmp_path)))

    run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can guard the door")
def test_an_unresponsive_detached_sandbox_is_kept_until_it_is_removed() -> None:
    async def main() -> None:
        async with LocalBackend() as backend:
            sandbox = await backend.start(SandboxSpec(detached=True, ttl_s=60))
        stay = detached.find(sandbox.id)
        assert stay is not None
        os.kill(stay.first_pid, signal.SIGSTOP)
        async with LocalBackend() as other:
            with anyio.move_on_after(0.2) as limit:
                await other.attach(sandbox.id)
            assert limit.cancelled_caught
            assert detached.ids().count(sandbox.id) == 1
            os.kill(stay.first_pid, signal.SIGCONT)
            assert (await (await other.attach(sandbox.id)).exec(["true"], timeout_s=20)).exit_code == 0
            os.kill(stay.first_pid, signal.SIGSTOP)
            await other.remove(sandbox.id)
        assert detached.ids().count(sandbox.id) == 0

    run(main)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can guard the door")
def test_a_detached_sandbox_is_found_by_processes_with_other_run_directories(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    starts = (
        "from envkit import clock; from envkit.sandbox.bubblewrap.backend import *; from envkit.types import *\n"
        "async def main():\n"
        " async with LocalBackend() as backend: print((await backend.start(SandboxSpec(detached=True, ttl_s=60))).id)\n"
        "clock.run(main)"
    )

    async def main(runtime_folder: str) -> None:
        own = {**os.environ, "XDG_RUNTIME_DIR": runtime_folder}
        done = await anyio.run_process([sys.executable, "-c", starts], env=own)
        sandbox_id = done.stdout.decode().strip()
        async with LocalBackend() as backend:
            sandbox = await backend.attach(sandbox_id)
            assert (await sandbox.exec(["true"], timeout_s=20)).exit_code == 0
            await sandbox.stop()

    monkeypatch.delenv("XDG_RUNTIME_DIR", raising=False)
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        run(partial(main, folder))


def test_of_the_host_only_what_is_named_readable_is_shown(tmp_path: Path) -> None:
    async def main() -> None:
        async with LocalBackend(readable=[str(tmp_path)]) as backend:
            sandbox = await backend.start(SandboxSpec())
            assert (await sandbox.exec(["ls", str(tmp_path.parent)], timeout_s=20)).stdout.split() == [tmp_path.name]

    run(main)


def image(folder: Path) -> Path:
    """Make a root file system of a few programs of this machine."""
    if not Path("/usr/bin/python3").exists() or not Path("/bin").is_symlink():
        pytest.skip("this machine's own Python, or a merged /usr, is missing")
    for name in ("bin", "lib", "lib64"):
        if Path("/", name).is_symlink():
            (folder / name).symlink_to(Path("/", name).readlink())
    library = Path("usr/lib", Path("/usr/bin/python3").resolve().name)
    programs = [f"/usr/bin/{name}" for name in ("python3", "sh", "cat", "ls", "id")]
    programs += map(str, Path("/", library, "lib-dynload").glob("_ctypes.*"))  # which needs libffi
    linked = subprocess.run(["ldd", *programs], capture_output=True, text=True, check=True).stdout
    named = {*programs, *(word for word in linked.replace(":", " ").split() if word.startswith("/"))}
    for file in map(Path, named):
        target = folder / str(file.parent.resolve()).lstrip("/") / file.name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(file, target)
    unneeded = shutil.ignore_patterns("test", "*-packages", "*.pyc")
    shutil.copytree(Path("/", library), folder / library, ignore=unneeded, dirs_exist_ok=True)
    files = {"etc/motd": "from the image\n", "opt/tool": "1\n", "etc/passwd": "root:x:0:0::/:/bin/sh\n"}
    for place, content in files.items():
        (folder / place).parent.mkdir(exist_ok=True)
        (folder / place).write_text(content)
    return folder


@pytest.fixture
def small_disk() -> Iterator[Path]:
    """A separate disk for the folders of sandboxes, with little more than the required free space."""
    folder = Path(f"/tmp/ek-{new_marker()[:6]}")
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=640m", "none", str(folder)], check=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
        folder.rmdir()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount a disk")
def test_a_start_is_rejected_while_the_disk_of_the_host_is_nearly_full(
    small_disk: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(small_disk))

    async def main() -> None:
        async with LocalBackend() as backend:
            before = await backend.start(SandboxSpec())
            with (small_disk / "ballast").open("wb") as ballast:
                os.posix_fallocate(ballast.fileno(), 0, 200 << 20)
            with pytest.raises(SandboxStartError, match=r"only \d+ MiB would be free \(minimum 512\)"):
                await backend.start(SandboxSpec())
            assert (await before.exec(["echo", "on"], timeout_s=10)).stdout == "on\n"
            (small_disk / "ballast").unlink()
            await backend.start(SandboxSpec())

    run(main, 40)
