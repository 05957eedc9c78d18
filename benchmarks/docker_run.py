"""``docker run -d`` with the same flags as a container that runs, to compare a start with."""

from __future__ import annotations

import json
import subprocess
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
_ALWAYS_OWN = {"ContainerIDFile", "ConsoleSize"}


class Plain:
    """Starts containers with ``docker run -d`` that are bounded as a given one is.

    Raises:
        ValueError: That container has settings which no flag here gives.
    """

    def __init__(self, docker: str, container: str) -> None:
        self._docker = docker
        like = self._settings(container)
        host = like["HostConfig"]
        self._flags = _flags(host)
        self._image = like["Config"]["Image"]
        try_out = self.start()
        try:
            mine = self._settings(try_out)["HostConfig"]
        finally:
            self.remove(try_out)
        other = [name for name in host.keys() - _ALWAYS_OWN if (host[name] or None) != (mine.get(name) or None)]
        if other:
            raise ValueError(f"docker run was not given the same flags: {', '.join(sorted(other))}")

    async def starting(self) -> Callable[[], Awaitable[None]]:
        """Start one; what removes it is returned."""
        return partial(clock.to_thread, self.remove, await clock.to_thread(self.start))

    def start(self) -> str:
        """Start one that sleeps, and return its id."""
        command = [self._docker, "run", "--detach", "--interactive", *self._flags, self._image, "sleep", "600"]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    def remove(self, container: str) -> None:
        subprocess.run([self._docker, "rm", "--force", container], check=True, capture_output=True)

    def _settings(self, container: str) -> Any:
        command = [self._docker, "inspect", container]
        return json.loads(subprocess.run(command, check=True, capture_output=True).stdout)[0]


def _flags(host: Mapping[str, Any]) -> list[str]:
    flags = [f"{flag}={host[name]}" for name, flag in _VALUES.items() if host.get(name)]
    flags += [f"{flag}={value}" for name, flag in _LISTS.items() for value in host.get(name) or ()]
    flags += [flag for name, flag in _SWITCHES.items() if host.get(name)]
    flags += [f"--tmpfs={path}:{options}" for path, options in (host.get("Tmpfs") or {}).items()]
    flags += [f"--sysctl={name}={value}" for name, value in (host.get("Sysctls") or {}).items()]
    flags += [f"--ulimit={each['Name']}={each['Soft']}:{each['Hard']}" for each in host.get("Ulimits") or ()]
    if host.get("NanoCpus"):
        flags.append(f"--cpus={host['NanoCpus'] / 1e9}")
    log = host["LogConfig"]
    flags += [f"--log-driver={log['Type']}", *(f"--log-opt={name}={value}" for name, value in log["Config"].items())]
    return flags
