"""Metadata of a saved policy folder, in ``envkit-policy.json``."""

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
    """The kind of a policy, and the environment and settings of its training.

    Attributes:
        tiny: Whether it is a tiny policy, created by envkit with the vocabulary of its environment.
        env_id: Environment of its training.
        options: Options of that environment.
        turn_tokens: Maximum number of tokens of a completion in training; None if unknown.
        renderer: Keys of the section ``renderer`` in training.
    """

    tiny: bool
    env_id: str
    options: Options
    turn_tokens: int | None = None
    renderer: Options = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write the metadata into a policy folder.

        Raises:
            OSError: The file cannot be written.
        """
        content = {"format": _FORMAT, **asdict(self)}
        (folder / POLICY_FILE).write_text(json.dumps(content, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, folder: Path) -> SavedPolicy | None:
        """Read the metadata of a folder; None if envkit did not save the folder.

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
