"""One promise for every kind of sandbox: whatever its programs leave behind is gone once it was stopped."""

from __future__ import annotations

import shlex

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox
from tests.contract.kinds import Kind, groups_of, run, sleepers, traces

SLEEPS = [
    "sleep $0 &",
    "setsid sleep $0 &",
    "(sleep $0 &)",
    "(trap '' TERM HUP INT QUIT; setsid sleep $0) &",
    "setsid sh -c 'setsid sh -c \"setsid sleep $0\" $0 &' $0 &",
    "sh -c 'sleep $0 & exec sleep $0' $0 &",
    "cat | sleep $0 &",
    "setsid sleep $0 & kill -STOP $!",
    "exec 7>held; sleep $0 &",
    "while :; do sleep $0; done &",
    "(while :; do sleep 0.1; done; sleep $0) &",
    "cp $(command -v sleep) mine; ./mine $0 & rm -f mine",
    "for n in 1 2 3 4 5; do setsid sleep $0 & done",
]
FILES = [
    "mkdir -m 000 shut",
    "echo x > shut-file; chmod 000 shut-file",
    "mkfifo pipe",
    "head -c 1000000 /dev/zero > full",
    "for n in $(seq 200); do echo > many-$n; done",
    "echo x > /tmp/y; mkdir /tmp/z",
    "echo x > /dev/shm/y",
    "touch plain; chmod 4755 plain",
    "exec 8>gone; rm gone; sleep $0 >&8 &",
]
PYTHON_LINES = [
    "import socket; s = socket.socket(socket.AF_UNIX); s.bind('door'); s.listen()",
    "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0door'); s.listen(); import time; time.sleep(1000)",
    "import mmap, time; m = mmap.mmap(-1, 1 << 20); m.write(b'x' * 4096); time.sleep(1000)",
    "import os, time; [os.fork() or os._exit(0) for _ in range(9)]; time.sleep(1000)",
]
WAYS = [*SLEEPS, *FILES, *(f'PYTHON -c "{line}" &' for line in PYTHON_LINES)]


async def leave_everything(sandbox: Sandbox, python: str, marker: str) -> None:
    """Leave things in a sandbox in every way; what sleeps, sleeps for `marker`."""
    for number, way in enumerate(WAYS):
        line = f"mkdir -p way-{number} && cd way-{number}; {way.replace('PYTHON', python)}"
        try:
            # In a shell, whose jobs live on; what a single program started ends with it.
            await sandbox.shell().run(f"sh -c {shlex.quote(line)} {marker}", timeout_s=10)
        except EnvkitError as error:
            raise AssertionError(f"{way}: {error}") from error


def test_nothing_that_programs_leave_in_some_way_is_left_of_a_stopped_sandbox(kind: Kind, marker: str) -> None:
    async def main() -> None:
        async with kind.backend() as backend:
            empty = traces()
            sandbox = await backend.start(kind.spec())
            await leave_everything(sandbox, kind.python, marker)
            found = sleepers(marker)
            assert len(found) >= 12
            groups = {group for pid in found for group in groups_of(pid)}
            await sandbox.stop()
            assert sleepers(marker) == []
            assert [group for group in groups if group.exists()] == []
            assert traces() == empty

    run(main)
