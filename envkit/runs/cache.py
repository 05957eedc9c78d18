"""The cache of converted models and of data. Each folder is created once, atomically, by one process at a time."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from envkit.runs.files import share_weights, writing

REMEDY = "free some space, or choose another cache folder with ENVKIT_CACHE"


def cache_folder() -> Path:
    """Return envkit's cache: ``$ENVKIT_CACHE``, else ``$XDG_CACHE_HOME/envkit``, else ``~/.cache/envkit``."""
    if own := os.environ.get("ENVKIT_CACHE"):
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "envkit"


def make_once(
    target: Path,
    make: Callable[[Path, Path], None],
    *,
    announce: Callable[[str], None],
    is_made: Callable[[Path], bool],
) -> bool:
    """Create the folder `target` if it is missing, and remove temporary files that killed processes left.

    Args:
        target: Folder of a model or of data.
        make: Function that fills its second argument, a folder. Its first argument is a folder on the same disk for
            temporary files.
        announce: Shows a line to the user.
        is_made: Whether a folder is complete.

    Returns:
        Whether `make` was called.

    Raises:
        UsageError: The disk is full or the folder cannot be written.
    """
    folder, drafts = target.parent, f".{target.name}.*.part"
    if is_made(target) and not any(folder.glob(drafts)):
        return False
    with writing(folder, remedy=REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{target.name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                announce(f"{target.name}: waiting for another process that is creating it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(drafts):
                shutil.rmtree(left, ignore_errors=True)
            if is_made(target):
                return False
            draft = Path(mkdtemp(prefix=f".{target.name}.", suffix=".part", dir=folder))
            try:
                made = draft / "model"
                made.mkdir()
                make(draft, made)
                share_weights(made)
                made.replace(target)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return True


def name_of(file: Path) -> str:
    """Return the folder name, in the cache, of the model converted from a GGUF file; it has a hash of the content."""
    with file.open("rb") as opened:
        return f"gguf-{hashlib.file_digest(opened, 'sha256').hexdigest()[:32]}"
