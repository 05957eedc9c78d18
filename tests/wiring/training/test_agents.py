"""Functions as agents: their names, and the section that names them."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

import envkit
from envkit import clock
from envkit.config.parts import AgentSection, AutoRendererSection
from envkit.errors import UsageError
from envkit.trainer_bridge.agents.programs import AgentFunction
from envkit.trainer_bridge.rollout import play
from envkit.types import RolloutRequest, Task
from envkit.wiring.training.agents import check_agent, function_of, open_player
from tests.trainer_bridge.agents.agents import LIMITS, RENDERER, LetterEngine
from tests.trainer_bridge.fakes import Answer, ScriptedHost


def defined() -> AgentFunction:
    @envkit.agent("again")
    def anew(task: envkit.AgentTask) -> None:
        """Do nothing."""

    return anew


@envkit.agent
def bare_name(task: envkit.AgentTask) -> None:
    """Do nothing."""


def test_a_function_is_found_by_its_name_or_the_one_that_it_was_given() -> None:
    assert function_of("bare_name") is bare_name
    first, second = defined(), defined()
    assert first is not second
    assert function_of("again") is second  # as in a notebook


def test_a_name_belongs_to_one_function_and_has_no_colon() -> None:
    defined()
    with pytest.raises(UsageError, match=r"^agent: 'again' is already registered for .*:defined.*anew; choose another"):
        envkit.agent("again")(bare_name)
    for name in ("", "agents:solve"):
        with pytest.raises(UsageError, match=f"^agent: '{name}' cannot be a name; use one without a colon"):
            envkit.agent(name)(bare_name)


def test_a_section_that_was_written_with_its_defaults_has_no_problem() -> None:
    section = AgentSection(function="bare_name")
    assert check_agent(AgentSection.model_validate(section.model_dump()), AutoRendererSection()) == []
    beside = section.model_copy(update={"place": "beside", "env": {"A": "1"}})
    assert check_agent(beside, AutoRendererSection()) == [
        f"agent.{key}: is for a command; leave it out" for key in ("env", "place")
    ]


def test_keys_of_the_renderer_that_have_no_effect_with_an_agent_are_refused() -> None:
    why = "has no effect, because an agent writes all messages itself; leave it out"
    renderer = AutoRendererSection(history=2, system="Be brief.")
    problems = check_agent(AgentSection(function="bare_name"), renderer)
    assert problems == [f"renderer.history: {why}", f"renderer.system: {why}"]


@envkit.agent
async def ask_two_models(task: envkit.AgentTask) -> None:
    """Call the policy under two names."""
    messages: list[Any] = [{"role": "system", "content": "It is 10:00. Be brief."}, {"role": "user", "content": "a?"}]
    async with httpx.AsyncClient(base_url=task.base_url, headers={"authorization": f"Bearer {task.api_key}"}) as client:
        for model in ("large", "large", "small"):
            answered = await client.post("/chat/completions", json={"model": model, "messages": messages})
            answered.raise_for_status()
            messages = messages[-1:]


def test_the_report_counts_the_calls_that_a_section_selects_and_changes() -> None:
    section = AgentSection(function="ask_two_models", train=["large"], ignore=[r"It is \d+:\d+\. "])
    lines: list[str] = []

    async def main() -> None:
        host = ScriptedHost(lambda task, lease: [Answer("Fix it.")])
        async with open_player(section, LetterEngine("one", "two", "three"), RENDERER, LIMITS, lines.append) as player:
            await play(host, player, LIMITS, RolloutRequest("train/0/0", Task("A-v0", 0), 0))

    clock.run(main)
    assert lines == [
        "agent: ask_two_models",
        "agent: calls to the model 'large': 2",
        "agent: calls to the model 'small': 1, not trained on",
        "agent: calls from which agent.ignore removed text: 1",
    ]
