"""Tools wrapper: a reply can call a tool, such as a calculator or a search, a limited number of times per episode."""

from __future__ import annotations

import reprlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from envkit.errors import UsageError
from envkit.spaces import Utf8Text
from envkit.wrappers.history import PARSED_ACTION
from envkit.wrappers.wrapping import TextEnv, TextStep, TextWrapper, longest_text

_ROOM_FOR_NOTES = 200


class ToolResult(NamedTuple):
    """Result of a tool call.

    Attributes:
        output: The observation for the policy.
        used: The part of the reply up to the end of the call. Text after the call was written without knowing the
            result, and does not belong in a history.
        is_error: Whether the call failed.
    """

    output: str
    used: str
    is_error: bool = False


class Tool(Protocol):
    """A tool that a reply can call.

    Attributes:
        name: Name of the tool. ``info`` counts its calls under the key ``tool_uses_NAME``.
        instructions: Text that tells the policy how to call the tool.
    """

    name: str
    instructions: str

    def run(self, reply: str) -> ToolResult | None:
        """Run the call in `reply`; return None if there is no call. The tool must enforce its own timeouts."""
        ...


class ToolUse(TextWrapper):
    """Runs the tool that a reply calls. The call takes one turn, and the observation is the tool's output.

    Replies without a call go to the environment. After `max_uses` calls, all replies go to the environment. Each output
    states how many calls remain. If a tool raises, the observation is the error message. ``info`` contains the counts
    ``tool_uses`` and ``tool_errors`` and, for each tool, ``tool_uses_NAME``. The counts at the end are metrics.

    Args:
        env: A text environment.
        tools: The tools. If a reply calls several tools, only the first of them in this order is run.
        max_uses: Maximum number of tool calls per episode, at least 1.
        reward: Reward of a turn with a successful tool call.
        error_reward: Reward of a turn with a failed tool call.
        instructions: Whether to append the tools' instructions to the first observation.
        max_output: Maximum number of characters in an output; longer outputs are cut.

    Raises:
        UsageError: There are no tools, a tool lacks an attribute of `Tool`, two tools have the same name, or a limit is
            below 1. `step` raises this error if a tool returns anything except None or a `ToolResult` with text.
    """

    def __init__(
        self,
        env: TextEnv,
        tools: Sequence[Tool],
        *,
        max_uses: int = 10,
        reward: float = 0.0,
        error_reward: float = 0.0,
        instructions: bool = True,
        max_output: int = 4096,
    ) -> None:
        for tool in tools:
            _check_tool(tool)
        names = [f"tool_uses_{tool.name}" for tool in tools]
        super().__init__(
            env,
            metrics=dict.fromkeys(["tool_uses", "tool_errors", *names], "last"),
            tools=tools,
            max_uses=max_uses,
            reward=reward,
            error_reward=error_reward,
            instructions=instructions,
            max_output=max_output,
        )
        if not tools or len(set(names)) < len(names):
            raise UsageError(f"tools: needs at least one tool, with unique names, got {[t.name for t in tools]}")
        if min(max_uses, max_output) < 1:
            raise UsageError(f"max_uses and max_output: must be at least 1, got {max_uses} and {max_output}")
        self._tools = tuple(tools)
        self._max_uses = max_uses
        self._reward, self._error_reward = reward, error_reward
        self._max_output = max_output
        lines = [tool.instructions for tool in tools]
        lines.append(f"You can use {'it' if len(tools) == 1 else 'them'} {max_uses} times in all.")
        self._instructions = "\n\n" + "\n".join(lines) if instructions else ""
        self._counts = dict.fromkeys(["tool_uses", "tool_errors", *names], 0)
        self._moves: Any = None
        longest = longest_text(env) + len(self._instructions)
        self.observation_space = Utf8Text(max(longest, max_output + _ROOM_FOR_NOTES))

    def _began(self, observation: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._counts = dict.fromkeys(self._counts, 0)
        self._moves = info.get("legal_moves")
        return observation + self._instructions, {**info, **self._counts}

    def _played(self, action: str) -> TextStep:
        if self._counts["tool_uses"] < self._max_uses:
            for tool in self._tools:
                result = _run(tool, action)
                if result is not None:
                    return self._used(tool, result)
        observation, reward, terminated, truncated, info = super()._played(action)
        self._moves = info.get("legal_moves")
        return observation, reward, terminated, truncated, {**info, **self._counts}

    def _used(self, tool: Tool, result: ToolResult) -> TextStep:
        self._counts["tool_uses"] += 1
        self._counts["tool_errors"] += result.is_error
        self._counts[f"tool_uses_{tool.name}"] += 1
        left = self._max_uses - self._counts["tool_uses"]
        output = result.output
        if len(output) > self._max_output:
            output = f"{output[: self._max_output]}\n[{len(output) - self._max_output:,} more characters are cut]"
        info = {**self._counts, "tool": tool.name, PARSED_ACTION: result.used}
        if self._moves is not None:
            info["legal_moves"] = self._moves
        reward = self._error_reward if result.is_error else self._reward
        return f"{output}\n[{left} of {self._max_uses} tool uses left]", reward, False, False, info


def _run(tool: Tool, reply: str) -> ToolResult | None:
    try:
        result: object = tool.run(reply)
    except Exception as error:  # Catch any error, because a tool that fails must not end the episode.
        return ToolResult(f"{tool.name} failed: {type(error).__name__}: {error}", reply, is_error=True)
    if result is None:
        return None
    if not isinstance(result, ToolResult) or not all(isinstance(text, str) for text in result[:2]):
        raise UsageError(f"tool {tool.name}: must return a ToolResult of text, or None, got {reprlib.repr(result)}")
    return result


def _check_tool(tool: object) -> None:
    name, instructions = getattr(tool, "name", None), getattr(tool, "instructions", None)
    is_tool = isinstance(name, str) and isinstance(instructions, str) and callable(getattr(tool, "run", None))
    if not is_tool or isinstance(tool, type):
        hint = f"; pass an instance: {tool.__name__}()" if isinstance(tool, type) else ""
        raise UsageError(f"tools: a tool needs name, instructions and run, got {tool!r}{hint}")
