"""Sandboxes of bubblewrap: namespaces of their own for processes, network, messages and host name, nothing to install
in them, no daemon, and a start that costs milliseconds.

A box sees, read-only: the system (``/usr`` and what links into it, a minimal ``/etc``), our Python and what is
importable here. ``/tmp``, ``/dev`` and ``/proc`` are its own; all of the host that it can write to is a folder for
sockets, ``/run/envkit``. Its network holds nothing but a loopback. It has no capability and cannot gain one. It dies
with us, by the kernel's hand.

As root no user namespace is made, since the processes of a box are to be given users of their own; as another user one
is made, which is what allows the rest, and further ones are forbidden.

Not bounded yet: memory, number of processes, size of what is written. So hostile programs are refused.
"""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Self

from envkit.errors import SandboxStartError, UnsupportedError
from envkit.sandbox import interpreter
from envkit.sandbox.box import KEEPER, KEPT_BYTES, Box, Boxes, Entry, Place
from envkit.sandbox.child import Child
from envkit.types import SandboxSpec

SOCKETS = "/run/envkit"
"""Where a box finds its folder for sockets."""

_PROBE_TIMEOUT_S = 10.0
_ETC = (
    "alternatives",
    "ld.so.cache",
    "ld.so.conf",
    "ld.so.conf.d",
    "localtime",
    "nsswitch.conf",
    "protocols",
    "services",
)
_ENV = {"ENVKIT_SOCKETS": SOCKETS, "HOME": "/tmp", "PATH": "/usr/local/bin:/usr/bin:/bin", "LANG": "C.UTF-8"}
_NAMESPACES = {"mount": "mnt", "pid": "pid", "net": "net", "ipc": "ipc", "uts": "uts", "cgroup": "cgroup"}
"""Names of `nsenter`'s options, and of the kernel's files."""
_NS_GET_USERNS = 0xB701
"""Asks a namespace for the user namespace that rules it."""

# The line is written only when the program exists, so a box without its program never counts as started.
_LAUNCH = """
command -v "$1" >/dev/null 2>&1 || { echo "$1: there is no such program in the sandbox" >&2; exit 127; }
ulimit -c 0
echo running
exec "$@" >/dev/null
"""


