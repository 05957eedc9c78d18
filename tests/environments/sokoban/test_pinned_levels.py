"""The default levels are pinned: a change of the generator would invalidate all reported results."""

from __future__ import annotations

import hashlib

import pytest

import envkit

SEEDS = range(300)


@pytest.mark.parametrize(
    ("env_id", "options", "digest"),
    [
        ("FrozenLake-v0", {}, "443bf59757f47929"),
        ("FrozenLake-v0", {"split": "eval"}, "c926e2c5e551b151"),
        ("Sokoban-v0", {}, "07bfed2f3e099048"),
        ("Sokoban-v0", {"split": "eval"}, "bd090e2b192f4fb2"),
    ],
)
def test_the_default_levels_are_those_of_the_first_release(env_id: str, options: dict[str, str], digest: str) -> None:
    with envkit.make(env_id, instructions=False, **options) as env:  # type: ignore[arg-type]
        boards = "\n\n".join(env.reset(seed=seed)[0] for seed in SEEDS)
    assert hashlib.blake2b(boards.encode(), digest_size=8).hexdigest() == digest
