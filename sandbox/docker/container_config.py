"""What a container is made of: the options that the Docker daemon is given, and what its state says about its end.

The strict profile: a read-only root file system; what can be written (``/tmp``, ``/workspace``, the folder for sockets,
a grader's, ``/dev/shm``) is in memory and of bounded size, and counts as memory of the box; process 1 is root with four
capabilities, and nobody can gain any; no network; a filter of system calls (`envkit.sandbox.docker.seccomp_profile`).

The system profile differs in that the root file system can be written, everything runs as root with the capabilities
that package managers and servers need, and what is written lies on the daemon's disk. `unenforced` names what is not
held.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envkit.types import GRADER_HOME, JSON, Cause, SandboxSpec

from ..egress import allowlist
from ..host.child_process import cause_of
from ..host.layout import AGENT_UID, CONTROL_DIR, GRADER_UID, PATH, SOCKETS, WORK, max_inodes

DISK_LABEL = "envkit.disk-mib"
PROFILE_LABEL = "envkit.profile"
FORMAT_LABEL = "envkit.format"
"""Of an image: the format that `envkit image build` made."""

_MEMORY_MIB = 1024
_PIDS = 256
_DISK_MIB = 256
_SYSTEM_DISK_MIB = 4096
_LARGEST_GRADER_HOME_MIB = 64
_OPEN_FILES = 4096
"""As many as a daemon can grant that was itself given few."""
_ULIMITS: Sequence[JSON] = (
    {"Name": "core", "Soft": 0, "Hard": 0},
    {"Name": "nofile", "Soft": _OPEN_FILES, "Hard": _OPEN_FILES},
)
_READ_ONLY_PATHS = ("/proc", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Docker's own, and the whole of /proc."""
_CONTROL_OPTIONS = "size=64k,nr_inodes=16,mode=0700,nosuid,nodev"
_SHM_OPTIONS = f"size=16m,nr_inodes={max_inodes(16)},mode=1777,noexec,nosuid,nodev"
_SOCKETS_OPTIONS = "size=1m,nr_inodes=1024,mode=0755,nosuid,nodev"
_STRICT_CAPABILITIES = ("SETUID", "SETGID", "KILL", "CHOWN")
_SYSTEM_CAPABILITIES = (
    *_STRICT_CAPABILITIES,
    "DAC_OVERRIDE",
    "FOWNER",
    "FSETID",
    "NET_BIND_SERVICE",
    "SETPCAP",
)
"""Docker's own, less NET_RAW, MKNOD, AUDIT_WRITE, SETFCAP and, whose call is refused, SYS_CHROOT."""


@dataclass(frozen=True, slots=True)
class Image:
    """What the daemon knows of an image.

    Attributes:
        id: Its content's digest.
        env: Environment variables that it sets.
        volumes: Folders that it declares as places to write to.
        format: Its format number, as labelled; None for an image that envkit did not build.
    """

    id: str
    env: Mapping[str, str]
    volumes: tuple[str, ...]
    format: str | None = None


