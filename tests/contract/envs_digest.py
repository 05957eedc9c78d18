"""Prints hashes of the levels of each environment, for comparison between processes."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import envkit

LEVELS = 200
SIZES: dict[str, list[dict[str, Any]]] = {
    "FrozenLake-v0": [{"size": 4}, {"size": 6}, {"size": 8, "frozen": 0.7}],
    "Sokoban-v0": [{"size": 6, "boxes": 1}, {"size": 6, "boxes": 2}, {"size": 8, "boxes": 2}],
}


def draw(env_id: str, options: dict[str, Any]) -> str:
    """Return a hash of the levels of the first seeds."""
    digest = hashlib.sha256()
    with envkit.make(env_id, instructions=False, **options) as env:
        for seed in range(LEVELS):
            digest.update(env.reset(seed=seed)[0].encode())
    return digest.hexdigest()


def main() -> None:
    digests = {}
    for env_id, sizes in SIZES.items():
        for options in sizes:
            digests[f"{env_id} {options}"] = draw(env_id, options)
    print(json.dumps(digests))


if __name__ == "__main__":
    main()
