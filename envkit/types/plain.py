"""JSON types, a stable hash of JSON values, the key of a tenant's sandbox or session, and results of commands."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

JSON: TypeAlias = bool | int | float | str | list["JSON"] | dict[str, "JSON"] | None
Info: TypeAlias = dict[str, JSON]
Options: TypeAlias = Mapping[str, JSON]
Table: TypeAlias = Sequence[Sequence[str]]
"""The headings of columns, and below them rows."""


@dataclass(frozen=True, slots=True)
class CommandResult:
    """Lines and tables that a command prints, and whether it exits with 0 or 1."""

    parts: Sequence[str | Table]
    is_ok: bool = True


class TenantKey(NamedTuple):
    """Key that identifies a sandbox or session on a server.

    Attributes:
        tenant: Name of the tenant that owns the sandbox or session; empty if it has no tenant.
        id: Id of the sandbox or session. Two tenants may use the same id.
    """

    tenant: str
    id: str

    @property
    def is_own(self) -> bool:
        """Whether the server created it for its own use: clients cannot choose an id that begins with a colon."""
        return not self.tenant and self.id.startswith(":")


def stable_hash(*parts: JSON) -> int:
    """Return a 64-bit hash of `parts` that is the same in every process and on every machine.

    Use it for seeds. Python's ``hash`` of a string differs between processes, so workers would play different levels.
    """
    text = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big")
