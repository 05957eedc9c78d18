"""The keys of ``task.toml``, schema 1.4 of Harbor and older ones. Unknown keys are ignored, except envkit's own."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from envkit.errors import ConfigError

_VERSIONS = re.compile(r"1\.\d+")
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_AT = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<key>.*)`", re.DOTALL)


class HealthcheckTable(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    interval_sec: float = 5.0
    timeout_sec: float = 30.0
    start_period_sec: float = 0.0
    start_interval_sec: float = 5.0
    retries: int = 3


class NetworkTable(msgspec.Struct, frozen=True, kw_only=True):
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def network(self, default: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """Return the network as `TerminalTask.network` names it."""
        if self.network_mode is None:
            return default
        return {"public": "open", "no-network": "none"}.get(self.network_mode, self.allowed_hosts or ())


class EnvironmentTable(NetworkTable, frozen=True, kw_only=True):
    build_timeout_sec: float = 600.0
    docker_image: str = ""
    os: str = "linux"
    cpus: float | None = None
    memory_mb: int | None = None
    storage_mb: int | None = None
    gpus: int = 0
    gpu_types: tuple[str, ...] = ()
    tpu: dict[str, Any] | None = None
    mcp_servers: tuple[dict[str, Any], ...] = ()
    skills_dir: str = ""
    env: dict[str, str] = {}
    healthcheck: HealthcheckTable | None = None
    workdir: str = ""
    memory: str = ""
    storage: str = ""
    allow_internet: bool | None = None


class CollectTable(msgspec.Struct, frozen=True, kw_only=True):
    command: str
    service: str = "main"
    timeout_sec: float = 60.0
    user: str | int | None = None


class VerifierTable(NetworkTable, frozen=True, kw_only=True):
    timeout_sec: float = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[CollectTable, ...] = ()

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode that the table asks for; None if it does not say."""
        return self.environment_mode or (None if self.environment is None else "separate")


class AgentTable(NetworkTable, frozen=True, kw_only=True):
    timeout_sec: float | None = None
    user: str | int | None = None


class ArtifactTable(msgspec.Struct, frozen=True, kw_only=True):
    source: str
    destination: str | None = None
    exclude: tuple[str, ...] = ()
    service: str | None = None


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | dict[str, float] | None = None
    healthcheck: HealthcheckTable | None = None
    artifacts: tuple[str | ArtifactTable, ...] = ()


class SolutionTable(msgspec.Struct, frozen=True, kw_only=True):
    env: dict[str, str] = {}


class NameTable(msgspec.Struct, frozen=True, kw_only=True):
    name: str


class EnvkitTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """envkit's own keys, in ``[metadata.envkit]``."""

    portable: bool = False
    setup: str = ""
    programs: tuple[str, ...] = ()
    packages: tuple[str, ...] = ()
    profile: Literal["strict", "system", ""] = ""
    pids: int | None = None


class MetadataTable(msgspec.Struct, frozen=True, kw_only=True):
    difficulty: Any = ""
    category: Any = ""
    envkit: EnvkitTable | None = None


class TaskFile(msgspec.Struct, frozen=True, kw_only=True):
    """The whole file."""

    schema_version: str = ""
    version: str = ""
    task: NameTable | None = None
    metadata: MetadataTable = MetadataTable()
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    environment: EnvironmentTable = EnvironmentTable()
    solution: SolutionTable = SolutionTable()
    artifacts: tuple[str | ArtifactTable, ...] = ()
    steps: tuple[StepTable, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


# msgspec prepares a type at its first use, and the process crashes if two threads do that at once. So it is done here.
msgspec.json.Decoder(TaskFile)


def read_file(file: Path) -> TaskFile:
    """Read a ``task.toml``.

    Raises:
        ConfigError: It cannot be read, is not valid TOML, or a key has a wrong value.
    """
    try:
        content = tomllib.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError([f"{file}: {error.strerror}"]) from None
    except ValueError as error:
        raise ConfigError([f"{file}: not valid TOML: {error}"]) from None
    try:
        found = msgspec.convert(content, TaskFile)
    except msgspec.ValidationError as error:
        match = _AT.fullmatch(str(error))  # library's message: msgspec
        raise ConfigError([f"{file}: {match['key']}: {match['problem']}" if match else f"{file}: {error}"]) from None
    version = found.schema_version or found.version or "1.0"
    if not _VERSIONS.fullmatch(version):
        raise ConfigError([f"{file}: schema_version: version {version!r} is not supported; use 1.4"])
    return found


def size_mib(place: str, text: str) -> int:
    """Return a size such as ``2G`` in MiB; `place` is the file and key, for errors.

    Raises:
        ConfigError: It is no such size.
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError([f"{place}: must be a size like 2G or 512M, got {text!r}"])
    return int(float(match[1]) * _MIB[match[2].upper()])


def resolved(place: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables whose values ``${NAME}`` and ``${NAME:-default}`` come from this process.

    Raises:
        ConfigError: A variable without a default is not set.
    """
    found = {}
    for name, value in env.items():
        if (match := _VARIABLE.fullmatch(value)) is None:
            found[name] = value
        elif (known := os.environ.get(match[1], match[2])) is None:
            raise ConfigError([f"{place}.{name}: the environment variable {match[1]} is not set; set it"])
        else:
            found[name] = known
    return found
