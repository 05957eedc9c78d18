"""vLLM middleware: the route that fetches weights of a trainer on another machine, while the server generates.

It runs in vLLM's API server. The files lie in memory, or else in the folder for temporary files; they stay until newer
ones replace them, because the next delta needs them. What killed servers have left is removed at the next start.

A delta has the changed 16-bit words of a file against an older file of the same size.
Both files are read as little-endian 16-bit words, whatever their tensors are. A delta has one block for each
`BLOCK_WORDS` words, in order. A block is two unsigned 32-bit little-endian integers, the number of changed words and
the size of what follows in bytes, and then, unless no word has changed, a zlib stream of three parts:

1. one bit for each word of the block, the most significant bit of a byte first: 1 if it has changed. The last byte is
   filled up with zeros;
2. the low bytes of ``old XOR new`` of the changed words, in order;
3. the high bytes of the same.

A delta has no checksum: the receiver checks that of the new file.
"""

from __future__ import annotations

import asyncio
import atexit
import fcntl
import json
import os
import shutil
import struct
import tempfile
import threading
import urllib.error
import urllib.request
import zlib
from collections.abc import Awaitable, Callable, Iterator, Mapping, MutableMapping
from contextlib import ExitStack, contextmanager, suppress
from hashlib import blake2b
from http.client import HTTPException
from pathlib import Path
from typing import IO, Any

import numpy as np

PATH = "/envkit/fetch_weights"
MANIFEST = "manifest.json"
DELTA = ".delta"
"""End of the name of a delta."""
BLOCK_WORDS = 1 << 22
_HEAD = struct.Struct("<II")
_WORD = np.dtype("<u2")
MEMORY = Path("/dev/shm")
"""A file system in memory, on Linux."""
_CHUNK = 1 << 22
_TIMEOUT_S = 60.0
"""Maximum seconds without a byte of the trainer's."""

Message = MutableMapping[str, Any]


class FetchError(Exception):
    """The weights cannot be fetched; those that the server samples with are unchanged. The message is the reason."""


class Store:
    """The files of the newest weights that were fetched.

    They are in a new folder in `parent`; None: in memory if they fit twice, or else in the folder for temporary files.
    """

    def __init__(self, parent: Path | None = None) -> None:
        self._parent = parent
        self._folder: Path | None = None
        self._checksums: dict[str, str] = {}
        self._fetching = threading.Lock()
        self._open = urllib.request.build_opener(urllib.request.ProxyHandler({})).open

    def fetch(self, url: str) -> dict[str, Any]:
        """Fetch the weights whose manifest is at `url`; files that are here already are not fetched again.

        Returns:
            The folder with the files (``path``), and the number of bytes that were transferred (``bytes``).

        Raises:
            FetchError: The trainer does not answer, a file is damaged, or there is no room for it.
        """
        host = "/".join(url.split("/")[:3])  # the rest of the URL is a secret
        with self._fetching:
            try:
                with self._open(f"{url}/{MANIFEST}", timeout=_TIMEOUT_S) as reply:
                    files: list[dict[str, Any]] = json.load(reply)["files"]
                folder = self._folder = self._folder or self._open_folder(sum(one["bytes"] for one in files))
                for name in self._checksums.keys() - {one["name"] for one in files}:
                    del self._checksums[name]
                    (folder / name).unlink()
                return {"path": str(folder), "bytes": sum(self._fetch(folder, url, one) for one in files)}
            except OSError as error:
                reason = getattr(error, "reason", error)
                advice = "; if this machine cannot reach that address, set engine.weights_url or engine.weights_folder"
                is_connection = isinstance(error, urllib.error.URLError | ConnectionError | TimeoutError)
                raise FetchError(f"cannot fetch weights from {host}: {reason}{advice * is_connection}") from error
            except (ValueError, KeyError, TypeError, HTTPException) as error:
                raise FetchError(f"cannot fetch weights from {host}: {error}") from error

    def _fetch(self, folder: Path, url: str, file: Mapping[str, Any]) -> int:
        """Fetch one file of a manifest, and return the number of bytes that were transferred."""
        name, checksum, delta = str(file["name"]), file["blake2b"], file.get("delta")
        if Path(name).name != name:
            raise ValueError(f"invalid file name {name!r}")
        before = self._checksums.get(name)
        if before == checksum:
            return 0
        is_delta = delta is not None and delta["base"] == before
        found, draft = blake2b(digest_size=32), folder / f"{name}.part"
        try:
            with (
                self._open(f"{url}/{name}{DELTA if is_delta else ''}", timeout=_TIMEOUT_S) as reply,
                draft.open("wb") as out,
            ):
                for part in decode(folder / name, reply) if is_delta else _parts(reply):
                    found.update(part)
                    out.write(part)
            if found.hexdigest() != checksum:
                raise ValueError(f"{name} has the wrong checksum")
        except BaseException:
            self._checksums.pop(name, None)  # the next attempt fetches all of it
            draft.unlink(missing_ok=True)
            raise
        draft.replace(folder / name)
        self._checksums[name] = checksum
        return int(delta["bytes"] if is_delta else file["bytes"])

    def _open_folder(self, size: int) -> Path:
        parent = self._parent or Path(tempfile.gettempdir())
        if self._parent is None and MEMORY.is_dir() and shutil.disk_usage(MEMORY).free > 2 * size:
            parent = MEMORY
        kept = ExitStack()
        atexit.register(kept.close)
        return kept.enter_context(locked_folder(parent, f"envkit-fetched-{os.geteuid()}-"))


