"""Routing: a prompt goes to the replica that likely has most of it in its prefix cache, unless it is too busy."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from hashlib import blake2b

from envkit.types import ints

_BLOCK_TOKENS = 64
"""Prompts are compared by their beginnings of a multiple of this number of tokens."""
_MAX_BEGINNINGS = 1 << 14
"""Beginnings that are remembered for each replica; then the oldest are forgotten."""
_SLACK = 4
"""A replica may have this many completions in progress more than the least busy one because it knows the prompt."""


class Routing:
    """Remembers which replicas have seen which beginnings of prompts, and where sessions were last."""

    def __init__(self) -> None:
        self._seen: dict[int, OrderedDict[bytes, None]] = {}
        self._sessions: dict[str, int] = {}

    def choose(self, prompt: Sequence[int], session: str | None, loads: Mapping[int, int]) -> int:
        """Choose a replica, and remember the choice.

        A session stays on its replica. Otherwise the replica that knows the longest beginning of the prompt is chosen
        among those that are not much busier than the least busy one; then the least busy; then the first.

        `loads` are the completions in progress by replica, for those that can take one more; at least one.
        """
        keys = _beginnings(prompt)
        home = self._sessions.get(session, -1) if session is not None else -1
        if home not in loads:
            least = min(loads.values())
            near = [one for one, load in loads.items() if load <= least + _SLACK]
            home = max(near, key=lambda one: (self._known(one, keys), -loads[one], -one))
        if session is not None:
            self._sessions[session] = home
        seen = self._seen.setdefault(home, OrderedDict())
        for key in keys:
            seen[key] = None
            seen.move_to_end(key)
        while len(seen) > _MAX_BEGINNINGS:
            seen.popitem(last=False)
        return home

    def forget(self, session: str) -> None:
        """Drop the affinity of a session."""
        self._sessions.pop(session, None)

    def clear(self, replica: int) -> None:
        """Forget the prompts of a replica whose cache was cleared."""
        self._seen.pop(replica, None)

    def _known(self, replica: int, keys: Sequence[bytes]) -> int:
        seen = self._seen.get(replica, OrderedDict())
        return next((count for count in range(len(keys), 0, -1) if keys[count - 1] in seen), 0)


def _beginnings(prompt: Sequence[int]) -> list[bytes]:
    """Return a key for each beginning of the prompt whose length is a multiple of `_BLOCK_TOKENS`."""
    content = ints(prompt)
    keys: list[bytes] = []
    chained = b""
    for end in range(_BLOCK_TOKENS, len(content) + 1, _BLOCK_TOKENS):
        chained = blake2b(chained + content[end - _BLOCK_TOKENS : end].tobytes(), digest_size=16).digest()
        keys.append(chained)
    return keys