@dataclass(frozen=True, slots=True)
class ContainerLimits:
    """What a container may use. Sizes in MiB; `cpus` of None is without bound."""

    memory_mib: int
    pids: int
    disk_mib: int
    cpus: float | None

    @classmethod
    def of(cls, spec: SandboxSpec) -> ContainerLimits:
        """Fill in what `spec` leaves open; places in memory are together no larger than half of it."""
        memory_mib = _MEMORY_MIB if spec.memory_mib is None else spec.memory_mib
        default_mib = _SYSTEM_DISK_MIB if spec.profile == "system" else min(_DISK_MIB, max(memory_mib // 4, 1))
        disk_mib = default_mib if spec.disk_mib is None else spec.disk_mib
        return cls(memory_mib, _PIDS if spec.pids is None else spec.pids, disk_mib, spec.cpus)


def options(
    spec: SandboxSpec,
    image: Image,
    argv: Sequence[str],
    labels: Mapping[str, str],
    *,
    system_calls: str | None = None,
    bounds_disk: bool = False,
    has_agent: bool = True,
    agent_sets_scores: bool = False,
) -> dict[str, JSON]:
    """Return what makes the container of a box whose process 1 is `argv`, reached by its standard streams.

    Args:
        spec: What the box is to be.
        image: Its files.
        argv: Program and arguments of process 1.
        labels: What to find it by.
        system_calls: Filter of what its programs may ask of the kernel; None leaves that to the daemon.
        bounds_disk: Whether the daemon can bound the root file system's size.
        has_agent: Whether process 1 looks after the others, and needs capabilities for it.
        agent_sets_scores: Whether that process, and nobody else inside, will be able to write to /proc.
    """
    bounds = ContainerLimits.of(spec)
    host = {
        **_host(spec, bounds, labels),
        **(_system(bounds, bounds_disk) if spec.profile == "system" else _strict(image, bounds)),
    }
    if spec.runtime is not None:
        host["Runtime"] = spec.runtime
    if system_calls is not None:
        host["SecurityOpt"] = ["no-new-privileges", f"seccomp={system_calls}"]
    if not has_agent:
        host |= {"Init": True, "CapAdd": []}
    elif agent_sets_scores:
        host["ReadonlyPaths"] = list(_READ_ONLY_PATHS)
    return {
        "Image": image.id,
        "Entrypoint": list(argv),
        "User": "0:0",
        "WorkingDir": WORK,
        "Hostname": "sandbox",
        "OpenStdin": True,
        "StdinOnce": True,
        "AttachStdin": True,
        "AttachStdout": True,
        "AttachStderr": True,
        "Tty": False,
        "Healthcheck": {"Test": ["NONE"]},
        "Labels": {**labels, DISK_LABEL: str(bounds.disk_mib), PROFILE_LABEL: spec.profile},
        "HostConfig": host,
    }


def why_refused(spec: SandboxSpec, runtimes: Iterable[str]) -> str | None:
    """Return why `spec` cannot be had of a daemon that has these runtimes, in one line; None where it can."""
    lost = unenforced(spec)
    if spec.untrusted and lost:
        what = "an open network" if "network" in lost else f"profile {spec.profile!r}"
        return f"untrusted programs are refused: {what} does not hold {', '.join(lost)}"
    if (why := allowlist.why_refused(spec)) is not None:
        return why
    if spec.runtime is not None and spec.runtime not in (names := sorted(runtimes)):
        return f"Docker has no runtime {spec.runtime!r}, only {', '.join(names)} (/etc/docker/daemon.json)"
    return None


def unenforced(spec: SandboxSpec, *, bounds_disk: bool = False) -> tuple[str, ...]:
    """Name what `spec` leaves unheld, in the words of `capabilities`."""
    lost = []
    if spec.network == "open":
        lost.append("network")
    if spec.profile == "system":
        lost += ["uid"] if bounds_disk else ["disk", "uid"]
    return tuple(lost)


def environment(spec: SandboxSpec, image: Image) -> dict[str, str]:
    """Return the environment of everything in the box: the image's, ours and the spec's, the later over the earlier."""
    ours = {"HOME": "/root"} if spec.profile == "system" else {"HOME": WORK}
    return {"PATH": PATH, "LANG": "C.UTF-8", **image.env, **ours, "ENVKIT_SOCKETS": SOCKETS, **spec.env}


def cause(state: Mapping[str, JSON], last_line: str, *, out_of_memory: Cause | None = None) -> Cause | None:
    """Return why a container is gone, from the daemon's record of its state; None while it runs.

    Args:
        state: ``State`` of the container.
        last_line: What its process 1 wrote last.
        out_of_memory: What to return where something in it was killed for want of memory, and so perhaps process 1;
            None where that is known to have survived it.
    """
    if state.get("Running") or state.get("Status") in ("created", "removing"):
        return None
    code = state.get("ExitCode")
    if not isinstance(code, int):
        return None
    if state.get("OOMKilled") and code == 128 + signal.SIGKILL and out_of_memory is not None:
        return out_of_memory
    return cause_of(128 - code if 128 < code <= 192 else code, last_line)


def _host(spec: SandboxSpec, bounds: ContainerLimits, labels: Mapping[str, str]) -> dict[str, JSON]:
    host: dict[str, JSON] = {
        "NetworkMode": "bridge" if spec.network == "open" else "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": bounds.pids,
        "Memory": bounds.memory_mib << 20,
        "MemorySwap": bounds.memory_mib << 20,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Init": False,
        # Who outlives us has nobody to remove it; of the others we want to know how they ended.
        "AutoRemove": spec.detached,
        # Every frame of the channel would be written to the daemon's disk.
        "LogConfig": {"Type": "none"},
        "Ulimits": [*_ULIMITS],
        # Volumes without names are removed with their container, and lie where this host sees what is in them.
        "Mounts": [
            _volume(SOCKETS, _sockets_options(spec), labels),
            *([_volume(CONTROL_DIR, _CONTROL_OPTIONS, labels)] if spec.detached else ()),
            *(_view(source, place) for source, place in spec.views),
        ],
    }
    if bounds.cpus is not None:
        host["NanoCpus"] = round(bounds.cpus * 1e9)
    return host


def _volume(target: str, tmpfs_options: str, labels: Mapping[str, str]) -> dict[str, JSON]:
    driver: dict[str, JSON] = {
        "Name": "local",
        "Options": {"type": "tmpfs", "device": "tmpfs", "o": tmpfs_options},
    }
    kept: dict[str, JSON] = {"NoCopy": True, "Labels": dict(labels), "DriverConfig": driver}
    return {"Type": "volume", "Target": target, "VolumeOptions": kept}


def _view(source: str, target: str) -> dict[str, JSON]:
    # What is mounted below it would be writable before Docker 25, and so is left out.
    alone: dict[str, JSON] = {"NonRecursive": True}
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True, "BindOptions": alone}


def _strict(image: Image, bounds: ContainerLimits) -> dict[str, JSON]:
    size = _tmpfs(bounds.disk_mib)
    # What an image declares as a volume would be a folder on the daemon's disk.
    places: dict[str, JSON] = dict.fromkeys(image.volumes, f"{size},mode=1777")
    places["/tmp"] = f"{size},mode=1777"
    places[WORK] = f"{size},mode=0755,uid={AGENT_UID},gid={AGENT_UID}"
    places |= {GRADER_HOME: _grader_home(bounds, GRADER_UID), "/dev/shm": _SHM_OPTIONS}
    return {"CapAdd": list(_STRICT_CAPABILITIES), "ReadonlyRootfs": True, "Tmpfs": places}


def _system(bounds: ContainerLimits, bounds_disk: bool) -> dict[str, JSON]:
    most = bounds.disk_mib << 20
    host: dict[str, JSON] = {
        "CapAdd": list(_SYSTEM_CAPABILITIES),
        "ReadonlyRootfs": False,
        "Tmpfs": {GRADER_HOME: _grader_home(bounds, 0), "/dev/shm": _SHM_OPTIONS},
        "Ulimits": [*_ULIMITS, {"Name": "fsize", "Soft": most, "Hard": most}],
    }
    if bounds_disk:
        host["StorageOpt"] = {"size": f"{bounds.disk_mib}m"}
    return host


def _grader_home(bounds: ContainerLimits, uid: int) -> str:
    size_mib = min(bounds.disk_mib, _LARGEST_GRADER_HOME_MIB)
    return f"{_tmpfs(size_mib)},mode=0700,uid={uid},gid={uid}"


def _tmpfs(size_mib: int) -> str:
    return f"size={size_mib}m,nr_inodes={max_inodes(size_mib)},exec,nosuid,nodev"


def _sockets_options(spec: SandboxSpec) -> str:
    uid = 0 if spec.profile == "system" else AGENT_UID
    return f"{_SOCKETS_OPTIONS},uid={uid},gid={uid}"
