"""Build images from Dockerfiles of users, whose build may use the network of this machine."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

from envkit import clock
from envkit.errors import SandboxError

from .api import Daemon, DaemonError
from .images import OFFLINE_BASE

_BASE = re.compile(r"^\s*ARG\s+BASE=\"?([^\"\s]+)", re.IGNORECASE | re.MULTILINE)
_STEP = re.compile(r"Step (\d+)/\d+ :")
_FROM = re.compile(r"\s*FROM\s", re.IGNORECASE)


async def build_folder(
    daemon: Daemon,
    tag: str,
    dockerfile: str,
    context: Path | None,
    *,
    base: str | None = None,
    timeout_s: float,
    report: Callable[[str], None],
) -> None:
    """Build an image with the network of this machine.

    A Dockerfile with ``ARG BASE=NAME`` builds on `base`. Without one, it builds on `OFFLINE_BASE` if this machine has
    that image, but not the image NAME.

    Args:
        daemon: The Docker daemon.
        tag: Tag of the image.
        dockerfile: Content of the Dockerfile.
        context: Folder with the files that the Dockerfile can copy; None for none. Its file ``.dockerignore`` counts.
        base: Base image; None for the default.
        timeout_s: Seconds after which the build fails; at most twice as many if a command prints nothing.
        report: Called with a line of text when a build step begins.

    Raises:
        SandboxError: A build step failed; the message names the line of the Dockerfile, and has the last output.
        DaemonError: The daemon does not answer.
    """
    arguments = await _base_argument(daemon, dockerfile, base)
    step = 0

    def on_step(line: str) -> None:
        nonlocal step
        step = int(match[1]) if (match := _STEP.match(line)) else step
        report(line)

    start = clock.now()
    try:
        source = dockerfile if context is None else context
        await daemon.build(source, tag=tag, arguments=arguments, report=on_step, network="host", timeout_s=timeout_s)
    except DaemonError as error:
        late = f" (after the timeout of {timeout_s:g} s)" if clock.now() - start >= timeout_s else ""
        lines = dict(enumerate(_instructions(dockerfile), 1))
        if step not in lines:
            raise
        number, text = lines[step]
        hint = ""
        if _FROM.match(text):
            hint = (
                f"; without a registry, use a Dockerfile with ARG BASE and FROM ${{BASE}}, and the image {OFFLINE_BASE}"
            )
        where = f"line {number} of the Dockerfile, `{text}`, failed{late}"
        raise SandboxError(f"image {tag}: {where}:\n{error}{hint}") from None


async def _base_argument(daemon: Daemon, dockerfile: str, base: str | None) -> dict[str, str]:
    match = _BASE.search(dockerfile)
    if match is None:
        return {}
    if base is not None:
        return {"BASE": base}
    if await daemon.image(match[1]) is None and await daemon.image(OFFLINE_BASE) is not None:
        return {"BASE": OFFLINE_BASE}
    return {}


def _instructions(dockerfile: str) -> Iterator[tuple[int, str]]:
    """Yield the number of the first line of each instruction, and that line."""
    goes_on = False
    for number, line in enumerate(dockerfile.splitlines(), 1):
        text = line.strip()
        if not text or text.startswith("#"):
            continue
        if not goes_on:
            yield number, text
        goes_on = text.endswith("\\")
