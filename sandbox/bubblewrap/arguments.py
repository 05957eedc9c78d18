"""Builds the command line of bubblewrap: a sandbox's namespaces, the files that it sees, and its writable paths.

A sandbox sees either the host's system files (``/usr``, links to it and a minimal ``/etc``) or the root file system of
an image, and the files that the backend adds. All of them are read-only. The sandbox has its own ``/proc`` and
``/dev``, which are also read-only. ``/tmp``, ``/workspace``, ``/dev/shm``, the grader's home and the folders for
sockets are tmpfs mounts of limited size, so a sandbox cannot write to the host's disks.

If this process is root, bubblewrap creates no user namespace, and process 1 of the sandbox has the capabilities to
start programs as separate users. Otherwise, bubblewrap creates a user namespace with a single user, in which programs
cannot create further user namespaces.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from envkit.types import GRADER_HOME, SandboxSpec

from ..egress import allowlist
from ..host.layout import AGENT_UID, CONTROL_DIR, GRADER_UID, MAX_GRADER_HOME_MIB, SOCKETS, WORK

_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_SETPCAP")
"""Capabilities that the agent needs to start and end other users' programs and to give them files."""
_PROBE_TIMEOUT_S = 10.0
_PYTHONS = ("usr/bin/python3", "usr/local/bin/python3", "bin/python3")
_MAX_SHM_MIB = 64
_SOCKETS_MIB = 1
_CONTROL_BYTES = 1 << 16
_PARENTS_BYTES = 1 << 16
_ETC = ("ld.so.cache", "localtime", "nsswitch.conf", "protocols", "services", "ssl/openssl.cnf")
_ETC_FOLDERS = ("alternatives", "ssl/certs")
_HIDDEN_PROC = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list")
_OWN = ("dev", "proc", "run", "sys", "tmp", "workspace")
"""Top-level folders that every sandbox creates. They replace folders of an image that have the same names."""


@dataclass(frozen=True, slots=True)
class BwrapOptions:
    """Mount and namespace options of one sandbox.

    Attributes:
        etc: Host folder with the contents of the sandbox's ``/etc``; see `write_etc`.
        disk_mib: Size of ``/tmp`` and of ``/workspace``, each in MiB.
        image: Host folder that contains a root file system; None to use the host's ``/usr``.
        readable: Files and folders of the host that the sandbox sees read-only at the same path.
        views: Pairs of a host path and the path at which the sandbox sees it, read-only.
        is_online: Whether the sandbox shares the host's network.
        is_detached: Whether the sandbox outlives this process.
    """

    etc: Path
    disk_mib: int
    image: Path | None = None
    readable: Sequence[str] = ()
    views: Sequence[tuple[Path, str]] = ()
    is_online: bool = False
    is_detached: bool = False


