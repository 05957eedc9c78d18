"""Model folders that contain only an adapter in peft's format, and name the model to which it belongs."""

from __future__ import annotations

import json
from pathlib import Path

from envkit.errors import UsageError

CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def base_of(folder: Path) -> str | None:
    """Return the folder or hub name of the model to which the adapter in `folder` belongs; None without an adapter.

    Raises:
        UsageError: The file `CONFIG` is damaged, or the folder that it names does not exist.
    """
    path = folder / CONFIG
    try:
        content = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"{path}: cannot be read: {error}") from error
    base = content.get("base_model_name_or_path") if isinstance(content, dict) else None
    if not isinstance(base, str) or not base:
        raise UsageError(f"{path}: base_model_name_or_path is missing; set it to the folder or hub name of the model")
    if Path(base).is_absolute() and not Path(base).is_dir():
        raise UsageError(
            f"{folder}: the model of this adapter is not at {base}; move it there, or change base_model_name_or_path "
            f"in {path}"
        )
    return base
