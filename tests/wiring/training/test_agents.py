"""Functions as agents: their names, and the section that names them."""

from __future__ import annotations

import pytest

import envkit
from envkit.config.agents import AgentSection
from envkit.config.parts import AutoRendererSection
from envkit.errors import UsageError
from envkit.trainer_bridge.agents.programs import AgentFunction
from envkit.wiring.training.agents import check_agent, function_of


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
