"""A small text environment and a tool."""

from __future__ import annotations

import re
from typing import Any

import gymnasium

from envkit.spaces import Utf8Text
from envkit.wrappers import ToolResult


class Echo(gymnasium.Env[str, str]):
    """Echoes each action after its number. ``win`` ends it with reward 1; an action without a letter is invalid."""

    metadata = {"metrics": {"action_is_valid": "mean", "success": "last", "letters": "sum"}}  # noqa: RUF012

    def __init__(self, limit: int = 100) -> None:
        self.observation_space = Utf8Text(2000)
        self.action_space = Utf8Text(1 << 20)
        self._limit = limit
        self._count = 0

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        super().reset(seed=seed)
        self._count = 0
        return "the rules", {"legal_moves": ["win", "wait"]}

    def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self._count += 1
        letters = sum(map(str.isalpha, action))
        won = action == "win"
        info = {"action_is_valid": letters > 0, "success": won, "letters": letters, "legal_moves": ["win", "wait"]}
        late = self._count >= self._limit and not won
        return f"{self._count}: {action[:1000]}", float(won), won, late, info


class Adder:
    name = "adder"
    instructions = "Say add 2 3! to add two numbers."

    def run(self, reply: str) -> ToolResult | None:
        call = re.search(r"add (\d{1,9}) (\d{1,9})!", reply)
        return call and ToolResult(str(int(call[1]) + int(call[2])), reply[: call.end()])
