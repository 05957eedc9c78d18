"""Fill sandboxes with memory that no process owns, and check that a grader still runs within a second.

    python benchmarks/evidence/memory_without_owner.py

Such memory remains when the processes that allocated it have ended: System V shared memory, unread data in sockets, and
empty files. A hostile agent allocates as much as the kernel permits. Then a grader that needs 25 MiB is timed. It must
end within a second in at least 10 of the 12 combinations of backend, kind of memory and memory limit. If a sandbox is
lost instead, its cause must be that it ran out of memory. The sandboxes run one after another.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from functools import partial
from typing import Any

import anyio
import msgspec
from record import Evidence, parser

from envkit import clock
from envkit.errors import SandboxLostError
from envkit.sandbox.agent_client.sandbox import AgentSandbox
from envkit.sandbox.bubblewrap.backend import LocalBackend
from envkit.sandbox.docker.backend import DockerBackend
from envkit.sandbox.docker.images import OFFLINE_BASE
from envkit.types import CauseKind, SandboxSpec

NAME = "memory-without-owner"
STALE_AFTER = ("sandbox",)
TWIN = "tests/contract/limits/test_memory.py::test_a_grader_runs_in_a_sandbox_full_of_memory_that_no_process_owns"
SIZES_MIB = (512, 1024)
SHORT_MIB = 128
MOST_S = 1.0
FILL_S = 40.0
LOOK_S = 0.1
STEADY_LOOKS = 10
LEAST_HELD = 10
OUT_OF_MEMORY = "out of memory"

HOGS = {
    "System V memory": """
import ctypes, os
libc = ctypes.CDLL(None)
libc.shmat.restype = ctypes.c_void_p
for size, count in ((8 << 20, 160), (1 << 20, 16), (1 << 16, 32), (1 << 12, 64)):  # 1,298 MiB
    for _ in range(count):
        if os.fork() == 0:
            ctypes.memset(libc.shmat(libc.shmget(0, size, 0o1600), None, 0), 1, size)
            os._exit(0)
        os.wait()
""",
    "socket buffers": """
import os, signal, socket
for count in range(20):
    if os.fork() == 0:
        kept = []
        try:
            for count in range(350):  # about 200 KiB each
                kept += socket.socketpair()
                kept[-1].setblocking(False)
                try:
                    while True:
                        kept[-1].send(bytes(65536))
                except BlockingIOError:
                    pass
        except OSError:
            pass
        open("/run/envkit/%d" % os.getpid(), "w").close()
        signal.pause()
signal.pause()
""",
    "empty files": """
for place in ("/workspace", "/tmp", "/dev/shm"):
    try:
        for count in range(1_500_000):
            open("%s/%d-%s" % (place, count, "x" * 240), "w").close()
    except OSError:
        pass
""",
}
"""Programs that the hostile agent runs, by the kind of memory they allocate. Each stops after a fixed amount."""

GRADER = ["python3", "-c", "bytearray(16 << 20)"]
"""The grader, a small program that needs about 25 MiB."""

Figures = dict[str, Any]


async def attacked(backend: LocalBackend | DockerBackend, image: str | None, hog: str, memory_mib: int) -> Figures:
    """Run the program `hog` as the agent of a new sandbox, then a grader; return what happened to both."""
    sandbox = await backend.start(SandboxSpec(image=image, untrusted=True, memory_mib=memory_mib))
    assert isinstance(sandbox, AgentSandbox)
    found: Figures = {"cause": None, "grader_exit_code": None, "grader_s": None, "agent_after": None}
    began = clock.stopwatch()
    try:
        await sandbox.write("hog.py", HOGS[hog].encode())
        await sandbox.shell().run("for try in 1 2 3; do python3 hog.py; done &", timeout_s=20)
        found["filled_mib"] = await _most_mib(sandbox)
        found["fill_s"] = round(clock.stopwatch() - began, 2)
        began = clock.stopwatch()
        graded = await sandbox.exec(GRADER, user="grader", timeout_s=20)
        found |= {"grader_exit_code": graded.exit_code, "grader_s": round(clock.stopwatch() - began, 3)}
        after = await sandbox.exec(["true"], timeout_s=20)
        found["agent_after"] = OUT_OF_MEMORY if after.is_out_of_memory else f"exit code {after.exit_code}"
    except SandboxLostError as error:
        found |= {"cause": msgspec.to_builtins(error.cause), "lost_after_s": round(clock.stopwatch() - began, 3)}
    finally:
        await sandbox.stop()
    return found


async def _most_mib(sandbox: AgentSandbox) -> int:
    """Wait until the memory in use by the sandbox stops growing, and return its maximum in MiB."""
    most, quiet = 0, 0
    with anyio.move_on_after(FILL_S):
        while quiet < STEADY_LOOKS:
            now = int(str((await sandbox.stats())["memory_bytes"])) >> 20
            quiet = 0 if now > most else quiet + 1
            most = max(most, now)
            await anyio.sleep(LOOK_S)
    return most


def measured(kind: str, image: str, hog: str, memory_mib: int) -> Figures:
    """Return the figures of one combination, measured in a new backend."""

    async def main() -> Figures:
        async with LocalBackend() if kind == "local" else DockerBackend() as backend:
            return await attacked(backend, None if kind == "local" else image, hog, memory_mib)

    return clock.run(main)


def main() -> int:
    """Measure, and return the exit code: 1 if too few graders ended in time, or a cause is wrong."""
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--kind", choices=("local", "docker"), action="append", help="only this backend; repeatable")
    arguments.add_argument("--image", default=OFFLINE_BASE, help="image of the containers")
    arguments.add_argument("--within-s", type=float, default=MOST_S, help="maximum seconds that a grader may take")
    arguments.add_argument("--short", action="store_true", help=f"only a memory limit of {SHORT_MIB} MiB")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    found: dict[str, Mapping[str, Any]] = {}
    for kind in asked.kind or ("local", "docker"):
        for hog in HOGS:
            for memory_mib in (SHORT_MIB,) if asked.short else SIZES_MIB:
                name = f"{kind}, {hog}, {memory_mib} MiB"
                found[name] = evidence.part(name, partial(measured, kind, asked.image, hog, memory_mib))
                print(name, json.dumps(found[name]), flush=True)
    graded = [figures["grader_s"] for figures in found.values() if figures["grader_exit_code"] == 0]
    ran = sum(seconds <= asked.within_s for seconds in graded)
    causes = [figures["cause"] for figures in found.values() if figures["cause"] is not None]
    print(f"the grader ran within {asked.within_s:g} s in {ran} of {len(found)}; sandboxes lost: {causes or 'none'}")
    are_out_of_memory = all(cause["kind"] == CauseKind.OUT_OF_MEMORY.value for cause in causes)
    return 0 if ran >= len(found) * LEAST_HELD / 12 and are_out_of_memory else 1


if __name__ == "__main__":
    sys.exit(main())
