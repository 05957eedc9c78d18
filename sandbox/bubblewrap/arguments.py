"""What bubblewrap is told about a box: its namespaces, the files that it sees, and the few places it can write to.

A box sees, read-only, the system (``/usr`` and what links into it, a minimal ``/etc``) or the root file system of an
image, and what its backend shows it. Its own are ``/proc`` and ``/dev``, which are read-only, and ``/tmp``,
``/workspace``, ``/dev/shm``, a grader's folder and those for sockets: each in memory and of bounded size, so that
nothing that a box writes is on a disk of the host.

As root no user namespace is made, since the programs of a box are to have users of their own; the first process keeps
what it needs to become them. As another user one is made, which is what allows the rest, with one user in it and no
further ones.
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
from ..host.layout import AGENT_UID, DOOR, GRADER_UID, SOCKETS, WORK

_CAPABILITIES = ("CAP_SETUID", "CAP_SETGID", "CAP_KILL", "CAP_CHOWN", "CAP_SETPCAP")
"""What the agent needs to start programs as other users, end them and give them files; the last to leave them none."""
_PROBE_TIMEOUT_S = 10.0
_PYTHONS = ("usr/bin/python3", "usr/local/bin/python3", "bin/python3")
_LARGEST_SHM_MIB = 64
_LARGEST_GRADER_HOME_MIB = 64
_SOCKETS_MIB = 1
_DOOR_BYTES = 1 << 16
_ETC = ("ld.so.cache", "localtime", "nsswitch.conf", "protocols", "services", "ssl/openssl.cnf")
_ETC_FOLDERS = ("alternatives", "ssl/certs")
_TELLS_OF_THE_HOST = ("kcore", "keys", "latency_stats", "sched_debug", "timer_list")
_OWN = ("dev", "proc", "run", "sys", "tmp", "workspace")
"""What a box has of its own, whatever the image holds there."""


@dataclass(frozen=True, slots=True)
class BwrapOptions:
    """One box, as bubblewrap is to make it.

    Attributes:
        etc: Folder of the host that `write_etc` filled.
        disk_mib: Size of ``/tmp`` and of ``/workspace``, MiB.
        image: Folder with a root file system; None shows the host's ``/usr``.
        readable: Files and folders of the host that are seen, read-only, at the same place.
        views: Further folders of the host and where they are seen, read-only.
        is_online: Whether it is in the host's network.
        stays: Whether it outlives us.
    """

    etc: Path
    disk_mib: int
    image: Path | None = None
    readable: Sequence[str] = ()
    views: Sequence[tuple[Path, str]] = ()
    is_online: bool = False
    stays: bool = False


def why_unavailable(user_namespace: int | None = None) -> str | None:
    """Return why there can be no bubblewrap boxes on this machine, in one line; None when there can. Blocks for ms.

    Args:
        user_namespace: File descriptor of the user namespace that they would be in; None for what `options` chooses.
    """
    if sys.platform != "linux":
        return "bubblewrap exists only on Linux"
    program = shutil.which("bwrap")
    if program is None:
        return "bubblewrap is not installed (apt install bubblewrap)"
    look = [*_namespaces(BwrapOptions(Path("/"), 1)), *_host_system(), *_kernel(), "--size", "4096", "--tmpfs", "/tmp"]
    if user_namespace is not None:
        look += ["--userns", str(user_namespace)]
    try:
        done = subprocess.run(
            [program, *look, "--", "/bin/sh", "-c", "exit 0"],
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
    said = next((line.strip() for line in reversed(lines) if line.strip()), f"exit code {done.returncode}")
    return f"bubblewrap may not make namespaces on this machine ({said})"


def why_refused(spec: SandboxSpec) -> str | None:
    """Return why `spec` cannot be had of bubblewrap, in one line; None where it can."""
    if spec.profile == "system":
        return "bubblewrap boxes have no writable root file system (profile: system); use docker"
    if spec.runtime is not None:
        return f"runtime {spec.runtime!r} is for docker"
    if spec.image is not None and not Path(spec.image).is_dir():
        return f"image {spec.image!r} is not a folder with a root file system, as debootstrap makes; or use docker"
    if (why := allowlist.why_refused(spec)) is not None:
        return why
    if spec.untrusted and spec.network == "open":
        return "untrusted programs are refused: network 'open' is the host's own, with all that listens in it"
    if spec.detached and os.geteuid() != 0:
        return "only root can keep others from the door of a box that stays"
    return None


def python_in(look: BwrapOptions) -> str | None:
    """Return a Python that a box sees; None if it sees none."""
    if look.image is not None:
        return next((f"/{name}" for name in _PYTHONS if os.path.lexists(look.image / name)), None)
    ours = Path(sys.executable).resolve()
    if any(ours.is_relative_to(shown) for shown in (*look.readable, "/usr")):
        return str(ours)
    return next((f"/{name}" for name in _PYTHONS if Path("/", name).exists()), None)


def write_etc(folder: Path) -> None:
    """Write into `folder` what boxes see in /etc: one folder to mount instead of a dozen files."""
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


def places_mib(disk_mib: int) -> dict[str, int]:
    """Return the places that programs can write to, and their sizes in MiB."""
    return {
        "/dev/shm": min(disk_mib, _LARGEST_SHM_MIB),
        "/tmp": disk_mib,
        WORK: disk_mib,
        SOCKETS: _SOCKETS_MIB,
        GRADER_HOME: min(disk_mib, _LARGEST_GRADER_HOME_MIB),
    }


def options(look: BwrapOptions) -> list[str]:
    """Return bubblewrap's options for a box; the program follows them."""
    parts = [*_namespaces(look)]
    if look.image is None:
        parts += [*_host_system(), "--ro-bind", str(look.etc), "/etc"]
        parts += [part for name in _ETC_FOLDERS for part in ("--ro-bind-try", f"/etc/{name}", f"/etc/{name}")]
    else:
        parts += _image_system(look.image)
        for name in ("passwd", "group"):
            if (look.image / "etc" / name).is_file():
                parts += ["--ro-bind", str(look.etc / name), f"/etc/{name}"]
    if look.is_online:
        parts += ["--ro-bind", "/etc/resolv.conf", "/etc/resolv.conf"]
    parts += _kernel()
    sizes = places_mib(look.disk_mib)
    parts += [*_memory_folder("/dev/shm", sizes["/dev/shm"] << 20), "--remount-ro", "/dev"]
    parts += _memory_folder("/tmp", sizes["/tmp"] << 20)
    for place in (WORK, SOCKETS):
        parts += _memory_folder(place, sizes[place] << 20, mode="0755")  # to be given to the agent's user
    parts += _memory_folder(GRADER_HOME, sizes[GRADER_HOME] << 20, mode="0700")
    if look.stays:
        parts += _memory_folder(DOOR, _DOOR_BYTES, mode="0700")
    # After /tmp, since they may lie below it. Folders that bubblewrap makes by itself on the way are for root only.
    seen = [*((Path(shown), shown) for shown in look.readable), *look.views]
    parts += [part for folder in _folders_above(tuple(place for _, place in seen)) for part in ("--dir", folder)]
    for source, place in seen:
        parts += ["--ro-bind", str(source), place]
    return [*parts, "--remount-ro", "/", "--chdir", "/"]


