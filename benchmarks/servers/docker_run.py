"""``docker run -d`` with the same flags as a sandbox's container, to compare the time of a start."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import Any

from envkit import clock

_VALUES = {
    "NetworkMode": "--network",
    "Memory": "--memory",
    "MemorySwap": "--memory-swap",
    "PidsLimit": "--pids-limit",
    "ShmSize": "--shm-size",
    "IpcMode": "--ipc",
    "Runtime": "--runtime",
    "CgroupnsMode": "--cgroupns",
    "OomScoreAdj": "--oom-score-adj",
}
_LISTS = {"CapAdd": "--cap-add", "CapDrop": "--cap-drop", "SecurityOpt": "--security-opt", "Binds": "--volume"}
_SWITCHES = {"ReadonlyRootfs": "--read-only", "AutoRemove": "--rm", "Init": "--init"}
_PROFILE = "seccomp="
_UNLIKE = {"ContainerIDFile", "ConsoleSize", "ReadonlyPaths", "RestartPolicy"}
"""Settings that may differ: the docker program sets them itself, or has no flag for them."""


class Plain:
    """Starts containers with ``docker run -d`` that have the same limits as the container of a given sandbox.

    Raises:
        ValueError: The sandbox's container has settings for which this class knows no flag.
    """

    def __init__(self, docker: str, sandbox_id: str) -> None:
        self._docker = docker
        like = self._settings(self._container(sandbox_id))
        host = like["HostConfig"]
        self._profile = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115  (deleted with this object)
        self._flags = _flags({**host, "SecurityOpt": [self._written(option) for option in host["SecurityOpt"]]})
        self._image = like["Config"]["Image"]
        try_out = self.start()
        try:
            mine = self._settings(try_out)["HostConfig"]
        finally:
            self.remove(try_out)
        if other := [name for name in host if name not in _UNLIKE and _plain(host[name]) != _plain(mine.get(name))]:
            raise ValueError(f"docker run started a container with other settings; add flags for: {', '.join(other)}")

    async def starting(self) -> Callable[[], Awaitable[None]]:
        """Start a container; return the function that removes it."""
        return partial(clock.to_thread, self.remove, await clock.to_thread(self.start))

    def start(self) -> str:
        """Start a container that sleeps, and return its id."""
        command = [self._docker, "run", "--detach", "--interactive", *self._flags, self._image, "sleep", "600"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def remove(self, container: str) -> None:
        subprocess.run([self._docker, "rm", "--force", "--volumes", container], check=True, capture_output=True)

    def _written(self, option: str) -> str:
        """Return an option in the docker program's form; a seccomp filter is passed as a file."""
        if not option.startswith(_PROFILE):
            return option
        self._profile.write(option.removeprefix(_PROFILE))
        self._profile.flush()
        return _PROFILE + self._profile.name

    def _container(self, sandbox_id: str) -> str:
        """Return the id of our container of a sandbox. Other processes may have sandboxes with the same id."""
        find = [self._docker, "ps", "--filter", f"label=envkit.sandbox={sandbox_id}", "--format"]
        found = subprocess.run(
            [*find, '{{.Label "envkit.owner"}} {{.ID}}'], check=True, capture_output=True, text=True
        ).stdout
        return next(line.split()[1] for line in found.splitlines() if f"-{os.getpid()}-" in line)

    def _settings(self, container: str) -> Any:
        command = [self._docker, "inspect", container]
        found = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]
        for mount in found["HostConfig"].get("Mounts") or ():
            mount["VolumeOptions"].pop("Labels", None)  # they name the owner, so they differ
        options = found["HostConfig"]["SecurityOpt"]
        found["HostConfig"]["SecurityOpt"] = [_compact(option) for option in options]
        return found


def _flags(host: Mapping[str, Any]) -> list[str]:
    flags = [f"{flag}={host[name]}" for name, flag in _VALUES.items() if host.get(name)]
    flags += [f"{flag}={value}" for name, flag in _LISTS.items() for value in host.get(name) or ()]
    flags += [flag for name, flag in _SWITCHES.items() if host.get(name)]
    flags += [f"--tmpfs={path}:{options}" for path, options in (host.get("Tmpfs") or {}).items()]
    flags += [f"--mount={_mount(each)}" for each in host.get("Mounts") or ()]
    flags += [f"--sysctl={name}={value}" for name, value in (host.get("Sysctls") or {}).items()]
    flags += [f"--ulimit={each['Name']}={each['Soft']}:{each['Hard']}" for each in host.get("Ulimits") or ()]
    if host.get("NanoCpus"):
        flags.append(f"--cpus={host['NanoCpus'] / 1e9}")
    log = host["LogConfig"]
    flags += [f"--log-driver={log['Type']}", *(f"--log-opt={name}={value}" for name, value in log["Config"].items())]
    return flags


def _mount(mount: Mapping[str, Any]) -> str:
    """Return the value of ``--mount`` for a volume: comma-separated fields."""
    volume = mount["VolumeOptions"]
    driver = volume["DriverConfig"]
    fields = [f"type={mount['Type']}", f"dst={mount['Target']}", f"volume-driver={driver['Name']}"]
    fields += [f'"volume-opt={name}={value}"' for name, value in driver["Options"].items()]
    return ",".join([*fields, *(["volume-nocopy"] if volume.get("NoCopy") else [])])


def _compact(option: str) -> str:
    profile = option.removeprefix(_PROFILE)
    return option if profile == option else _PROFILE + json.dumps(json.loads(profile), separators=(",", ":"))


def _plain(value: object) -> object:
    """Return a normal form of a setting: None for empty values, and short names for capabilities."""
    if isinstance(value, list) and all(isinstance(one, str) for one in value):
        value = sorted(one.removeprefix("CAP_") for one in value)
    return value or None
