"""The cache of converted models: each is made once, by one process at a time, and appears whole or not at all."""

from __future__ import annotations

import fcntl
import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from tempfile import mkdtemp

from ..run_folder.writing import share_weights, writing
from .catalogue import is_model

REMEDY = "free some space, or choose another cache folder with ENVKIT_CACHE"


def make_once(place: Path, make: Callable[[Path, Path], None], *, say: Callable[[str], None]) -> bool:
    """Make the model folder `place` if it is missing, and remove what killed calls left beside it.

    Args:
        place: Folder of the model.
        make: Writes the model into its second argument; its first is a folder for temporary files on the same disk.
        say: Shows a line.

    Returns:
        Whether `make` was called.

    Raises:
        UsageError: The disk is full or the folder cannot be written.
    """
    folder, drafts = place.parent, f".{place.name}.*.part"
    if is_model(place) and not any(folder.glob(drafts)):
        return False
    with writing(folder, remedy=REMEDY):
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / f".{place.name}.lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                say(f"{place.name}: waiting for another process that makes it")
                fcntl.flock(lock, fcntl.LOCK_EX)
            for left in folder.glob(drafts):
                shutil.rmtree(left, ignore_errors=True)
            if is_model(place):
                return False
            draft = Path(mkdtemp(prefix=f".{place.name}.", suffix=".part", dir=folder))
            try:
                made = draft / "model"
                made.mkdir()
                make(draft, made)
                share_weights(made)
                made.replace(place)
            finally:
                shutil.rmtree(draft, ignore_errors=True)
    return True


def name_of(file: Path) -> str:
    """Return the name of a GGUF file's conversion in the cache: a hash of its content."""
    with file.open("rb") as opened:
        return f"gguf-{hashlib.file_digest(opened, 'sha256').hexdigest()[:32]}"
