"""Artifacts: the agent's files that the tests see. They are read from an archive, and written into a new one.

An agent that is root can replace the program that packs. So its archive is parsed here, and the tests' sandbox unpacks
a new archive of the accepted members. Otherwise, an agent could make an archive that the two programs read differently.
"""

from __future__ import annotations

import itertools
import posixpath
import tarfile
from collections.abc import Iterator, Sequence

from envkit import clock
from envkit.errors import SandboxRefusedError, TooLargeError
from envkit.protocols import Sandbox

from ..tools.limits import cut_middle
from .tasks import WORK, Artifact, TerminalTask
from .verifier import SETUP_S

MAX_ARTIFACTS = 64 << 20
"""Maximum bytes of all artifacts of a task together, as tar archives."""
MAX_DEPTH = 64
"""Maximum nesting of folders of an artifact."""
MAX_MEMBERS = 50_000
"""Maximum number of files, folders and links of an artifact."""
_PACK = 'tar "$@" | head -c "$0"'  # ends tar at the limit: a sparse file may have terabytes
_MAX_NAME = 4096
_MAX_EXTENDED = 64 << 10
_BLOCK = tarfile.BLOCKSIZE
_KINDS = (tarfile.REGTYPE, tarfile.AREGTYPE, tarfile.DIRTYPE, tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.FIFOTYPE)


async def pack(sandbox: Sandbox, task: TerminalTask) -> Sequence[tuple[Artifact, bytes]] | str:
    """Return the artifacts of a task as tar archives. If that is impossible by the agent's fault, return the reason.

    Artifacts that do not exist or cannot be read are missing in the archives; it is up to the tests to notice this.

    Raises:
        ValueError: An artifact lies in another one with excluded names.
    """
    every = task.artifacts or [Artifact(source=task.workdir or WORK)]
    # Skip an artifact inside another: the outer archive has it, and a link in the outer one could redirect it.
    whole = tuple(one.source.rstrip("/") + "/" for one in every if not one.exclude)
    wanted = [one for one in every if not one.source.rstrip("/").startswith(whole)]
    for one, outer in itertools.permutations(wanted, 2):
        if one.source.startswith(outer.source.rstrip("/") + "/"):
            raise ValueError(f"{task.name}: the artifact {one.source} lies in {outer.source}, which excludes names")
    found: list[tuple[Artifact, bytes]] = []
    left = MAX_ARTIFACTS
    for one in wanted:
        folder, name = posixpath.split(one.source.rstrip("/"))
        excluded = [f"--exclude={pattern}" for pattern in one.exclude]
        words = ["--numeric-owner", *excluded, "-C", folder or "/", "-cf", "-", "--", name or "."]
        argv = ["sh", "-c", _PACK, str(left + 1), *words]
        result = await sandbox.exec(argv, cwd="/", timeout_s=SETUP_S, max_output_bytes=left)
        if result.timed_out or result.truncated_bytes or len(result.stdout_bytes) > left:
            return f"the artifact {one.source} is larger than {MAX_ARTIFACTS >> 20} MiB, or cannot be read"
        if not result.stdout_bytes:
            continue  # its folder does not exist
        left -= len(result.stdout_bytes)
        try:
            found.append((one, await clock.to_thread(rewritten, result.stdout_bytes, name or ".")))
        except (tarfile.TarError, ValueError) as error:
            return f"the artifact {one.source} is refused: {error}"
    return found


async def unpack(sandbox: Sandbox, task: TerminalTask, artifact: Artifact, archive: bytes) -> str | None:
    """Unpack an artifact; return why that failed, or None.

    Raises:
        SandboxRefusedError: The sandbox has no program tar.
    """
    folder = posixpath.dirname(artifact.source.rstrip("/")) or "/"
    kept = ["--no-overwrite-dir"] if task.profile == "strict" else []  # keeps owners and modes of existing folders
    argv = ["tar", "--numeric-owner", "-C", folder, *kept, "-xpf", "-"]
    await sandbox.exec(["mkdir", "-p", folder], cwd="/")
    try:
        result = await sandbox.exec(argv, cwd="/", stdin=archive, timeout_s=SETUP_S)
    except TooLargeError as error:  # the limit of a server
        return f"the artifact {artifact.source} cannot be sent: {error}"
    if result.exit_code == 127:
        why = f"{task.name}: the artifacts cannot be unpacked, because the verifier's image has no tar"
        raise SandboxRefusedError(sandbox.id, why)
    if result.exit_code != 0:
        return f"the artifact {artifact.source} cannot be unpacked: {cut_middle(result.stderr, 500)}"
    return None


