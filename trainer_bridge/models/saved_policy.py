"""What a policy folder that envkit saved says about itself, in ``envkit-policy.json``."""

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
    """What a policy is and what it was trained on.

    Attributes:
        tiny: Whether envkit made it from a config, with a vocabulary of its environment's words.
        env_id: Environment that it was trained on.
        options: Options of that environment.
        turn_tokens: Bound on one completion in training; None if it is not known.
        renderer: Keys of the section ``renderer`` with which it was trained.
    """

    tiny: bool
    env_id: str
    options: Options
    turn_tokens: int | None = None
    renderer: Options = field(default_factory=dict)

    def write(self, folder: Path) -> None:
        """Write it into a policy folder.

        Raises:
            OSError: It cannot be written.
        """
        content = {"format": _FORMAT, **asdict(self)}
        (folder / POLICY_FILE).write_text(json.dumps(content, indent=2, default=str) + "\n")

    @classmethod
    def read(cls, folder: Path) -> SavedPolicy | None:
        """Read it from a folder; None for a folder that envkit did not save.

        Raises:
            UsageError: It is damaged or of another format.
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
            raise UsageError(f"{path}: has format {found}, and this version of envkit reads {_FORMAT}")
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
