"""Fifty ways in which a program leaves something behind it: processes, files, sockets, memory, mounts, groups."""

from __future__ import annotations

import shlex

from envkit.errors import EnvkitError
from envkit.protocols import Sandbox

_SLEEPS = [
    "sleep $0 &",
    "nohup sleep $0 &",
    "setsid sleep $0 &",
    "setsid nohup sleep $0 >/dev/null 2>&1 &",
    "(sleep $0 &)",
    "((sleep $0 &) &)",
    "(trap '' TERM; sleep $0) &",
    "(trap '' TERM HUP INT QUIT; setsid sleep $0) &",
    "setsid sh -c 'setsid sh -c \"setsid sleep $0\" $0 &' $0 &",
    "sh -c 'sleep $0 & exec sleep $0' $0 &",
    "sleep $0 | cat &",
    "cat | sleep $0 &",
    "sleep $0 </dev/null >/dev/null 2>&1 &",
    "sleep $0 & kill -STOP $!",
    "setsid sleep $0 & kill -STOP $!",
    "nice -n 19 sleep $0 &",
    "cd / && sleep $0 &",
    "umask 0; sleep $0 &",
    "exec 7>held; sleep $0 &",
    "while :; do sleep $0; done &",
    "(while :; do sleep 0.1; done; sleep $0) &",
    "(sleep 0.2; setsid sleep $0) &",
    "env -i sleep $0 &",
    "cp $(command -v sleep) mine; ./mine $0 & rm -f mine",
    "ulimit -c unlimited; sleep $0 &",
    "for n in 1 2 3 4 5; do setsid sleep $0 & done",
    "timeout 1000 sleep $0 &",
]
_FILES = [
    "echo x > plain",
    "mkdir -p a/b/c && echo x > a/b/c/d",
    "mkdir -m 000 shut",
    "echo x > shut-file; chmod 000 shut-file",
    "ln -s /etc/passwd link; ln -s nowhere dangling; ln -s . round",
    "echo x > one; ln one two",
    "mkfifo pipe",
    "truncate -s 1M sparse",
    "head -c 1000000 /dev/zero > full",
    "for n in $(seq 200); do echo > many-$n; done",
    "p=deep; for n in $(seq 50); do p=$p/deep; done; mkdir -p $p",
    "echo > \"$(printf 'line\\nend')\"; echo > ' '; echo > -rf",
    "echo x > /tmp/y; mkdir /tmp/z",
    "echo x > /dev/shm/y",
    "chmod 4755 plain",
    "exec 8>gone; rm gone; sleep $0 >&8 &",
]
_PYTHON = [
    "import socket; s = socket.socket(socket.AF_UNIX); s.bind('door'); s.listen()",
    "import socket; s = socket.socket(socket.AF_UNIX); s.bind('\\0door'); s.listen(); import time; time.sleep(1000)",
    "import socket; s = socket.socket(); s.bind(('127.0.0.1', 0)); s.listen(); import time; time.sleep(1000)",
    "import mmap, time; m = mmap.mmap(-1, 1 << 20); m.write(b'x' * 4096); time.sleep(1000)",
    "import os, time; os.fork() or os.fork() or time.sleep(1000); time.sleep(1000)",
    "import os, time; [os.fork() or os._exit(0) for _ in range(9)]; time.sleep(1000)",
    "import threading, time; threading.Thread(target=time.sleep, args=(1000,)).start()",
]
WAYS = [*_SLEEPS, *_FILES, *(f'PYTHON -c "{line}" &' for line in _PYTHON)]


async def leave_everything(sandbox: Sandbox, python: str, marker: str) -> None:
    """Leave things in a sandbox in every way; what sleeps, sleeps for `marker`."""
    for number, way in enumerate(WAYS):
        line = f"mkdir -p way-{number} && cd way-{number}; {way.replace('PYTHON', python)}"
        try:
            # In a shell, whose jobs live on; what a single program started ends with it.
            await sandbox.shell().run(f"sh -c {shlex.quote(line)} {marker}", timeout_s=10)
        except EnvkitError as error:
            raise AssertionError(f"{way}: {error}") from error
