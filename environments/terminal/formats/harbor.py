"""Tasks in the format of Harbor: folders with ``task.toml``, ``instruction.md``, ``environment``, ``tests`` and more.

envkit's own keys are in the table ``[metadata.envkit]``, and a folder ``cheats`` may have scripts beside ``solution``.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import msgspec
from msgspec.structs import replace

from envkit.errors import ConfigError

from ..images import ignored
from ..tasks import WORK, Artifact, Profile, TerminalTask, Verifier
from . import schema
from .files import read_text, read_yaml, require_usable
from .writing import write_task

__all__ = ["read_task", "write_task"]

_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_PUBLISHED = "/logs/artifacts"
"""Folder that Harbor collects as an artifact of every task."""
_NO_GPU = "sandboxes of envkit have no accelerators"
_UNUSED = {
    "gpus": _NO_GPU,
    "gpu_types": _NO_GPU,
    "tpu": _NO_GPU,
    "mcp_servers": "the agent does not get the tools of MCP servers",
    "skills_dir": "the agent does not get skills",
}
"""Keys of the table ``environment`` that envkit ignores, with what that means."""
_SERVICE_KEYS = {"build", "image", "container_name", "command", "entrypoint", "init", "stdin_open", "tty", "restart"}


class _Compose(msgspec.Struct):
    services: dict[str, dict[str, Any]]


def read_task(folder: Path) -> TerminalTask:
    """Read a task.

    Unsupported settings that envkit can ignore are in the notes of the task. If a file with the table
    ``[metadata.envkit]`` does not say where the tests run, they have a sandbox of their own.

    Args:
        folder: Folder of the task.

    Raises:
        ConfigError: A file is missing or malformed, or envkit cannot play the task. The message names file and key.
    """
    file = folder / "task.toml"
    require_usable(folder)
    found = schema.read_file(file)
    own, settings = found.metadata.envkit or schema.EnvkitTable(), found.environment
    is_own = found.metadata.envkit is not None
    if is_own and found.verifier.environment_mode is None:
        found = replace(found, verifier=replace(found.verifier, environment_mode="separate"))
    notes: list[str] = []
    cheats = {path.stem: path for path in sorted((folder / "cheats").glob("*.sh"))}
    environment = folder / "environment"
    _require_playable(file, found, environment, notes)
    profile: Profile = own.profile or ("strict" if own.portable else "system")
    network = found.agent.network(settings.network("open" if settings.allow_internet else "none"))
    if own.portable:
        workdir = settings.workdir or WORK
        if workdir != WORK or profile != "strict" or settings.docker_image:
            raise ConfigError(
                [f"{file}: metadata.envkit.portable: needs the profile strict, the workdir {WORK}, and no image"]
            )
        if own.setup and not (environment / own.setup).is_file():
            raise ConfigError([f"{file}: metadata.envkit.setup: environment/{own.setup} is missing"])
    else:
        workdir = settings.workdir
        if not settings.docker_image:
            notes.extend(ignored(environment / "Dockerfile"))
        _note_users(found, profile, notes)
    first, *later = _steps(folder, file, found, network, notes)
    task = TerminalTask(
        name=found.task.name if found.task else folder.resolve().name,
        folder=folder,
        environment=environment,
        image=schema.image_name(f"{file}: environment.docker_image", settings.docker_image),
        is_portable=own.portable,
        setup=own.setup,
        programs=own.programs,
        packages=own.packages,
        profile=profile,
        workdir=workdir,
        env=schema.resolved(f"{file}: environment.env", settings.env),
        cpus=settings.cpus,
        memory_mib=schema.size_mib(f"{file}: environment.memory", settings.memory_mb, settings.memory),
        disk_mib=schema.size_mib(f"{file}: environment.storage", settings.storage_mb, settings.storage),
        network=network,
        healthcheck=settings.healthcheck,
        solution_env=schema.resolved(f"{file}: solution.env", found.solution.env),
        reward=found.multi_step_reward_strategy,
        difficulty=str(found.metadata.difficulty),
        category=str(found.metadata.category),
        cheats=cheats,
        notes=tuple(dict.fromkeys(notes)),
        **first,
    )
    names = [f"{task.name} ({step.name})" for step in found.steps[1:]]
    steps = zip(names, later, strict=True)
    return dataclasses.replace(task, later=tuple(dataclasses.replace(task, name=name, **step) for name, step in steps))


def _steps(
    folder: Path, file: Path, found: schema.TaskFile, network: str | tuple[str, ...], notes: list[str]
) -> Iterator[dict[str, Any]]:
    """Yield what belongs to each step, as attributes of `TerminalTask`. A task without steps is its only one."""
    only = schema.StepTable(name="", agent=found.agent, verifier=found.verifier)
    artifacts = _artifacts(f"{file}: artifacts", found.artifacts)
    for step in found.steps or (only,):
        part, tests, place, verifier = folder, folder / "tests", "", step.verifier
        if step is not only:
            if step.name in ("", ".", "..") or "/" in step.name:
                raise ConfigError([f"{file}: steps.name: must be the name of a folder in steps, got {step.name!r}"])
            part, place = folder / "steps" / step.name, f"steps.{step.name}."
            if (part / "tests" / "test.sh").is_file():
                if tests.is_dir():
                    notes.append(f"{place}verifier: only the tests of the step are used, not those of the task")
                tests = part / "tests"
            if step.agent.network(network) != network:
                notes.append(f"{place}agent.network_mode: all steps have the network of the environment")
            if (part / "workdir").is_dir() and any(path.name != "setup.sh" for path in (part / "workdir").iterdir()):
                notes.append(f"{place}workdir: of this folder, only setup.sh is used")
            verifier = _inherited(verifier, found.verifier)
        checked = _verifier(tests, file, f"{place}verifier", verifier, network, notes)
        kept = (*artifacts, *_artifacts(f"{file}: {place}artifacts", step.artifacts))
        if checked.is_separate and found.metadata.envkit is None and _PUBLISHED not in {one.source for one in kept}:
            kept = (Artifact(source=_PUBLISHED), *kept)
        solution, setup, least = part / "solution", part / "workdir" / "setup.sh", step.min_reward
        yield {
            "instruction": _instruction(part),
            "verifier": checked,
            "solution": solution if (solution / "solve.sh").is_file() else None,
            "step_setup": setup if step is not only and setup.is_file() else None,
            "step_healthcheck": step.healthcheck,
            "min_reward": least.reward if isinstance(least, schema.RewardTable) else least,
            "timeout_s": step.agent.timeout_sec or found.agent.timeout_sec,
            "artifacts": kept,
        }


def _inherited(table: schema.VerifierTable, shared: schema.VerifierTable) -> schema.VerifierTable:
    """Return the verifier of a step, which takes the keys that it lacks from that of the task."""
    mode = table.mode or shared.mode
    return replace(
        table,
        env={**shared.env, **table.env},
        environment_mode=mode,
        environment=table.environment or (shared.environment if mode == "separate" else None),
        collect=(*shared.collect, *table.collect),
    )


def _verifier(
    tests: Path,
    file: Path,
    key: str,
    table: schema.VerifierTable,
    network: str | tuple[str, ...],
    notes: list[str],
) -> Verifier:
    environment, env = table.environment, table.env
    if not (tests / "test.sh").is_file():
        raise ConfigError([f"{file}: {key}: {tests / 'test.sh'} is missing"])
    with (tests / "test.sh").open("rb") as opened:
        if b"\r\n" in opened.read(4096):
            notes.append(f"{key}: tests/test.sh has CR LF line ends, with which shells fail")
    if table.environment_mode == "shared" and environment is not None:
        raise ConfigError([f'{file}: {key}.environment: needs environment_mode = "separate"'])
    if table.network(network) not in (network, "none"):
        notes.append(f"{key}.network_mode: the tests have the network of the environment")
    is_separate = table.mode == "separate"
    image, dockerfile = "", None
    if is_separate:
        image = environment.docker_image if environment else ""
        image = schema.image_name(f"{file}: {key}.environment.docker_image", image)
        if not image and (tests / "Dockerfile").is_file():
            dockerfile = tests / "Dockerfile"
        if environment:
            _require_linux(file, f"{key}.environment", environment)
            env = {**environment.env, **env}
            rest = [name for name in ("cpus", "memory_mb", "storage_mb", "healthcheck") if getattr(environment, name)]
            if rest:
                notes.append(f"{key}.environment: {', '.join(rest)}: the verifier has the limits of the environment")
    for one in table.collect:
        _require_main(f"{file}: {key}.collect.service", one.service)
    return Verifier(
        tests=tests,
        timeout_s=table.timeout_sec,
        env=schema.resolved(f"{file}: {key}.env", env),
        is_separate=is_separate,
        dockerfile=dockerfile,
        image=image,
        collect=table.collect,
    )


def _require_playable(file: Path, found: schema.TaskFile, environment: Path, notes: list[str]) -> None:
    """Raise an error if envkit cannot play the task; add a note for what it ignores."""
    settings = found.environment
    _require_linux(file, "environment", settings)
    notes.extend(f"environment.{key}: {why}" for key, why in _UNUSED.items() if getattr(settings, key))
    if (compose := environment / "docker-compose.yaml").is_file():
        notes.extend(compose_notes(compose))
    is_portable = found.metadata.envkit is not None and found.metadata.envkit.portable
    if not settings.docker_image and not (environment / "Dockerfile").is_file() and not is_portable:
        raise ConfigError([f"{file}: environment.docker_image: is not set, and environment/Dockerfile is missing"])


def compose_notes(file: Path) -> list[str]:
    """Return what envkit ignores in a docker-compose file with one service.

    Raises:
        ConfigError: It is malformed, or has several services.
    """
    services = read_yaml(file, _Compose).services
    if len(services) > 1:
        names = ", ".join(map(str, services))
        raise ConfigError([f"{file}: services: envkit plays tasks with one container; this one has {names}"])
    return [
        f"{file.name}: {key}: is ignored"
        for service in services.values()
        for key in service
        if key not in _SERVICE_KEYS
    ]


def _require_linux(file: Path, key: str, table: schema.EnvironmentTable) -> None:
    if table.os.lower() != "linux":
        raise ConfigError([f"{file}: {key}.os: envkit has only Linux sandboxes, got {table.os!r}"])


def _require_main(place: str, service: str) -> None:
    if service not in ("", "main"):
        raise ConfigError([f"{place}: envkit plays tasks with one container, main; got {service!r}"])


def _note_users(found: schema.TaskFile, profile: Profile, notes: list[str]) -> None:
    runs_as = "root" if profile == "system" else "the user agent"
    users = {"agent.user": found.agent.user, **{f"steps.{one.name}.agent.user": one.agent.user for one in found.steps}}
    for key, user in users.items():
        if user is not None and (user in ("root", 0)) != (profile == "system"):
            notes.append(f"{key}: {user}: programs of the agent run as {runs_as}")
    if found.verifier.user not in (None, "root", 0):
        notes.append(f"verifier.user: {found.verifier.user}: tests run as root")


def _instruction(folder: Path) -> str:
    """Return the instruction without the canaries that data sets put at its top, to find copies of themselves."""
    lines = read_text(folder / "instruction.md").splitlines(keepends=True)
    start = 0
    while start < len(lines) and _CANARY.match(lines[start]):
        start += 1
    text = "".join(lines[start:])
    return text.lstrip("\n") if start else text


def _artifacts(place: str, entries: Sequence[str | Artifact]) -> tuple[Artifact, ...]:
    """Return artifacts. Harbor's key ``destination``, a folder on the host, is ignored."""
    found = []
    for entry in entries:
        artifact = Artifact(source=entry) if isinstance(entry, str) else entry
        _require_main(place, artifact.service)
        path = PurePosixPath(artifact.source)
        if not path.is_absolute() or ".." in path.parts:
            raise ConfigError([f"{place}: must be an absolute path without .., got {artifact.source!r}"])
        found.append(replace(artifact, source=str(path)))
    return tuple(found)