def why_unavailable() -> str | None:
    """Return why there can be no bubblewrap boxes on this machine, in one line; None when there can. Blocks for ms."""
    if sys.platform != "linux":
        return "bubblewrap exists only on Linux"
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (apt install bubblewrap)"
    try:
        done = subprocess.run(
            [program, *_isolation(), *_system(), "--", "/bin/sh", "-c", "exit 0"],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").split("\n")
    said = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    return f"bubblewrap may not make namespaces on this machine ({said})"


class LocalBackend:
    """Starts bubblewrap boxes; satisfies `envkit.protocols.SandboxBackend`.

    Used as ``async with LocalBackend() as backend``; leaving the block stops what still runs. A box has
    ``ENVKIT_SOCKETS``, ``HOME``, ``PATH`` and ``LANG`` set, and what its spec names.

    Args:
        readable: Files and folders of the host that boxes see, read-only and at the same place; None takes what running
            our Python needs (`envkit.sandbox.interpreter.readable`).
    """

    def __init__(self, readable: Sequence[str] | None = None) -> None:
        self._boxes = Boxes("bwrap")
        self._readable = interpreter.readable() if readable is None else list(readable)

    def capabilities(self) -> Mapping[str, bool]:
        """Isolation and network are enforced; memory and number of processes are not."""
        return {"isolation": True, "network": True, "memory": False, "pids": False}

    async def start(self, spec: SandboxSpec) -> Box:
        """Start `spec`; see `envkit.protocols.SandboxBackend.start`. `untrusted` and `memory_mib` are refused."""
        box_id, folder = self._boxes.new_place(spec, self.capabilities())
        env = {**_ENV, **spec.env}
        program = shutil.which("bwrap")
        if program is None:
            raise SandboxStartError(box_id, "bubblewrap is not installed (apt install bubblewrap)")
        inside = _Inside()
        child = self._launch(program, spec.command, env, folder, inside)
        place = Place(
            env=env,
            work="/tmp",
            sockets=folder / "s",
            enter=inside.enter,
            end=partial(_end, inside, child),
            codes_for_signals=True,
        )
        box = Box(box_id, child, place, partial(self._stopped, inside))
        self._boxes.add(box)
        await box.started(spec.start_timeout_s)
        return box

    def _launch(
        self, program: str, command: Sequence[str], env: Mapping[str, str], folder: Path, inside: _Inside
    ) -> Child:
        """Start bubblewrap and give `inside` the pipe on which it says what its process 1 is."""
        passwd, group = folder / "passwd", folder / "group"
        passwd.write_text(f"user:x:{os.geteuid()}:{os.getegid()}::/tmp:/bin/sh\n")
        group.write_text(f"user:x:{os.getegid()}:\n")
        binds = [part for path in self._readable for part in ("--ro-bind", path, path)]
        settings = [part for name, value in env.items() for part in ("--setenv", name, value)]
        options = [
            *_isolation(),
            *_system(),
            *("--ro-bind", str(passwd), "/etc/passwd", "--ro-bind", str(group), "/etc/group"),
            *binds,
            *("--bind", str(folder / "s"), SOCKETS),
            *("--remount-ro", "/", "--chdir", "/tmp", "--clearenv"),
            *settings,
        ]
        # Arguments can be read by everybody on the machine and, of process 1, in the box; a file of our own cannot.
        arguments = os.memfd_create("envkit-box")
        told, tells = os.pipe()
        try:
            os.write(arguments, b"\0".join(os.fsencode(option) for option in options))
            os.lseek(arguments, 0, os.SEEK_SET)
            argv = [program, "--args", str(arguments), "--info-fd", str(tells)]
            argv += ["--", "/bin/sh", "-c", _LAUNCH, "sh", *command]
            # Bubblewrap's own process 1 keeps the environment that it was started with, readable inside.
            child = Child(argv, env={}, keep_bytes=KEPT_BYTES, pass_fds=(arguments, tells))
        except BaseException:
            os.close(told)
            raise
        finally:
            os.close(arguments)
            os.close(tells)
        inside.told = told
        return child

    def _stopped(self, inside: _Inside, box: Box) -> None:
        inside.close()
        self._boxes.discard(box)

    async def __aenter__(self) -> Self:
        await self._boxes.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._boxes.close()


class _Inside:
    """A hold on process 1 of a box, by descriptors, since its number may come to mean another process.

    Attributes:
        told: Pipe on which bubblewrap says the number; None before the start and after `close`.
    """

    def __init__(self) -> None:
        self.told: int | None = None
        self._pidfd: int | None = None
        self._folder: int | None = None

    def kill(self) -> bool:
        """Kill process 1, and with it everything in the box; return whether that was possible."""
        if not self._found() or self._pidfd is None:
            return False
        with suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
        return True

    @contextmanager
    def enter(self) -> Iterator[Entry]:
        """Give what runs a keeper in the box's namespaces, without capabilities.

        Raises:
            UnsupportedError: A program for that is missing.
            ProcessLookupError: The box has just ended.
        """
        nsenter = shutil.which("nsenter")
        if nsenter is None or shutil.which("setpriv", path=_ENV["PATH"]) is None:
            raise UnsupportedError("running a command in a box needs nsenter and setpriv (apt install util-linux)")
        if not self._found() or self._folder is None:
            raise UnsupportedError("bubblewrap did not say which process is the box's first")
        handles: list[int] = []
        try:
            argv = self._entering(nsenter, handles)
            yield Entry(argv, tuple(handles))
        finally:
            for handle in handles:
                os.close(handle)

    def _entering(self, nsenter: str, handles: list[int]) -> tuple[str, ...]:
        """Return what runs a keeper inside; the descriptors that it needs are added to `handles`."""

        def named(descriptor: int) -> str:
            handles.append(descriptor)
            return f"/proc/self/fd/{descriptor}"

        def opened(name: str) -> int:
            # By way of the process's folder: if that process is gone, this fails, whoever has its number now.
            try:
                return os.open(f"ns/{name}", os.O_RDONLY | os.O_CLOEXEC, dir_fd=self._folder)
            except FileNotFoundError:
                raise ProcessLookupError from None

        argv = [nsenter, *(f"--{option}={named(opened(name))}" for option, name in _NAMESPACES.items())]
        drop = ["setpriv", "--no-new-privs", "--bounding-set=-all", "--inh-caps=-all", "--"]
        if os.geteuid() != 0:
            # The user namespace that rules the others must be entered with them, and left for the box's own, in which
            # nobody has a capability after an exec.
            argv += ["--preserve-credentials", f"--user={named(fcntl.ioctl(handles[0], _NS_GET_USERNS))}"]
            drop = ["nsenter", "--preserve-credentials", f"--user={named(opened('user'))}", "--", *drop[:2], "--"]
        return (*argv, "--", *drop, *KEEPER)

    def close(self) -> None:
        """Let go; safe to repeat."""
        for handle in (self.told, self._pidfd, self._folder):
            if handle is not None:
                os.close(handle)
        self.told = self._pidfd = self._folder = None

    def _found(self) -> bool:
        """Read what bubblewrap said, once it has; it says it right after making the process."""
        if self._pidfd is None and self.told is not None:
            os.set_blocking(self.told, False)
            with suppress(BlockingIOError, ValueError, KeyError, OSError):
                pid = json.loads(os.read(self.told, 4096))["child-pid"]
                self._pidfd = os.pidfd_open(pid)
                self._folder = os.open(f"/proc/{pid}", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        return self._pidfd is not None


def _end(inside: _Inside, child: Child) -> None:
    """Kill from within, so that bubblewrap, which waits for its process 1, ends after everybody in the box has."""
    if not inside.kill():
        child.kill()


def _isolation() -> list[str]:
    spaces = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.geteuid() != 0:
        spaces += ["--unshare-user", "--disable-userns"]
    return [*spaces, "--hostname", "sandbox", "--die-with-parent", "--new-session", "--cap-drop", "ALL"]


def _system() -> list[str]:
    """The read-only system, and the box's own /proc, /dev and /tmp; further binds may follow, also below /tmp."""
    options = ["--ro-bind", "/usr", "/usr"]
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        path = Path("/", name)
        if path.is_symlink():
            options += ["--symlink", str(path.readlink()), str(path)]
        elif path.is_dir():
            options += ["--ro-bind", str(path), str(path)]
    for name in _ETC:
        options += ["--ro-bind-try", f"/etc/{name}", f"/etc/{name}"]
    # As root, /proc/sys would be writable and is the host's; nobody in a box needs to write below /proc.
    options += ["--proc", "/proc", "--remount-ro", "/proc", "--dev", "/dev"]
    return [*options, "--perms", "1777", "--tmpfs", "/tmp"]
