"""Metadata of a saved policy, in the file ``envkit-policy.json`` of its folder."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path

from envkit.errors import UsageError
from envkit.types import Options

POLICY_FILE = "envkit-policy.json"
_FORMAT = 1


@dataclass(frozen=True, slots=True)
class SavedPolicy:
    """Metadata of a policy: its kind, and the environment and settings with which it was trained.

    Attributes:
        tiny: Whether this is a tiny policy, which envkit created with the vocabulary of its environment.
        env_id: Environment in which the policy was trained.
        options: Options of that environment.
        turn_tokens: Maximum number of tokens of a completion in training; None if unknown.
        renderer: The configuration section ``renderer`` of the training run.
    """

    tiny: bool
    env_id: str
    options: Options
    turn_tokens: int | None = None
    renderer: Options = field(default_factory=dict)

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
        try:
            content = json.loads(path.read_bytes())
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (OSError, ValueError) as error:
            raise UsageError(f"{path}: cannot be read: {error}") from error
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
            )
        except (KeyError, TypeError, ValueError) as error:
            raise UsageError(f"{path}: is damaged: {error!r}") from error
