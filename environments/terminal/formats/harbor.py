"""Tasks in the format of Harbor: folders with ``task.toml``, ``instruction.md``, ``environment``, ``tests`` and more.

envkit's own keys are in the table ``[metadata.envkit]``, and a folder ``cheats`` may have scripts beside ``solution``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path, PurePosixPath

import yaml
from msgspec.structs import replace

from envkit.errors import ConfigError

from ..images import ignored, last_stage, workdir_of
from ..tasks import WORK, Artifact, Collect, Healthcheck, Profile, TaskStep, TerminalTask, Verifier
from . import schema
from .files import read_text, require_usable
from .writing import write_task

__all__ = ["read_task", "write_task"]

_CANARY = re.compile(r"\s*(<!--.*canary.*-->|#.*canary.*)", re.IGNORECASE)
_PUBLISHED = "/logs/artifacts"
"""Folder that Harbor collects as an artifact of every task."""
_NO_GPU = "environment.{}: sandboxes of envkit have no accelerators"
_SERVICE_KEYS = {"build", "image", "container_name", "command", "entrypoint", "init", "stdin_open", "tty", "restart"}


def read_task(folder: Path, variables: Collection[str] = ()) -> TerminalTask:
    """Read a task.

    Unsupported settings that envkit can ignore are in the notes of the task. If a file with the table
    ``[metadata.envkit]`` does not say where the tests run, they have a sandbox of their own.

    Args:
        folder: Folder of the task.
        variables: Names of the environment variables of this process that the task may read as ``${NAME}``.

    Raises:
        ConfigError: A file is missing or malformed, or envkit cannot play the task. The message names file and key.
    """
    file = folder / "task.toml"
    require_usable(folder)
    found = schema.read_file(file)
    own, settings = found.metadata.envkit or schema.EnvkitTable(), found.environment
    is_own = found.metadata.envkit is not None
    if is_own and found.verifier.mode is None:
        found = replace(found, verifier=replace(found.verifier, environment_mode="separate"))
    notes: list[str] = []
    cheats = {path.stem: path for path in sorted((folder / "cheats").glob("*.sh"))}
    environment = folder / "environment"
    _require_playable(file, found, environment, notes)
    profile: Profile = own.profile or ("strict" if own.portable else "system")
    network = found.agent.network(_network(settings))
    artifacts = _artifacts(f"{file}: artifacts", found.artifacts)
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
            workdir = workdir or workdir_of(environment / "Dockerfile")
            notes.extend(ignored(last_stage(environment / "Dockerfile")))
        _note_users(found, profile, notes)
    steps = tuple(_steps(folder, file, found, network, variables, notes))
    is_separate = any(step.verifier.is_separate for step in steps)
    if is_separate and not is_own and _PUBLISHED not in {artifact.source for artifact in artifacts}:
        artifacts = (Artifact(source=_PUBLISHED), *artifacts)
    return TerminalTask(
        name=found.task.name if found.task else folder.resolve().name,
        folder=folder,
        steps=steps,
        environment=environment,
        image=schema.image_name(f"{file}: environment.docker_image", settings.docker_image),
        is_portable=own.portable,
        setup=own.setup,
        programs=own.programs,
        packages=own.packages,
        profile=profile,
        workdir=workdir,
        workdir_of_image=not settings.workdir and not own.portable,
        env=schema.resolved(f"{file}: environment.env", settings.env, variables),
        cpus=settings.cpus,
        memory_mib=_size(file, "memory", settings.memory_mb, settings.memory),
        disk_mib=_size(file, "storage", settings.storage_mb, settings.storage),
        pids=own.pids,
        network=network,
        healthcheck=_healthcheck(settings.healthcheck),
        solution_env=schema.resolved(f"{file}: solution.env", found.solution.env, variables),
        artifacts=artifacts,
        reward=found.multi_step_reward_strategy,
        difficulty=str(found.metadata.difficulty),
        category=str(found.metadata.category),
        cheats=cheats,
        notes=tuple(dict.fromkeys(notes)),
    )


def _steps(
    folder: Path,
    file: Path,
    found: schema.TaskFile,
    network: str | tuple[str, ...],
    variables: Collection[str],
    notes: list[str],
) -> Iterator[TaskStep]:
    if not found.steps:
        yield TaskStep(
            instruction=_instruction(folder),
            verifier=_verifier(folder, file, "verifier", found.verifier, None, network, variables, notes),
            solution=_solution(folder),
            timeout_s=found.agent.timeout_sec,
        )
        return
    if len({step.name for step in found.steps}) < len(found.steps):
        raise ConfigError([f"{file}: steps: names must be different"])
    for step in found.steps:
        place = f"steps.{step.name}"
        if not step.name or step.name in (".", "..") or "/" in step.name:
            raise ConfigError([f"{file}: steps.name: must be the name of a folder in steps, got {step.name!r}"])
        part = folder / "steps" / step.name
        if step.agent.network_mode is not None and step.agent.network(network) != network:
            notes.append(f"{place}.agent.network_mode: all steps have the network of the environment")
        yield TaskStep(
            name=step.name,
            instruction=_instruction(part),
            verifier=_verifier(
                folder, file, place + ".verifier", step.verifier, (part, found.verifier), network, variables, notes
            ),
            solution=_solution(part),
            setup=_setup(part, place, notes),
            timeout_s=step.agent.timeout_sec or found.agent.timeout_sec,
            min_reward=_min_reward(file, place, step.min_reward),
            artifacts=_artifacts(f"{file}: {place}.artifacts", step.artifacts),
            healthcheck=_healthcheck(step.healthcheck),
        )


def _verifier(
    folder: Path,
    file: Path,
    key: str,
    table: schema.VerifierTable,
    step: tuple[Path, schema.VerifierTable] | None,
    network: str | tuple[str, ...],
    variables: Collection[str],
    notes: list[str],
) -> Verifier:
    """Return the verifier of a table. Keys that a step's table lacks come from the table of the task.

    The tests of a step are in its own folder, or else in that of the task.
    """
    tests, mode, environment, collect = folder / "tests", table.mode, table.environment, table.collect
    env = table.env
    if step is not None:
        part, shared = step
        mode, environment = mode or shared.mode, environment or shared.environment
        env, collect = {**shared.env, **env}, (*shared.collect, *collect)
        if (part / "tests" / "test.sh").is_file():
            if tests.is_dir():
                notes.append(f"{key}: of the folders tests and {part.name}/tests, only the second one is used")
            tests = part / "tests"
    if not (tests / "test.sh").is_file():
        raise ConfigError([f"{file}: {key}: {tests / 'test.sh'} is missing"])
    with (tests / "test.sh").open("rb") as opened:
        if b"\r\n" in opened.read(4096):
            notes.append(f"{key}: {tests.name}/test.sh has CR LF line ends, with which shells fail")
    if table.environment_mode == "shared" and table.environment is not None:
        raise ConfigError([f'{file}: {key}.environment: needs environment_mode = "separate"'])
    if table.network(network) not in (network, "none"):
        notes.append(f"{key}.network_mode: the tests have the network of the environment")
    is_separate = mode == "separate"
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
    for one in collect:
        _require_main(f"{file}: {key}.collect.service", one.service)
    return Verifier(
        tests=tests,
        timeout_s=table.timeout_sec,
        env=schema.resolved(f"{file}: {key}.env", env, variables),
        is_separate=is_separate,
        dockerfile=dockerfile,
        image=image,
        collect=tuple(Collect(command=one.command, timeout_s=one.timeout_sec) for one in collect),
    )


def _require_playable(file: Path, found: schema.TaskFile, environment: Path, notes: list[str]) -> None:
    """Raise an error if envkit cannot play the task; add a note for what it ignores."""
    settings = found.environment
    _require_linux(file, "environment", settings)
    for key in ("gpus", "gpu_types", "tpu"):
        if getattr(settings, key):
            notes.append(_NO_GPU.format(key))
    if settings.mcp_servers:
        notes.append("environment.mcp_servers: the agent does not get the tools of MCP servers")
    if settings.skills_dir:
        notes.append("environment.skills_dir: the agent does not get skills")
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
    try:
        content = yaml.safe_load(read_text(file))
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        raise ConfigError([f"{file}: not valid YAML: {' '.join(str(error).split())}"]) from None
    services = content.get("services") if isinstance(content, dict) else None
    if not isinstance(services, dict) or not all(isinstance(service, dict) for service in services.values()):
        raise ConfigError([f"{file}: services: must be a mapping of services"])
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


def _require_main(place: str, service: str | None) -> None:
    if service not in (None, "", "main"):
        raise ConfigError([f"{place}: envkit plays tasks with one container, main; got {service!r}"])


def _note_users(found: schema.TaskFile, profile: Profile, notes: list[str]) -> None:
    runs_as = "root" if profile == "system" else "the user agent"
    users = {"agent.user": found.agent.user, **{f"steps.{one.name}.agent.user": one.agent.user for one in found.steps}}
    for key, user in users.items():
        if user is not None and (user in ("root", 0)) != (profile == "system"):
            notes.append(f"{key}: {user}: programs of the agent run as {runs_as}")
    if found.verifier.user not in (None, "root", 0):
        notes.append(f"verifier.user: {found.verifier.user}: tests run as root")


def _network(table: schema.EnvironmentTable) -> str | tuple[str, ...]:
    if table.network_mode is None and table.allow_internet is not None:
        return "open" if table.allow_internet else "none"
    return table.network("open")


def _size(file: Path, name: str, mib: int | None, text: str) -> int | None:
    return schema.size_mib(f"{file}: environment.{name}", text) if mib is None and text else mib


def _instruction(folder: Path) -> str:
    """Return the instruction without the canaries that data sets put at its top, to find copies of themselves."""
    lines = read_text(folder / "instruction.md").splitlines(keepends=True)
    start = 0
    while start < len(lines) and _CANARY.match(lines[start]):
        start += 1
    text = "".join(lines[start:])
    return text.lstrip("\n") if start else text


def _solution(folder: Path) -> Path | None:
    return folder / "solution" if (folder / "solution" / "solve.sh").is_file() else None


def _setup(part: Path, place: str, notes: list[str]) -> Path | None:
    work = part / "workdir"
    if not work.is_dir():
        return None
    if any(path.name != "setup.sh" for path in work.iterdir()):
        notes.append(f"{place}: of the folder workdir, only setup.sh is used")
    return work / "setup.sh" if (work / "setup.sh").is_file() else None


def _min_reward(file: Path, place: str, value: float | dict[str, float] | None) -> float | None:
    if not isinstance(value, dict):
        return value
    if value.keys() != {"reward"}:
        raise ConfigError([f"{file}: {place}.min_reward: envkit has one reward; give a number"])
    return value["reward"]


def _artifacts(place: str, entries: Sequence[str | schema.ArtifactTable]) -> tuple[Artifact, ...]:
    """Return artifacts. Harbor's key ``destination``, a folder on the host, is ignored."""
    found = []
    for entry in entries:
        table = schema.ArtifactTable(source=entry) if isinstance(entry, str) else entry
        _require_main(place, table.service)
        path = PurePosixPath(table.source)
        if not path.is_absolute() or ".." in path.parts:
            raise ConfigError([f"{place}: must be an absolute path without .., got {table.source!r}"])
        found.append(Artifact(source=str(path), exclude=table.exclude))
    return tuple(found)


def _healthcheck(table: schema.HealthcheckTable | None) -> Healthcheck | None:
    if table is None:
        return None
    return Healthcheck(
        command=table.command,
        interval_s=table.interval_sec,
        timeout_s=table.timeout_sec,
        start_period_s=table.start_period_sec,
        start_interval_s=table.start_interval_sec,
        retries=table.retries,
    )
