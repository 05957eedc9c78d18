"""The keys of ``task.toml``, schema 1.4 of Harbor and older ones. Unknown keys are ignored, except envkit's own."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import msgspec

from envkit.errors import ConfigError

from ..tasks import Artifact, Collect, Healthcheck, Timeout
from .files import read_text

_VERSIONS = re.compile(r"1\.\d+")
_VARIABLE = re.compile(r"\$\{([^}:]+)(?::-(.*))?\}")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([GMK])", re.IGNORECASE)
_MIB = {"G": 1024.0, "M": 1.0, "K": 1 / 1024}
_IMAGE = re.compile(
    r"(?:[A-Za-z0-9][\w.-]*(?::\d+)?/)?[a-z0-9]+(?:(?:[._/]|__|-+)[a-z0-9]+)*(?P<version>:\w[\w.-]*)?(?P<digest>@sha256:[0-9a-f]{64})?"
)
_MAX_DOTS = 200_000
"""Maximum product of the dots in a line and the lines: the time of tomllib grows with the parts of dotted keys."""
_AT = re.compile(r"(?P<problem>.*) - at `\$\.?(?P<key>.*)`", re.DOTALL)


class NetworkTable(msgspec.Struct, frozen=True, kw_only=True):
    network_mode: Literal["public", "no-network", "allowlist"] | None = None
    allowed_hosts: tuple[str, ...] | None = None

    def network(self, default: str | tuple[str, ...]) -> str | tuple[str, ...]:
        """Return the network as `TerminalTask.network` names it."""
        if self.network_mode is None:
            return default
        return {"public": "open", "no-network": "none"}.get(self.network_mode, self.allowed_hosts or ())


class EnvironmentTable(NetworkTable, frozen=True, kw_only=True):
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
    healthcheck: Healthcheck | None = None
    workdir: str = ""
    memory: str = ""
    storage: str = ""
    allow_internet: bool = True


class VerifierTable(NetworkTable, frozen=True, kw_only=True):
    timeout_sec: Timeout = 600.0
    env: dict[str, str] = {}
    user: str | int | None = None
    environment_mode: Literal["shared", "separate"] | None = None
    environment: EnvironmentTable | None = None
    collect: tuple[Collect, ...] = ()

    @property
    def mode(self) -> Literal["shared", "separate"] | None:
        """The mode that the table asks for; None if it does not say."""
        return self.environment_mode or (None if self.environment is None else "separate")


class AgentTable(NetworkTable, frozen=True, kw_only=True):
    timeout_sec: Timeout | None = None
    user: str | int | None = None


class RewardTable(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    reward: float


class StepTable(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    agent: AgentTable = AgentTable()
    verifier: VerifierTable = VerifierTable()
    min_reward: float | RewardTable = -math.inf
    healthcheck: Healthcheck | None = None
    artifacts: tuple[str | Artifact, ...] = ()


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
    artifacts: tuple[str | Artifact, ...] = ()
    steps: tuple[StepTable, ...] = ()
    multi_step_reward_strategy: Literal["mean", "final"] = "mean"


# msgspec prepares a type at its first use; if two threads do that at once, the process crashes. So prepare it now.
msgspec.json.Decoder(TaskFile)


def read_file(file: Path) -> TaskFile:
    """Read a ``task.toml``.

    Raises:
        ConfigError: It cannot be read, is not valid TOML, or a key has a wrong value.
    """
    try:
        text = read_text(file)
        dots = max((line.count(".") for line in text.splitlines()), default=0)
        if dots * (dots + text.count("\n")) > _MAX_DOTS:
            raise ConfigError([f"{file}: a line has {dots} dots, which take too long to parse; shorten it or the file"])
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
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


def size_mib(place: str, mib: int | None, text: str) -> int | None:
    """Return `mib`, or else a size such as ``2G`` in MiB; `place` is the file and key, for errors.

    Raises:
        ConfigError: The text is not a size.
    """
    if mib is not None or not text:
        return mib
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        raise ConfigError([f"{place}: must be a size like 2G or 512M, got {text!r}"])
    return int(float(match[1]) * _MIB[match[2].upper()])


def image_name(place: str, text: str) -> str:
    """Return the name of an image with its tag; `place` is the file and key, for errors. Empty stays empty.

    Raises:
        ConfigError: The text is not the name of a Docker image. Paths are refused: for some backends, an image is a
            folder of this machine, and only the user may choose that.
    """
    match = _IMAGE.fullmatch(text)
    if text and match is None:
        raise ConfigError([f"{place}: must be the name of a Docker image, got {text!r}"])
    return f"{text}:latest" if match and not match["version"] and not match["digest"] else text


def resolved(place: str, env: Mapping[str, str]) -> dict[str, str]:
    """Return environment variables of a sandbox; ``${NAME:-default}`` is its default. `place` is the key, for errors.

    Raises:
        ConfigError: ``${NAME}`` has no default. Tasks may not read the variables of this process.
    """
    found = {}
    for name, value in env.items():
        match = _VARIABLE.fullmatch(value)
        if match is not None and match[2] is None:
            raise ConfigError([f"{place}.{name}: tasks cannot read {match[1]} of this machine; write its value here"])
        found[name] = value if match is None else match[2]
    return found
