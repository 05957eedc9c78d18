"""The section ``agent`` of training and evaluation files."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from envkit.config.grammar import Section, UserPath


class AgentSection(Section):
    """A foreign agent that plays the episodes: a program or a function that calls the policy as if it were a model
    behind OpenAI's or Anthropic's API. rollout.max_turns then limits its calls, rollout.max_tokens each prompt with its
    answer, and rollout.player_timeout_s the time of the agent.
    """

    command: list[str] = Field(default_factory=list)
    """Program and arguments, such as [mini, --task, "{task}"]. {task} stands for the text of the task, {model} for the
    name of the policy."""
    function: str = ""
    """Function in place of a command, as MODULE:NAME, or by its name (@envkit.agent, or an agent of a package). It gets
    an envkit.AgentTask, and may be async."""
    place: Literal["sandbox", "beside"] = "sandbox"
    """Where the command runs. sandbox: in the sandbox of the episode, which reaches the policy and no network. beside:
    on this machine; it plays actions by POST {"action": "..."} to the address in the variable ENVKIT_STEP_URL."""
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, besides those with the address and the key of the policy."""
    views: dict[str, UserPath] = Field(default_factory=dict)
    """Files and folders of this machine that the sandboxes see read-only, by their path inside, such as the virtual
    environment of the agent."""
    train: list[str] = Field(default_factory=list)
    """Regular expressions. Only calls whose model name or system prompt contains a match are trained on. []: all."""
    ignore: list[str] = Field(default_factory=list)
    """Regular expressions of text that changes between the calls of an episode, such as the time. It is removed from
    system prompts, so that a call continues the ones before it."""