def why_unavailable(user_namespace: int | None = None) -> str | None:
    """Test bubblewrap; return one line that says why it fails, or None if it works. Blocks for some milliseconds."""
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (apt install bubblewrap)"
    probe = [*_namespaces(BwrapOptions(Path("/"), 1)), *_host_system(), *_kernel(), "--size", "4096", "--tmpfs", "/tmp"]
    if user_namespace is not None:
        probe += ["--userns", str(user_namespace)]
    try:
        done = subprocess.run(
            [program, *probe, "--", "/bin/sh", "-c", "exit 0"],
            env={},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=_PROBE_TIMEOUT_S,
            check=False,
            pass_fds=() if user_namespace is None else (user_namespace,),
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bubblewrap does not run: {error}"
    if done.returncode == 0:
        return None
    lines = done.stderr.decode(errors="replace").split("\n")
    reason = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    return f"bubblewrap is not allowed to create namespaces on this machine ({reason})"


def why_refused(spec: SandboxSpec) -> str | None:
    """Return one line that says why bubblewrap does not support `spec`; None if it supports `spec`."""
    if spec.profile == "system":
        return "profile 'system' needs a writable root file system, which bubblewrap sandboxes lack; use docker"
    if spec.runtime is not None:
        return f"runtime {spec.runtime!r} is only supported by docker"
    if spec.image is not None and not Path(spec.image).is_dir():
        return f"image {spec.image!r} is not a folder with a root file system; make one with debootstrap, or use docker"
    if (why := allowlist.why_refused(spec)) is not None:
        return why
    if spec.untrusted and spec.network == "open":
        return "untrusted programs are refused: network 'open' is the host's network, with all its listening services"
    if spec.detached and os.geteuid() != 0:
        return "detached sandboxes need root, to protect their control socket"
    return None


def python_in(options: BwrapOptions) -> str | None:
    """Return the path of a Python interpreter in the sandbox; None if the sandbox has no Python."""
    if options.image is not None:
        return next((f"/{name}" for name in _PYTHONS if os.path.lexists(options.image / name)), None)
    ours = Path(sys.executable).resolve()
    if any(ours.is_relative_to(shown) for shown in (*options.readable, "/usr")):
        return str(ours)
    return next((f"/{name}" for name in _PYTHONS if Path("/", name).exists()), None)


def write_etc(folder: Path) -> None:
    """Write the files of the sandboxes' ``/etc`` to the host folder `folder`, which a sandbox mounts as a whole."""
    users = {"root": (0, 0), "agent": (AGENT_UID, AGENT_UID), "grader": (GRADER_UID, GRADER_UID)}
    if os.geteuid() != 0:
        users = {"agent": (os.geteuid(), os.getegid())}
    lines = [f"{name}:x:{uid}:{gid}::{WORK}:/bin/sh\n" for name, (uid, gid) in users.items()]
    for name in _ETC_FOLDERS:
        (folder / name).mkdir(parents=True)
    (folder / "passwd").write_text("".join(lines))
    (folder / "group").write_text("".join(f"{name}:x:{gid}:\n" for name, (_, gid) in users.items()))
    (folder / "hosts").write_text("127.0.0.1 localhost\n::1 localhost\n")
    (folder / "resolv.conf").touch()
    for name in _ETC:
        if Path("/etc", name).exists():
            shutil.copyfile(Path("/etc", name), folder / name)


def writable_mib(disk_mib: int) -> dict[str, int]:
    """Return the size in MiB of the file system at each path in the sandbox that programs can write to."""
    return {
        "/dev/shm": min(disk_mib, _MAX_SHM_MIB),
        "/tmp": disk_mib,
        WORK: disk_mib,
        SOCKETS: _SOCKETS_MIB,
        GRADER_HOME: min(disk_mib, MAX_GRADER_HOME_MIB),
    }


def bwrap_arguments(options: BwrapOptions) -> list[str]:
    """Return bubblewrap's options for a sandbox, without the command to run."""
    parts = [*_namespaces(options)]
    if options.image is None:
        parts += [*_host_system(), "--ro-bind", str(options.etc), "/etc"]
        parts += [part for name in _ETC_FOLDERS for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    else:
        parts += _image_system(options.image)
        for name in ("passwd", "group"):
            if (options.image / "etc" / name).is_file():
                parts += ["--ro-bind", str(options.etc / name), f"/etc/{name}"]
    if options.is_online:
        parts += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
    parts += _kernel()
    sizes = writable_mib(options.disk_mib)
    parts += [*_memory_folder("/dev/shm", sizes["/dev/shm"] << 20), "--remount-ro", "/dev"]
    parts += _memory_folder("/tmp", sizes["/tmp"] << 20)
    for path in (WORK, SOCKETS):
        # Root owns these folders until the backend changes their owners.
        parts += _memory_folder(path, sizes[path] << 20, mode="0755")
    parts += _memory_folder(GRADER_HOME, sizes[GRADER_HOME] << 20, mode="0700")
    if options.is_detached:
        parts += _memory_folder(CONTROL_DIR, _CONTROL_BYTES, mode="0700")
    # Mount the visible host files after /tmp, because they may be below /tmp. Create their parent folders explicitly,
    # because only root could enter parent folders that bubblewrap creates by itself. Those below /tmp are a read-only
    # file system, so programs cannot add modules beside the host's, and snapshots of /tmp do not contain them.
    seen = [*((Path(shown), shown) for shown in options.readable), *options.views]
    read_only = ["/"]
    for folder in _folders_above(tuple(path for _, path in seen)):
        if str(Path(folder).parent) == "/tmp":
            read_only.append(folder)
            parts += _memory_folder(folder, _PARENTS_BYTES, mode="0755")
        else:
            parts += ["--dir", folder]
    for source, path in seen:
        parts += ["--ro-bind", str(source), path]
    return [*parts, *(part for folder in read_only for part in ("--remount-ro", folder)), "--chdir", "/"]


def _namespaces(options: BwrapOptions) -> list[str]:
    parts = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if not options.is_online:
        parts.append("--unshare-net")
    if not options.is_detached:
        parts.append("--die-with-parent")
    parts += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        return [*parts, "--unshare-user", "--disable-userns"]
    return [*parts, *(part for name in _CAPABILITIES for part in ("--cap-add", name))]


@lru_cache(maxsize=32)
def _folders_above(paths: tuple[str, ...]) -> Sequence[str]:
    """Return the parent folders of `paths`, outermost first, except folders that every sandbox has."""
    folders = dict.fromkeys(parent for path in paths for parent in reversed(Path(path).parents))
    return [str(one) for one in folders if str(one) not in ("/", "/tmp") and not one.is_relative_to("/usr")]


def _host_system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        yield from _shown(Path("/", name), f"/{name}")


def _image_system(image: Path) -> Iterator[str]:
    """Yield options that mount each top-level entry of `image`, so that bubblewrap can create others beside them."""
    for entry in sorted(image.iterdir()):
        if entry.name not in _OWN:
            yield from _shown(entry, f"/{entry.name}")


def _shown(path: Path, inside: str) -> Iterator[str]:
    if path.is_symlink():
        yield from ("--symlink", str(path.readlink()), inside)
    elif path.exists():
        yield from ("--ro-bind", str(path), inside)


def _kernel() -> Iterator[str]:
    yield from ("--proc", "/proc")
    for name in _HIDDEN_PROC:
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
    # Remount /proc read-only. Otherwise root in the sandbox could change the host's settings in /proc/sys.
    yield from ("--remount-ro", "/proc", "--dev", "/dev")


def _memory_folder(path: str, size: int, *, mode: str = "1777") -> list[str]:
    """Return the options for a writable tmpfs of `size` bytes."""
    return ["--perms", mode, "--size", str(size), "--tmpfs", path]