def rewritten(archive: bytes, name: str) -> bytes:
    """Return an archive with the members of another one.

    Raises:
        ValueError, tarfile.HeaderError: A member is not below `name`, is below a link, is a device or sparse, or comes
            twice; a hard link leads to none of the files before it; or the archive is malformed, or has too many
            members or nested folders.
    """
    pieces: list[bytes] = []
    kinds: dict[tuple[str, ...], bytes] = {}
    for member, content in _members(archive):
        parts, shown = _parts(member.name, name), repr(member.name[:100])
        if member.type not in _KINDS:
            raise ValueError(f"{shown} is a device, sparse, or of an unknown type")
        if parts in kinds or len(kinds) == MAX_MEMBERS:
            raise ValueError(f"{shown} comes twice, or is more than the limit of {MAX_MEMBERS} members")
        if any(kinds.get(parts[:end], tarfile.DIRTYPE) != tarfile.DIRTYPE for end in range(1, len(parts))):
            raise ValueError(f"{shown} is below a link or file")
        if member.islnk() and kinds.get(_parts(member.linkname, name)) not in (tarfile.REGTYPE, tarfile.AREGTYPE):
            raise ValueError(f"{shown} is a hard link that does not lead to an earlier file of the artifact")
        kinds[parts] = tarfile.REGTYPE if member.islnk() else member.type
        new = tarfile.TarInfo("/".join(parts) or ".")
        new.type, new.mode, new.mtime, new.size = member.type, member.mode & 0o7777, max(0, member.mtime), len(content)
        new.uid, new.gid, new.linkname = member.uid, member.gid, member.linkname
        pieces += [new.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape"), content, bytes(-len(content) % _BLOCK)]
    return b"".join([*pieces, bytes(2 * _BLOCK)])


def _parts(path: str, name: str) -> tuple[str, ...]:
    """Return the parts of a path in an archive. Raise `ValueError` if it leads out of `name`, or is too long."""
    if len(path) > _MAX_NAME or path.count("/") > 2 * MAX_DEPTH:
        raise ValueError(f"the path {path[:100]!r} is too long, or has more than {MAX_DEPTH} folders")
    parts = tuple(part for part in path.split("/") if part not in ("", "."))
    if len(parts) > MAX_DEPTH:
        raise ValueError(f"{path[:100]!r} has more than {MAX_DEPTH} folders")
    if path.startswith("/") or ".." in parts or (name != "." and parts[:1] != (name,)):
        raise ValueError(f"{path[:100]!r} leads outside of it")
    return parts


def _members(archive: bytes) -> Iterator[tuple[tarfile.TarInfo, bytes]]:
    """Yield the members of an archive with their content: those with plain headers, long names, or a POSIX path.

    Unlike the module tarfile, it takes time in proportion to the size of the archive, whatever the archive contains.
    """
    at, extended = 0, {}
    while True:
        block = archive[at : at + _BLOCK]
        if block == bytes(_BLOCK):
            return
        member = tarfile.TarInfo.frombuf(block, "utf-8", "surrogateescape")
        at += _BLOCK
        size = member.size if member.type not in _KINDS or member.isreg() else 0
        content = archive[at : at + size]
        if member.size < 0 or len(content) < size:
            raise ValueError("it ends early")
        if member.type not in _KINDS and size > _MAX_EXTENDED:
            raise ValueError(f"a header is larger than {_MAX_EXTENDED} bytes")
        at += size + -size % _BLOCK
        if member.type in (tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK):
            field = b"path" if member.type == tarfile.GNUTYPE_LONGNAME else b"linkpath"
            extended[field] = content.rstrip(b"\0")
        elif member.type == tarfile.XHDTYPE:
            extended |= _records(content)
        elif member.type != tarfile.XGLTYPE:
            member.name = extended.get(b"path", member.name.encode("utf-8", "surrogateescape")).decode(
                "utf-8", "surrogateescape"
            )
            if b"linkpath" in extended:
                member.linkname = extended[b"linkpath"].decode("utf-8", "surrogateescape")
            if "\0" in member.name + member.linkname or max(map(len, (member.name, member.linkname))) > _MAX_NAME:
                raise ValueError(f"the name {member.name[:100]!r} is too long, or has a NUL")
            extended = {}
            yield member, content


def _records(content: bytes) -> dict[bytes, bytes]:
    """Return the fields of a POSIX extended header. Those that change the content of a file are refused."""
    found: dict[bytes, bytes] = {}
    at = 0
    while at < len(content):
        digits = content[at : at + 8].partition(b" ")[0]
        record = content[at : at + (int(digits) if digits.isdigit() else 0)]
        field, equals, value = record[len(digits) + 1 : -1].partition(b"=")
        if not equals or not record.endswith(b"\n") or field == b"size" or field.startswith(b"GNU.sparse"):
            raise ValueError("an extended header is malformed, or changes the content of a file")
        found[field] = value
        at += len(record)
    return found
