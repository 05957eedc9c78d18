"""What a model folder says about itself: the metadata of a saved policy, and the model that an adapter belongs to."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from envkit.errors import UsageError
from envkit.types import Options

POLICY_FILE = "envkit-policy.json"
ADAPTER_CONFIG = "adapter_config.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """Metadata of a policy: its kind, and the environments and settings with which it was trained.

    Attributes:
        tiny: Whether this is a tiny policy, which envkit created with the vocabulary of its environment.
        env_id: Environment in which the policy was trained; the first one if there were several.
        options: Options of that environment.
        turn_tokens: Maximum number of tokens of a completion in training; None if unknown.
        renderer: The configuration section ``renderer`` of the training run.
        other_envs: Further environments in which the policy was trained: their options by id.
    """

    tiny: bool
    env_id: str
    options: Options
    turn_tokens: int | None = None
    renderer: Options = field(default_factory=dict)
    other_envs: Mapping[str, Options] = field(default_factory=dict)

    @property
    def env_ids(self) -> list[str]:
        """Ids of all environments in which the policy was trained."""
        return [self.env_id, *self.other_envs]

    def options_for(self, env_id: str) -> Options | None:
        """Return the options with which the policy was trained in `env_id`; None if it was not trained there."""
        return self.options if env_id == self.env_id else self.other_envs.get(env_id)

    def write(self, folder: Path) -> None:
        """Write the metadata into a policy folder."""
        content = {"format": _FORMAT, **asdict(self)}
        (folder / POLICY_FILE).write_text(json.dumps(content, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, folder: Path) -> SavedPolicy | None:
        """Return the metadata in a policy folder; None if the folder has no metadata, because envkit did not save it.

        Raises:
            UsageError: The file is damaged or has another format.
        """
        path = folder / POLICY_FILE
        if (content := _read(path)) is None:
            return None
        found = content.get("format") if isinstance(content, dict) else None
        if found != _FORMAT:
            raise UsageError(f"{path}: has format {found}, but this version of envkit reads format {_FORMAT}")
        try:
            return cls(
                tiny=bool(content["tiny"]),
                env_id=str(content["env_id"]),
                options=dict(content["options"]),
                turn_tokens=content.get("turn_tokens"),
                renderer=dict(content.get("renderer", {})),
                other_envs={str(id): dict(options) for id, options in content.get("other_envs", {}).items()},
            )
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: is damaged: {error!r}") from error


def base_of(folder: Path) -> str | None:
    """Return the folder or hub name of the model to which the adapter in `folder` belongs; None without an adapter.

    Raises:
        UsageError: The file `ADAPTER_CONFIG` is damaged, or the folder that it names does not exist.
    """
    path = folder / ADAPTER_CONFIG
    if (content := _read(path)) is None:
        return None
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path}: base_model_name_or_path is missing; set it to the folder or hub name of the model")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UsageError(
            f"{folder}: the model of this adapter is not at {base}; move it there, or change base_model_name_or_path "
            f"in {path}"
        )
    return base


def _read(path: Path) -> Any:
    """Return the content of a JSON file; None if it is missing."""
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
