"""Build the Docker options of a sandbox's container, and interpret the container's state after it has ended.

In the strict profile the root file system is read-only. Writable paths (``/tmp``, ``/workspace``, the folder for
sockets, the grader's home, ``/dev/shm``) are tmpfs mounts of limited size that count towards the sandbox's memory.
Process 1 is root with four capabilities, and no process can gain more. Unless the spec opens it, there is no network.
A seccomp filter applies (`envkit.sandbox.docker.seccomp_profile`).

In the system profile the root file system is writable and stored on the daemon's disk. All programs run as root with
the capabilities that package managers and servers need. `unenforced` returns the limits that are not enforced.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from envkit.types import GRADER_HOME, JSON, Cause, SandboxSpec
from envkit.types.sandboxes import SandboxLimits

from ..egress import allowlist
from ..host.child_process import cause_of
from ..host.layout import (
    AGENT_UID,
    CONTROL_DIR,
    GRADER_UID,
    MAX_GRADER_HOME_MIB,
    PATH,
    SOCKETS,
    WORK,
    max_inodes,
)

DISK_LABEL = "envkit.disk-mib"
PROFILE_LABEL = "envkit.profile"

_OPEN_FILES = 4096
"""Maximum number of open files per process. It is low, because a daemon cannot grant more than its own limit."""
_ULIMITS: Sequence[JSON] = (
    {"Name": "core", "Soft": 0, "Hard": 0},
    {"Name": "nofile", "Soft": _OPEN_FILES, "Hard": _OPEN_FILES},
)
_READ_ONLY_PATHS = ("/proc", "/proc/bus", "/proc/fs", "/proc/irq", "/proc/sys", "/proc/sysrq-trigger")
"""Paths that are read-only in containers: those that Docker makes read-only by default, and ``/proc`` itself."""
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
"""Docker's default capabilities without NET_RAW, MKNOD, AUDIT_WRITE, SETFCAP and SYS_CHROOT."""


@dataclass(frozen=True, slots=True)
class Image:
    """Properties of an image.

    Attributes:
        id: Digest of the image's content.
        env: Environment variables that the image sets.
        volumes: Folders that the image declares as volumes.
        workdir: Working directory that the image sets; empty for none.
        user: User that the image sets, whom sandboxes ignore; empty for none.
        entrypoint: Program of the image, which sandboxes do not run.
    """

    id: str
    env: Mapping[str, str]
    volumes: tuple[str, ...]
    workdir: str = ""
    user: str = ""
    entrypoint: tuple[str, ...] = ()


def options(
    spec: SandboxSpec,
    image: Image,
    argv: Sequence[str],
    labels: Mapping[str, str],
    *,
    seccomp_profile: str | None = None,
    agent_sets_scores: bool = False,
) -> dict[str, JSON]:
    """Return the options with which the daemon creates a sandbox's container.

    Args:
        spec: Spec of the sandbox.
        image: Image of the container.
        argv: Program and arguments of process 1.
        labels: Labels of the container and its volumes.
        seccomp_profile: Seccomp filter as JSON; None uses the daemon's default.
        agent_sets_scores: Whether to make ``/proc`` read-only in the container, so that no program can change OOM
            scores until `FirstProcess.lend` allows it to the agent alone.
    """
    limits = SandboxLimits.of(spec)
    host = {
        **_host(spec, limits, labels),
        **(_system(limits) if spec.profile == "system" else _strict(image, limits)),
    }
    if spec.runtime is not None:
        host["Runtime"] = spec.runtime
    if seccomp_profile is not None:
        host["SecurityOpt"] = ["no-new-privileges", f"seccomp={seccomp_profile}"]
    if agent_sets_scores:
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
        "Labels": {**labels, DISK_LABEL: str(limits.disk_mib), PROFILE_LABEL: spec.profile},
        "HostConfig": host,
    }


def why_refused(spec: SandboxSpec, runtimes: Iterable[str]) -> str | None:
    """Return in one line why a daemon with these container runtimes cannot run `spec`; None if it can."""
    missing = unenforced(spec)
    if spec.untrusted and missing:
        reason = "an open network" if "network" in missing else f"profile {spec.profile!r}"
        return f"untrusted programs are refused: {reason} does not enforce {', '.join(missing)}"
    if (why := allowlist.why_refused(spec)) is not None:
        return why
    if spec.runtime is not None and spec.runtime not in (names := sorted(runtimes)):
        return f"Docker has no runtime {spec.runtime!r}, only {', '.join(names)}; add it to /etc/docker/daemon.json"
    return None


def unenforced(spec: SandboxSpec) -> tuple[str, ...]:
    """Return the names, as in `DockerBackend.capabilities`, of the limits that are not enforced for `spec`."""
    network = ("network",) if spec.network == "open" else ()
    return (*network, "disk", "uid") if spec.profile == "system" else network