@contextmanager
def locked_folder(parent: Path, prefix: str) -> Iterator[Path]:
    """Make a private folder in `parent`, whose name begins with `prefix`, and remove it at the end.

    It is locked as long as this process lives. Those that dead processes have left are removed first.

    Raises:
        OSError: It cannot be made.
    """
    for left in parent.glob(f"{prefix}*"):
        with suppress(OSError), _locked(left):
            shutil.rmtree(left)
    draft = Path(tempfile.mkdtemp(prefix="envkit-new-", dir=parent))
    with _locked(draft):
        # Now that it is locked, nobody else removes it.
        folder = draft.rename(parent / f"{prefix}{draft.name.rpartition('-')[2]}")
        try:
            yield folder
        finally:
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Lock a folder; raise `BlockingIOError` if a living process has locked it."""
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(handle)


class FetchRoute:
    """ASGI middleware that answers POST requests for `PATH` and passes all others on.

    The body of a request is ``{"url": URL}``: that of the manifest without its name.
    """

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._store = Store()

    async def __call__(
        self,
        scope: Message,
        receive: Callable[[], Awaitable[Message]],
        send: Callable[[Message], Awaitable[None]],
    ) -> None:
        if scope["type"] != "http" or scope["path"] != PATH:
            await self._app(scope, receive, send)
            return
        from starlette.requests import Request  # imported here, because only vLLM's processes need it
        from starlette.responses import JSONResponse

        try:
            url = str((await Request(scope, receive).json())["url"])
            answer = JSONResponse(await asyncio.to_thread(self._store.fetch, url))
        except (FetchError, ValueError, KeyError, TypeError) as error:
            answer = JSONResponse({"error": {"message": str(error)}}, 500 if scope["method"] == "POST" else 405)
        await answer(scope, receive, send)


def _parts(file: IO[bytes]) -> Iterator[bytes]:
    while part := file.read(_CHUNK):
        yield part


def fits(old: Path, new: Path) -> bool:
    """Whether a delta between two files is possible."""
    size = new.stat().st_size
    return old.is_file() and old.stat().st_size == size and size > 0 and size % _WORD.itemsize == 0


def encode(old: Path, new: Path) -> Iterator[bytes]:
    """Yield the blocks of the delta from `old` to `new`; see `fits`."""
    before, after = (np.memmap(path, _WORD, "r") for path in (old, new))
    for start in range(0, len(after), BLOCK_WORDS):
        change = before[start : start + BLOCK_WORDS] ^ after[start : start + BLOCK_WORDS]
        is_changed = change != 0
        words = change[is_changed]
        content = b""
        if words.size:
            parts = words.view(np.uint8).reshape(-1, 2).T
            content = zlib.compress(np.packbits(is_changed).tobytes() + parts.tobytes(), 1)
        yield _HEAD.pack(words.size, len(content)) + content


def decode(old: Path, delta: IO[bytes]) -> Iterator[memoryview]:
    """Yield the content of the new file.

    Raises:
        ValueError: The delta is damaged, or of another file.
    """
    before = np.memmap(old, _WORD, "r")
    for start in range(0, len(before), BLOCK_WORDS):
        words = np.array(before[start : start + BLOCK_WORDS])
        count, size = _HEAD.unpack(_exactly(delta, _HEAD.size))
        if count:
            try:
                content = np.frombuffer(zlib.decompress(_exactly(delta, size)), np.uint8)
            except zlib.error as error:
                raise ValueError(f"damaged delta: {error}") from None
            bits = -(-len(words) // 8)
            places = np.flatnonzero(np.unpackbits(content[:bits], count=len(words)))
            if len(places) != count or len(content) != bits + 2 * count:
                raise ValueError("damaged delta: it has another number of changes than it announces")
            words[places] ^= content[bits:].reshape(2, -1).T.copy().view(_WORD)[:, 0]
        yield words.data.cast("B")


def _exactly(file: IO[bytes], size: int) -> bytes:
    content = file.read(size)
    if len(content) != size:
        raise ValueError("damaged delta: it ends too early")
    return content
