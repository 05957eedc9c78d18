"""The built-in worlds, as data: nothing here imports a world."""

from __future__ import annotations

from collections.abc import Mapping

CATALOG: tuple[Mapping[str, object], ...] = (
    {
        "id": "Sokoban-v0",
        "entry_point": "envkit.environments.sokoban:Sokoban",
        "expert": "envkit.environments.sokoban:SokobanExpert",
        "summary": "Push every box onto a target; walls, corners and the move limit are against you.",
        "splits": ("train", "validation", "eval"),
        "terse": {"instructions": False},
    },
    {
        "id": "FrozenLake-v0",
        "entry_point": "envkit.environments.frozen_lake:FrozenLake",
        "expert": "envkit.environments.frozen_lake:FrozenLakeExpert",
        "vector_entry_point": "envkit.environments.frozen_lake:FrozenLakeVector",
        "summary": "Walk over ice from start to goal without falling into a hole.",
        "splits": ("train", "validation", "eval"),
        "terse": {"instructions": False},
    },
)