def environment(spec: SandboxSpec, image: Image) -> dict[str, str]:
    """Return the environment variables of a sandbox's programs. Those of the spec override all others. Those of the
    image override envkit's ``PATH`` and ``LANG``, but not its ``HOME``, ``ENVKIT_SOCKETS`` and ``ENVKIT_WORKDIR``: the
    working directory of the image. If it sets none, that is ``/`` in the system profile, as in Docker, and otherwise
    ``/workspace``, because ``/`` cannot be written there.
    """
    home, workdir = ("/root", "/") if spec.profile == "system" else (WORK, WORK)
    fixed = {"HOME": home, "ENVKIT_SOCKETS": SOCKETS, "ENVKIT_WORKDIR": image.workdir or workdir}
    return {"PATH": PATH, "LANG": "C.UTF-8", **image.env, **fixed, **spec.env}


def cause(state: Mapping[str, JSON], last_line: str, *, out_of_memory: Cause | None = None) -> Cause | None:
    """Return why a container ended; None while it runs.

    Args:
        state: ``State`` in the daemon's record of the container.
        last_line: Last line of the standard error of process 1.
        out_of_memory: Cause to return if process 1 was killed and the daemon reports an out-of-memory kill. None if
            process 1 has survived such kills of other processes, because the report may be about those.
    """
    if state.get("Running") or state.get("Status") in ("created", "removing"):
        return None
    code = state.get("ExitCode")
    if not isinstance(code, int):
        return None
    if state.get("OOMKilled") and code == 128 + signal.SIGKILL and out_of_memory is not None:
        return out_of_memory
    return cause_of(code, last_line)


def _host(spec: SandboxSpec, limits: SandboxLimits, labels: Mapping[str, str]) -> dict[str, JSON]:
    uid = 0 if spec.profile == "system" else AGENT_UID
    host: dict[str, JSON] = {
        "NetworkMode": "bridge" if spec.network == "open" else "none",
        "CapDrop": ["ALL"],
        "SecurityOpt": ["no-new-privileges"],
        "PidsLimit": limits.pids,
        "Memory": limits.memory_mib << 20,
        "MemorySwap": limits.memory_mib << 20,
        "IpcMode": "private",
        "CgroupnsMode": "private",
        "Init": False,
        # A detached container removes itself, because envkit may not run when it ends. Other containers stay, so that
        # envkit can read why they ended.
        "AutoRemove": spec.detached,
        # Disable logs: the daemon would write all messages of the agent's channel to its disk.
        "LogConfig": {"Type": "none"},
        "Ulimits": [*_ULIMITS],
        # Use anonymous volumes: the host can access them, unlike tmpfs mounts, and they are removed with the container.
        "Mounts": [
            _volume(SOCKETS, f"{_SOCKETS_OPTIONS},uid={uid},gid={uid}", labels),
            *([_volume(CONTROL_DIR, _CONTROL_OPTIONS, labels)] if spec.detached else ()),
            *(_view(source, path) for source, path in spec.views),
        ],
    }
    if limits.cpus is not None:
        host["NanoCpus"] = round(limits.cpus * 1e9)
    return host


def _volume(target: str, tmpfs_options: str, labels: Mapping[str, str]) -> dict[str, JSON]:
    driver: dict[str, JSON] = {
        "Name": "local",
        "Options": {"type": "tmpfs", "device": "tmpfs", "o": tmpfs_options},
    }
    volume_options: dict[str, JSON] = {"NoCopy": True, "Labels": dict(labels), "DriverConfig": driver}
    return {"Type": "volume", "Target": target, "VolumeOptions": volume_options}


def _view(source: str, target: str) -> dict[str, JSON]:
    # Do not mount submounts: before Docker 25, the submounts of a read-only bind mount were writable.
    bind_options: dict[str, JSON] = {"NonRecursive": True}
    return {"Type": "bind", "Source": source, "Target": target, "ReadOnly": True, "BindOptions": bind_options}


def _strict(image: Image, limits: SandboxLimits) -> dict[str, JSON]:
    size = _tmpfs(limits.disk_mib)
    # Without a tmpfs mount, Docker would store the image's volumes on the daemon's disk.
    mounts: dict[str, JSON] = dict.fromkeys(image.volumes, f"{size},mode=1777")
    mounts["/tmp"] = f"{size},mode=1777"
    mounts[WORK] = f"{size},mode=0755,uid={AGENT_UID},gid={AGENT_UID}"
    mounts |= {GRADER_HOME: _grader_home(limits, GRADER_UID), "/dev/shm": _SHM_OPTIONS}
    return {"CapAdd": list(_STRICT_CAPABILITIES), "ReadonlyRootfs": True, "Tmpfs": mounts}


def _system(limits: SandboxLimits) -> dict[str, JSON]:
    max_file_bytes = limits.disk_mib << 20
    return {
        "CapAdd": list(_SYSTEM_CAPABILITIES),
        "ReadonlyRootfs": False,
        "Tmpfs": {GRADER_HOME: _grader_home(limits, 0), "/dev/shm": _SHM_OPTIONS},
        "Ulimits": [*_ULIMITS, {"Name": "fsize", "Soft": max_file_bytes, "Hard": max_file_bytes}],
    }


def _grader_home(limits: SandboxLimits, uid: int) -> str:
    size_mib = min(limits.disk_mib, MAX_GRADER_HOME_MIB)
    return f"{_tmpfs(size_mib)},mode=0700,uid={uid},gid={uid}"


def _tmpfs(size_mib: int) -> str:
    return f"size={size_mib}m,nr_inodes={max_inodes(size_mib)},exec,nosuid,nodev"