def _namespaces(look: BwrapOptions) -> list[str]:
    parts = ["--unshare-pid", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try", "--hostname", "sandbox"]
    if not look.is_online:
        parts.append("--unshare-net")
    if not look.stays:
        parts.append("--die-with-parent")
    parts += ["--new-session", "--as-pid-1", "--cap-drop", "ALL"]
    if os.geteuid() != 0:
        return [*parts, "--unshare-user", "--disable-userns"]
    return [*parts, *(part for name in _CAPABILITIES for part in ("--cap-add", name))]


@lru_cache(maxsize=32)
def _folders_above(places: tuple[str, ...]) -> Sequence[str]:
    """Return the folders that `places` lie in, outermost first, but those that a box has anyway."""
    folders = dict.fromkeys(parent for place in places for parent in reversed(Path(place).parents))
    return [str(one) for one in folders if str(one) not in ("/", "/tmp") and not one.is_relative_to("/usr")]


def _host_system() -> Iterator[str]:
    yield from ("--ro-bind", "/usr", "/usr")
    for name in ("bin", "sbin", "lib", "lib32", "lib64", "libx32"):
        yield from _shown(Path("/", name), f"/{name}")


def _image_system(image: Path) -> Iterator[str]:
    """All that lies at the top of `image`, so that what it lacks can be made beside it."""
    for entry in sorted(image.iterdir()):
        if entry.name not in _OWN:
            yield from _shown(entry, f"/{entry.name}")


def _shown(path: Path, place: str) -> Iterator[str]:
    if path.is_symlink():
        yield from ("--symlink", str(path.readlink()), place)
    elif path.exists():
        yield from ("--ro-bind", str(path), place)


def _kernel() -> Iterator[str]:
    yield from ("--proc", "/proc")
    for name in _TELLS_OF_THE_HOST:
        if Path("/proc", name).exists():
            yield from ("--ro-bind", "/dev/null", f"/proc/{name}")
    # As root, /proc/sys would be writable and is the host's; nobody in a box needs to write below /proc.
    yield from ("--remount-ro", "/proc", "--dev", "/dev")


def _memory_folder(place: str, size: int, *, mode: str = "1777") -> list[str]:
    """A folder in memory that can be written to."""
    return ["--perms", mode, "--size", str(size), "--tmpfs", place]
