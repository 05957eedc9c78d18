"""One promise for every kind of sandbox that filters system calls: which are refused, to whom, and what works."""

from __future__ import annotations

import json
import platform
import shlex

import pytest

from envkit.sandbox.host import seccomp
from envkit.types import SandboxUser
from tests.contract.kinds import ISOLATING, Kind, run
from tests.contract.shared import AnySandbox, Shared, sh

# Makes each given call with zeros, opens sockets of each given family, and prints the errors as JSON.
TRIES = """
import ctypes, json, os, socket, sys
call = ctypes.CDLL(None, use_errno=True).syscall

def tried(number, *arguments):
    ctypes.set_errno(0)
    failed = call(ctypes.c_long(number), *[ctypes.c_long(value) for value in (*arguments, *[0] * 6)[:6]]) == -1
    return ctypes.get_errno() if failed else 0

def tried_socket(family):
    try:
        socket.socket(family, socket.SOCK_STREAM).close()
    except OSError as error:
        return error.errno
    return 0

numbers, families, into_a_user_namespace = json.loads(sys.argv[1])
found = {name: tried(number) for name, number in numbers.items()}
found.update((f"family {family}", tried_socket(family)) for family in families)
found["new user"] = tried(into_a_user_namespace, 0x10000011)
print(json.dumps(found), flush=True)
"""
# In a child, since it may be killed for it: getpid by the second interface of x86_64.
OTHER_INTERFACE = """
import ctypes, os
child = os.fork()
if not child:
    os._exit(0 if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(0x40000000 | 39)) == -1 else 99)
print(os.WEXITSTATUS(os.waitpid(child, 0)[1]))
"""
WORKS = """
import fcntl, mmap, multiprocessing, os, socket, subprocess, tempfile, threading

assert os.read(os.memfd_create("x"), 1) == b""
with multiprocessing.get_context("fork").Pool(2) as pool:
    assert pool.map(abs, [-1, -2, 3]) == [1, 2, 3]
queue = multiprocessing.Queue()
queue.put("reported")
assert queue.get(timeout=10) == "reported"
seen = []
threads = [threading.Thread(target=seen.append, args=(number,)) for number in range(20)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(seen) == list(range(20))
assert subprocess.run(["sh", "-c", "echo a | tr a b"], capture_output=True, check=True).stdout == b"b\\n"
for family in (socket.AF_UNIX, socket.AF_INET, socket.AF_INET6):
    socket.socket(family, socket.SOCK_STREAM).close()
socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0).close()
with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as stream:
    stream.sendall(b"hello")
    assert server.accept()[0].recv(5) == b"hello"
with tempfile.TemporaryDirectory() as folder:  # as git does
    os.chdir(folder)
    with open("config.lock", "xb") as file:
        file.truncate(4096)
        fcntl.flock(file, fcntl.LOCK_EX)
        os.fsync(file.fileno())
    with open("config.lock", "r+b") as file, mmap.mmap(file.fileno(), 4096) as view:
        view[:3] = b"abc"
    os.chmod("config.lock", 0o400)
    os.link("config.lock", "object")
    os.rename("config.lock", "config")
    os.symlink("config", "HEAD")
    os.utime("config", (1, 1))
    assert os.stat("HEAD").st_mtime == 1
    os.mkfifo("fifo")
print("all of it")
"""
ALLOWED_FAMILIES = {1, 2, 10, 16}
CLONE = {"x86_64": 56, "aarch64": 220}

pytestmark = ISOLATING


def orders() -> str:
    machine = platform.machine()
    calls = {**seccomp.denied(machine), "clone3": 435, "newer than the filter": 600}
    return json.dumps([calls, list(range(1, 46)), CLONE[machine]])


def require_refused(reported: str) -> None:
    """Check what `TRIES` wrote."""
    found = json.loads(reported)
    allowed = {name for name, number in found.items() if number not in (1, 38, 97)}  # EPERM, ENOSYS, EAFNOSUPPORT
    assert allowed <= {f"family {family}" for family in ALLOWED_FAMILIES}
    assert {found[name] for name in ("io_uring_setup", "keyctl", "ptrace", "userfaultfd", "new user")} == {1}
    assert found["clone3"] == found["newer than the filter"] == 38
    assert found["family 2"] == 0
    assert found["family 40"] in (1, 97)


@pytest.mark.parametrize("user", ["agent", "root"])
def test_what_reaches_past_the_sandbox_is_refused_to_programs_and_shells(
    kind: Kind, shared: Shared, user: SandboxUser
) -> None:
    shared.require("seccomp")
    if user == "root":
        shared.require("uid")

    async def main(sandbox: AnySandbox) -> None:
        done = await sandbox.exec([kind.python, "-c", TRIES, orders()], timeout_s=30, user=user)
        assert done.exit_code == 0, done.stderr
        require_refused(done.stdout)
        await sandbox.write("/tmp/tries.py", TRIES.encode())
        script = f"{shlex.quote(kind.python)} /tmp/tries.py '{orders()}'"
        done = await sandbox.shell(user=user).run(script, timeout_s=30)
        assert done.exit_code == 0, done.stderr
        require_refused(done.stdout)

    shared.run(main)


def test_what_reaches_past_the_sandbox_is_refused_to_its_command(kind: Kind) -> None:
    kind.require("seccomp")
    script = '"$0" -c "$1" "$2" > reported; mv reported reported-all; sleep 1000'

    async def main() -> None:
        async with kind.sandbox("sh", "-c", script, kind.python, TRIES, orders()) as sandbox:
            require_refused(await sh(sandbox, "until cat reported-all 2>/dev/null; do sleep 0.01; done"))

    run(main)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="only x86_64 has a second interface")
def test_the_second_interface_of_the_kernel_is_closed(kind: Kind, shared: Shared) -> None:
    shared.require("seccomp")

    async def main(sandbox: AnySandbox) -> None:
        done = await sandbox.exec([kind.python, "-c", OTHER_INTERFACE], timeout_s=30)
        assert (done.exit_code, done.stdout) == (0, "0\n"), done.stderr

    shared.run(main)


def test_threads_processes_sockets_and_work_with_files_go_on_as_ever(kind: Kind, shared: Shared) -> None:
    shared.require("seccomp")

    async def main(sandbox: AnySandbox) -> None:
        done = await sandbox.exec([kind.python, "-W", "ignore", "-c", WORKS], timeout_s=60)
        assert (done.exit_code, done.stdout, done.stderr) == (0, "all of it\n", "")
        done = await sandbox.shell().run("cat <(echo a) | tee >(cat >&2); coproc cat; echo $((1 + 1))", timeout_s=20)
        assert done.stdout.split() == ["a", "2"]

    shared.run(main)
