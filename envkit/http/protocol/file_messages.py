"""Messages about files and folders of sandboxes.

Over HTTP, the content of a file or folder is the raw body of a request or answer. Over the WebSocket, the content of a
file is a base64 field of a frame or answer, so only small files are possible.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias

import msgspec

from envkit.http.protocol.messages import AnyId
from envkit.http.protocol.sandbox_messages import Key
from envkit.types import FileUser

MAX_FRAME_FILE_BYTES = 1 << 20
"""Maximum size of a file that is read over the WebSocket, in bytes; HTTP allows larger files."""

MAX_FILE_BYTES = 64 << 20
"""Maximum size of a file that one HTTP request reads or writes, in bytes."""

MAX_TREE_BYTES = 1 << 30
"""Maximum total size of the files in a tar stream, in bytes."""

FilePath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[^\x00]+$", description="Path of the file or folder in the sandbox.")
]
FramePath: TypeAlias = Annotated[
    str, msgspec.Meta(pattern=r"^[^\x00]*$", description="Path of the file in the sandbox, without NUL characters.")
]
Size: TypeAlias = Annotated[
    int, msgspec.Meta(ge=0, description="Maximum size in bytes; a larger file or folder is rejected.")
]
Owner: TypeAlias = Annotated[FileUser, msgspec.Meta(description="User who reads or writes the file.")]


class ReadFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file to read: its sandbox and its path."""

    sandbox_id: AnyId
    path: FramePath
    max_bytes: Annotated[Size, msgspec.Meta(le=MAX_FRAME_FILE_BYTES)] = MAX_FRAME_FILE_BYTES
    user: Owner = "agent"


class WriteFrame(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A file to write: its sandbox, its path and its content."""

    sandbox_id: AnyId
    path: FramePath
    content: bytes
    mode: Annotated[int, msgspec.Meta(ge=0, le=0o777)] | None = None
    key: Key | None = None
    user: Owner = "agent"


class ReadFile(msgspec.Struct, frozen=True):
    """The file to read over HTTP."""

    sandbox_id: AnyId
    path: FilePath
    max_bytes: Annotated[Size, msgspec.Meta(le=MAX_FILE_BYTES)] = MAX_FILE_BYTES
    user: Owner = "agent"


class WriteFile(msgspec.Struct, frozen=True):
    """The file to write over HTTP."""

    sandbox_id: AnyId
    path: FilePath
    mode: Annotated[str, msgspec.Meta(pattern=r"^0?[0-7]{1,3}$", description="Octal permissions, such as 755.")] = ""
    user: Owner = "agent"
    key: Key | None = None


class DownloadTree(msgspec.Struct, frozen=True):
    """The file or folder to download."""

    sandbox_id: AnyId
    path: FilePath
    max_bytes: Annotated[Size, msgspec.Meta(lt=1 << 53)] = MAX_TREE_BYTES
    user: Owner = "agent"


class UploadTree(msgspec.Struct, frozen=True):
    """The path to which a file or folder is uploaded."""

    sandbox_id: AnyId
    path: FilePath
    user: Owner = "agent"


class FileReply(msgspec.Struct, frozen=True):
    """The content of a file."""

    content: bytes
