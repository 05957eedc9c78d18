"""Build images for Docker sandboxes. The build itself has no network: pip on this machine first downloads the packages
as wheels for the base image's platform, and the build installs these wheels.

    games     envkit as it is installed here, with the dependencies of its server
    python    the given packages, without envkit

Each image has a file ``docker/NAME.Dockerfile``. The base image needs Python 3.11 or newer, but not pip.
"""

from __future__ import annotations

import importlib.metadata
import json
import re
import secrets
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path

from envkit import clock
from envkit.errors import SandboxError, UsageError, did_you_mean
from envkit.types import SandboxSpec

from .api import Daemon, DaemonError
from .backend import DockerBackend
from .images import OFFLINE_BASE, ONLINE_BASE

_PACKAGE = Path(__file__).parents[2]
_DOCKERFILES = _PACKAGE.parent / "docker"
_STAGE_LABEL = "envkit.stage"
_EXTRAS = ("serve",)
_OLDEST_PYTHON = (3, 11)
_OLDEST_GLIBC_MINOR = 17
_PROBE_S = 30.0
_PIP_S = 900.0
_LINES_SHOWN = 5
_ASK = "import json, platform, sys;print(json.dumps([sys.version_info[:2], platform.machine(), platform.libc_ver()]))"


def names() -> list[str]:
    """Return the names of the images that can be built. Only a checkout of envkit contains their Dockerfiles."""
    return sorted(path.name.removesuffix(".Dockerfile") for path in _DOCKERFILES.glob("*.Dockerfile"))


async def build(
    name: str,
    *,
    base: str | None,
    offline: bool,
    packages: Sequence[str],
    tag: str | None,
    announce: Callable[[str], None],
    data: Mapping[str, Path] | None = None,
) -> str:
    """Build an image and return its tag.

    Args:
        name: Name of the image; see `names`.
        base: Base image; None means `ONLINE_BASE`, or `OFFLINE_BASE` if `offline`.
        offline: Whether to raise an error if the base image is missing, instead of pulling it. pip ignores this; it
            uses the package index in its own configuration, which may be a local folder.
        packages: Additional packages in pip's notation; a path means a project or wheel on this machine.
        tag: Tag of the image; None means ``envkit/NAME:1``.
        announce: Called with each progress message, which is one line.
        data: Folders with data of environments by name, for the image ``games``; it has them in ``/data``.

    Raises:
        UsageError: The name is unknown, the base image is missing or unsuitable, or this image takes no data.
        SandboxError: A package cannot be fetched, a build step failed, or the daemon does not answer.
    """
    if name not in names():
        where = "" if names() else f" ({_DOCKERFILES} has no Dockerfiles; build from a checkout of envkit)"
        raise UsageError(f"there is no image {name!r}{where or did_you_mean(name, names())}")
    if data and name != "games":
        raise UsageError(f"--data: the image {name} has no environments; build the image games")
    base = base or (OFFLINE_BASE if offline else ONLINE_BASE)
    tag = tag or f"envkit/{name}:1"
    async with aclosing(await Daemon.connect()) as daemon:
        await _require_base(daemon, base, offline=offline, announce=announce)
        platform = await _platform(base)
        announce(f"fetching packages for Python {platform.python} on {platform.machine}")
        with tempfile.TemporaryDirectory(prefix="envkit-image-") as folder:
            context = Path(folder)
            await clock.to_thread(_gather, context, name, platform, packages)
            for one, source in (data or {}).items():
                await clock.to_thread(shutil.copytree, source, context / "data" / one)
            announce(f"building {tag} on {base}")
            await _build(daemon, context, tag, base, announce)
    return tag


async def _build(daemon: Daemon, context: Path, tag: str, base: str, announce: Callable[[str], None]) -> None:
    """Build the image, then remove the intermediate build stages and the image that previously had this tag."""
    before = await daemon.image(tag)
    build_id = secrets.token_hex(8)
    arguments = {"BASE": base, "BUILD": build_id}
    try:
        await daemon.build(context, tag=tag, arguments=arguments, report=announce)
    finally:
        for stage in await daemon.images(f"{_STAGE_LABEL}={build_id}"):
            await daemon.remove_image(stage["Id"])
    after = await daemon.image(tag)
    if before is not None and after is not None and before.id != after.id:
        await daemon.remove_image(before.id)


