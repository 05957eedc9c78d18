"""The built-in environments, as data; this module imports no environment."""

from __future__ import annotations

from collections.abc import Mapping

_BOARD: Mapping[str, object] = {"splits": ("train", "validation", "eval"), "compact_options": {"instructions": False}}
_SOKOBAN: Mapping[str, object] = {
    **_BOARD,
    "entry_point": "envkit.environments.sokoban:Sokoban",
    "vector_entry_point": "envkit.environments.sokoban:SokobanVector",
    "expert": "envkit.environments.sokoban:SokobanExpert",
    "operator_options": ("level_file",),
}
_LAKE: Mapping[str, object] = {
    **_BOARD,
    "entry_point": "envkit.environments.frozen_lake:FrozenLake",
    "vector_entry_point": "envkit.environments.frozen_lake:FrozenLakeVector",
    "expert": "envkit.environments.frozen_lake:FrozenLakeExpert",
}
_GYMNASIUM = {**_LAKE, "splits": ()}  # a single map has no splits
_TEN_MOVES = {"max_moves": 10, "moves": [1, 10]}


def _tool_env(name: str, *operator_options: str, has_cheats: bool = False) -> Mapping[str, object]:
    """Return the fields of an environment on `TaskEnv`, whose tasks may have their own cheats."""
    package = f"envkit.environments.{name.lower()}"
    return {
        "entry_point": f"{package}:{name}",
        "splits": ("train", "validation", "eval"),
        "needs": ("sandbox",),
        "operator_options": operator_options,
        "replayable": False,  # what commands print may differ
        "players": {
            "oracle": f"{package}:{name}.oracle",
            **({"cheat:own": f"{package}:{name}.own"} if has_cheats else {}),
        },
        "task_set": f"{package}:{name}Tasks",
    }


CATALOG: tuple[Mapping[str, object], ...] = (
    {
        **_SOKOBAN,
        "id": "Sokoban-v0",
        "summary": "Push every box onto a target within the move limit; boxes cannot be pulled.",
    },
    {
        **_SOKOBAN,
        "id": "SimpleSokoban-v0",
        "options": {"size": 6, "boxes": 1, **_TEN_MOVES},
        "summary": "The basic Sokoban of ROLL and RAGEN: 6x6, one box, ten moves.",
    },
    {
        **_SOKOBAN,
        "id": "LargerSokoban8x8-v0",
        "options": {"size": 8, "boxes": 2, **_TEN_MOVES},
        "summary": "RAGEN's larger Sokoban: 8x8, two boxes, ten moves.",
    },
    {
        **_SOKOBAN,
        "id": "LargerSokoban10x10-v0",
        "options": {"size": 10, "boxes": 2, **_TEN_MOVES},
        "summary": "ROLL's larger Sokoban: 10x10, two boxes, ten moves.",
    },
    {
        **_SOKOBAN,
        "id": "SokobanDifferentGridVocab-v0",
        "options": {"size": 6, "boxes": 1, "symbols": "W.GCBA@", **_TEN_MOVES},
        "summary": "SimpleSokoban in other letters, to test whether a policy has learnt the game or its symbols.",
    },
    {
        **_SOKOBAN,
        "id": "SokobanEasy-v0",
        "options": {"size": 6, "boxes": 2, "max_moves": 20, "reward": "sparse", "format_penalty": 0.1},
        "summary": "GEM's easy Sokoban: 6x6, two boxes, twenty moves, sparse reward.",
    },
    {
        **_SOKOBAN,
        "id": "SokobanHard-v0",
        "options": {"size": 8, "boxes": 4, "max_moves": 50, "reward": "sparse", "format_penalty": 0.1},
        "summary": "GEM's hard Sokoban: 8x8, four boxes, fifty moves, sparse reward.",
    },
    {
        **_LAKE,
        "id": "FrozenLake-v0",
        "summary": "Walk over ice from start to goal without falling into a hole.",
    },
    {
        **_LAKE,
        "id": "FrozenLake8x8-v0",
        "options": {"size": 8},
        "summary": "Frozen lakes of 8x8 cells.",
    },
    {
        **_LAKE,
        "id": "SlipperyFrozenLake-v0",
        "options": {"slip": 2 / 3},
        "summary": "Frozen lakes with two of three moves going sideways, as in RAGEN.",
    },
    {
        **_GYMNASIUM,
        "id": "GymnasiumFrozenLake-v0",
        "options": {"map": "4x4", "slip": 2 / 3},
        "summary": "The map of Gymnasium's FrozenLake-v1, equally slippery.",
    },
    {
        **_GYMNASIUM,
        "id": "GymnasiumFrozenLake8x8-v0",
        "options": {"map": "8x8", "slip": 2 / 3},
        "summary": "The map of Gymnasium's FrozenLake8x8-v1, equally slippery.",
    },
    {
        "id": "Arithmetic-v0",
        "entry_point": "envkit.environments.arithmetic:Arithmetic",
        "expert": "envkit.environments.arithmetic:ArithmeticExpert",
        "splits": ("train", "validation", "eval"),
        "compact_options": {"instructions": False},
        "summary": "Answer an arithmetic question with a number; for language models.",
    },
    {
        "id": "Code-v0",
        **_tool_env("Code"),
        "summary": "Write a Python function, in one answer or with tools in a sandbox; hidden tests decide.",
    },
    {
        "id": "Questions-v0",
        "entry_point": "envkit.environments.questions:Questions",
        "task_set": "envkit.environments.questions:QuestionTasks",
        "summary": "Answer a question of a file of JSON lines; for language models.",
    },
    {
        "id": "WebShop-v0",
        "entry_point": "envkit.environments.webshop:WebShop",
        "expert": "envkit.environments.webshop.players:WebShopExpert",
        "splits": ("train", "validation", "eval"),
        "compact_options": {"observation": "compact"},
        "vocabulary": "envkit.environments.webshop.compact:vocabulary",
        "players": {
            "first_hit": "envkit.environments.webshop.players:FirstHit",
            "rule": "envkit.environments.webshop.players:RulePlayer",
        },
        "data": {
            "webshop": "envkit.environments.webshop.catalogue.build:webshop",
            "webshop-1k": "envkit.environments.webshop.catalogue.build:webshop_1k",
            "webshop-100k": "envkit.environments.webshop.catalogue.build:webshop_100k",
            "webshop-files": "envkit.environments.webshop.catalogue.build:webshop_files",
        },
        "summary": "Find and buy the product that an instruction asks for, in a shop with thousands of products.",
    },
    {
        "id": "SWE-v0",
        **_tool_env("Swe", "review"),
        "commands": {
            "packages": "envkit.environments.swe.commands:list_packages",
            "build": "envkit.environments.swe.commands:build",
            "grade": "envkit.environments.swe.commands:grade",
        },
        "data": {"swe": "envkit.environments.swe.packages:prepare"},
        "summary": "Find and fix a bug in a Python package, with tools in a sandbox; its own tests decide.",
    },
    {
        "id": "Terminal-v0",
        **_tool_env("Terminal", "keep_processes", has_cheats=True),
        "commands": {one: f"envkit.environments.terminal.commands:{one}" for one in ("ls", "build", "export")},
        "summary": "Work on a task in a shell: generated tasks, fifteen of envkit, or folders of Harbor; tests decide.",
    },
)
