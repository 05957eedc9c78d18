"""Tools: turns that do not step the environment."""

from __future__ import annotations

from typing import Any

import pytest

from envkit.errors import StepOrderError, UsageError
from envkit.wrappers import ToolResult, ToolUse
from tests.wrappers.envs import Adder, Echo


class Broken:
    name = "broken"
    instructions = "Do not touch."

    def run(self, reply: str) -> ToolResult | None:
        if "touch" in reply:
            raise ZeroDivisionError("it broke")
        return None


def test_a_call_is_a_turn_of_its_own_and_any_other_reply_goes_to_the_environment() -> None:
    env = ToolUse(Echo(), [Adder()], max_uses=2, reward=0.25, instructions=False)
    assert env.reset()[0] == "the rules"
    observation, reward, terminated, truncated, info = env.step("I add 2 3! and then")
    assert (observation, reward, terminated, truncated) == ("5\n[1 of 2 tool uses left]", 0.25, False, False)
    assert info == {
        "tool": "adder",
        "tool_uses": 1,
        "tool_errors": 0,
        "tool_uses_adder": 1,
        "parsed_action": "I add 2 3!",
        "legal_moves": ["win", "wait"],
    }
    assert env.step("hello")[0] == "1: hello"


def test_a_spent_budget_sends_calls_to_the_environment_until_the_next_episode() -> None:
    env = ToolUse(Echo(), [Adder()], max_uses=1)
    env.reset()
    assert env.step("add 1 1!")[0] == "2\n[0 of 1 tool uses left]"
    observation, _, _, _, info = env.step("add 1 1!")
    assert observation == "1: add 1 1!"
    assert info["tool_uses"] == 1
    env.reset()
    assert env.step("add 1 1!")[0] == "2\n[0 of 1 tool uses left]"


def test_the_first_observation_ends_with_the_instructions_of_the_tools() -> None:
    text, info = ToolUse(Echo(), [Adder(), Broken()], max_uses=3).reset()
    assert text == ("the rules\n\nSay add 2 3! to add two numbers.\nDo not touch.\nYou can use them 3 times in all.")
    assert info["tool_uses"] == 0


def test_a_tool_that_raises_is_an_observation() -> None:
    env = ToolUse(Echo(), [Adder(), Broken()], error_reward=-0.5)
    env.reset()
    observation, reward, terminated, truncated, info = env.step("touch")
    assert observation == "broken failed: ZeroDivisionError: it broke\n[9 of 10 tool uses left]"
    assert (reward, terminated, truncated) == (-0.5, False, False)
    assert (info["tool_errors"], info["tool_uses_broken"], info["tool_uses_adder"]) == (1, 1, 0)


def test_long_outputs_are_cut_and_stay_in_the_space() -> None:
    class Loud:
        name = "loud"
        instructions = ""

        def run(self, reply: str) -> ToolResult | None:
            return ToolResult("x" * 1_000_000, reply)

    env = ToolUse(Echo(), [Loud()], max_output=10)
    env.reset()
    observation, *_ = env.step("go")
    assert observation == "x" * 10 + "\n[999,990 more characters are cut]\n[9 of 10 tool uses left]"
    assert env.observation_space.contains(observation)


def test_no_tool_runs_outside_an_episode() -> None:
    env = ToolUse(Echo(), [Adder()])
    with pytest.raises(StepOrderError):
        env.step("add 1 1!")
    env.reset()
    env.step("win")
    with pytest.raises(StepOrderError):
        env.step("add 1 1!")


@pytest.mark.parametrize("result", ["5", 5, ("5", "add"), ToolResult(5, "add"), ToolResult("5", b"add")])  # type: ignore[arg-type]
def test_a_tool_that_returns_something_else_is_a_mistake_of_its_maker(result: Any) -> None:
    class Wrong(Adder):
        def run(self, reply: str) -> ToolResult | None:
            return result  # type: ignore[no-any-return]

    env = ToolUse(Echo(), [Wrong()])
    env.reset()
    with pytest.raises(UsageError, match="tool adder: must return a ToolResult of text, or None, got "):
        env.step("add 2 3!")


@pytest.mark.parametrize(
    ("tool", "message"), [(Adder, r"Adder'>; pass an instance: Adder\(\)"), ("adder", "'adder'"), (len, "len")]
)
def test_an_invalid_tool_is_refused(tool: Any, message: str) -> None:
    with pytest.raises(UsageError, match=f"tools: a tool needs name, instructions and run, got .*{message}"):
        ToolUse(Echo(), [tool])


def test_senseless_tools_and_budgets_are_refused() -> None:
    with pytest.raises(UsageError, match="tools: needs at least one"):
        ToolUse(Echo(), [])
    with pytest.raises(UsageError, match="with unique names"):
        ToolUse(Echo(), [Adder(), Adder()])
    with pytest.raises(UsageError, match="must be at least 1"):
        ToolUse(Echo(), [Adder()], max_uses=0)