@dataclass(frozen=True, slots=True)
class _Platform:
    """Platform of the base image: Python version such as ``"3.11"``, machine, and glibc version."""

    python: str
    machine: str
    glibc: tuple[int, int]

    def pip_options(self) -> Iterator[str]:
        yield from ("--only-binary", ":all:", "--implementation", "cp", "--python-version", self.python)
        for minor in range(self.glibc[1], _OLDEST_GLIBC_MINOR - 1, -1):
            yield from ("--platform", f"manylinux_{self.glibc[0]}_{minor}_{self.machine}")
        for older in ("manylinux2014", "manylinux2010", "manylinux1", "linux"):
            yield from ("--platform", f"{older}_{self.machine}")


async def _require_base(daemon: Daemon, base: str, *, offline: bool, announce: Callable[[str], None]) -> None:
    if await daemon.image(base) is not None:
        return
    if base == OFFLINE_BASE:
        raise UsageError(f"there is no image {base} here; make it with docker/base-from-debootstrap, as root on Debian")
    if offline:
        raise UsageError(f"there is no image {base!r} here{did_you_mean(base, await daemon.image_names())}")
    announce(f"fetching {base}")
    try:
        await daemon.pull(base)
    except DaemonError as error:
        raise UsageError(
            f"there is no image {base} here, and it cannot be fetched ({error}); use another --base"
        ) from None


async def _platform(base: str) -> _Platform:
    """Return the platform of a base image, by running its Python in a sandbox."""
    async with DockerBackend() as backend:
        sandbox = await backend.start(SandboxSpec(image=base))
        answer = await sandbox.exec(["python3", "-c", _ASK], timeout_s=_PROBE_S)
    try:
        python, machine, (library, version) = json.loads(answer.stdout)
    except ValueError:
        last = (answer.stderr.strip().splitlines() or ["it has no Python"])[-1]
        raise UsageError(f"base image {base} needs a complete Python 3.11 or newer: {last}") from None
    if tuple(python) < _OLDEST_PYTHON:
        raise UsageError(f"base image {base} has Python {python[0]}.{python[1]}; envkit needs 3.11 or newer")
    if library != "glibc":
        raise UsageError(f"base image {base} has no glibc, which most packages need; use a Debian-like base image")
    major, minor = version.split(".")[:2]
    return _Platform(f"{python[0]}.{python[1]}", machine, (int(major), int(minor)))


def _gather(context: Path, name: str, platform: _Platform, packages: Sequence[str]) -> None:
    """Write the image's build context, including the downloaded wheels, into the folder `context`."""
    shutil.copyfile(_DOCKERFILES / f"{name}.Dockerfile", context / "Dockerfile")
    wheels = context / "wheels"
    wheels.mkdir()
    wanted = list(_own_requirements()) if name == "games" else []
    for package in packages:
        wanted.append(_own_wheel(Path(package), wheels) if Path(package).exists() else package)
    requirements = wheels / "requirements.txt"
    requirements.write_text("".join(f"{requirement}\n" for requirement in wanted))
    _pip("download", "pip", *wanted, "--dest", str(wheels), "--find-links", str(wheels), *platform.pip_options())
    if name == "games":
        (context / "data").mkdir()
        shutil.copytree(_PACKAGE, context / "envkit", ignore=shutil.ignore_patterns("__pycache__"))


def _own_requirements() -> Iterator[str]:
    """Yield the requirements of envkit and of its extra ``serve``."""
    for requirement in importlib.metadata.requires("envkit") or ():
        text, _, marker = requirement.partition(";")
        extra = re.fullmatch(r"\s*extra == ['\"]([\w-]+)['\"]\s*", marker)
        if not marker or (extra and extra[1] in _EXTRAS):
            yield text.strip()


def _own_wheel(path: Path, wheels: Path) -> str:
    """Build the wheel of a local project into the folder `wheels`, and return the name of the package."""
    before = set(wheels.iterdir())
    _pip("wheel", "--no-deps", "--wheel-dir", str(wheels), str(path))
    made = sorted(set(wheels.iterdir()) - before)
    if len(made) != 1:
        raise SandboxError(f"{path} does not build exactly one wheel; pass a Python project or a wheel")
    return made[0].name.partition("-")[0]


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=_PIP_S, check=False)
    if done.returncode != 0:
        output = "\n".join((done.stderr.strip() or done.stdout.strip()).splitlines()[-_LINES_SHOWN:])
        raise SandboxError(f"pip {arguments[0]} failed: {output}")
