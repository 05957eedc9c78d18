"""The policy ``mini_swe:MODEL@URL``: the prompts and loop of mini-swe-agent, with a model behind an endpoint.

It plays every environment with the tools bash and submit. Each answer of the model is one turn: its command becomes a
call of bash, and a command that submits is followed by a call of submit. An answer that is rejected is a turn without a
call; as in mini-swe-agent 2, it does not stay in the chat. There is no limit of costs. See
`envkit.environments.swe.agents.mini_swe`.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import yaml

from envkit import installation
from envkit.environments.swe.agents.mini_swe import (
    OWN_PROMPTS,
    Prompts,
    call_of,
    commands_of,
    output_of,
    prompts_of,
)
from envkit.environments.tools import write_call
from envkit.errors import UsageError
from envkit.protocols import EpisodePlayer, Player
from envkit.types import Action, Observation, Reset, RolloutRequest
from envkit.wiring.evaluation.endpoint import Endpoint

_CONFIGS = ("benchmarks/swebench_backticks.yaml", "extra/swebench.yaml")
"""Configurations of mini-swe-agent 2 and 1 whose answers are blocks of code, below its folder ``config``."""


def installed_prompts() -> Prompts:
    """Return the prompts of the installed mini-swe-agent, or those of envkit if it is not installed.

    Raises:
        UsageError: The installed version has no configuration that can be used.
    """
    try:
        source = f"mini-swe-agent {version('mini-swe-agent')}"
    except PackageNotFoundError:
        return OWN_PROMPTS
    spec = find_spec("minisweagent")
    folders = [] if spec is None else [Path(one) / "config" for one in spec.submodule_search_locations or ()]
    for file in (folder / name for folder in folders for name in _CONFIGS):
        if file.is_file():
            return prompts_of(yaml.safe_load(file.read_text(encoding="utf-8")), source)
    raise UsageError(f"mini_swe: {source} has no configuration {' or '.join(_CONFIGS)}; install another version")


def identity_of(prompts: Prompts) -> str:
    """Return the source of the prompts with a hash of their content."""
    return f"{prompts.source} ({hashlib.sha256(repr(prompts).encode()).hexdigest()[:16]})"


def announcement(prompts: Prompts) -> str:
    """Return a line about the source of the prompts."""
    if prompts is OWN_PROMPTS:
        return (
            "mini_swe: plays with prompts of envkit, so results are not comparable with those of mini-swe-agent; "
            "to use its prompts: pip install mini-swe-agent"
        )
    return f"mini_swe: plays with the prompts of {prompts.source}"


class MiniSwe(Player):
    """mini-swe-agent as a player.

    Args:
        endpoint: Asks the model.
        prompts: The templates.

    Raises:
        UsageError: Jinja is not installed.
    """

    def __init__(self, endpoint: Endpoint, prompts: Prompts) -> None:
        self.endpoint = endpoint
        self.prompts = prompts
        jinja = installation.load("jinja2")
        environment = jinja.Environment(undefined=jinja.StrictUndefined)
        names = ("system", "instance", "observation", "format_error")
        self._templates = {name: environment.from_string(getattr(prompts, name)) for name in names}

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in start.tools}
        if not {"bash", "submit"} <= tools.keys():
            raise UsageError(
                f"--policy mini_swe: {request.task.env_id} lacks the tool bash or submit; use another environment"
            )
        return _Episode(
            self,
            random.Random(request.seed),
            request.temperature,
            start,
            submits_text="answer" in tools["submit"].get("properties", {}),
        )

    def render(self, name: str, **values: object) -> str:
        """Return a message.

        Raises:
            UsageError: The template needs a variable that does not exist here.
        """
        try:
            text: str = self._templates[name].render(**values)
        except installation.load("jinja2").UndefinedError as error:
            raise UsageError(f"mini_swe: the prompts of {self.prompts.source} cannot be used: {error}") from error
        return text


@dataclass(slots=True)
class _Episode(EpisodePlayer):
    """One episode: a chat that grows by one answer and one result per turn.

    Attributes:
        start: Result of the reset. ``info["folder"]`` is the folder of the commands, and ``info["issue"]`` the text of
            the task without notes about tools; without them, commands run where the tool bash begins, and the task is
            the first observation.
        has_run: Whether the last answer had a command, so that the next observation is its result.
        asked: Number of messages that were part of an earlier prompt or answer.
    """

    player: MiniSwe
    rng: random.Random
    temperature: float
    start: Reset
    submits_text: bool
    messages: list[Mapping[str, Any]] = field(default_factory=list)
    has_run: bool = False
    asked: int = 0
    errors_in_a_row: int = 0

    async def act(self, observation: Observation) -> Action | str:
        player, prompts = self.player, self.player.prompts
        if not self.messages:
            task = str(self.start.info.get("issue") or observation.text)
            self._append("system", self._in_folder(player.render("system")))
            self._append("user", self._in_folder(player.render("instance", task=task)))
        elif self.has_run:
            output = output_of(observation.text)
            if output.submission is not None:
                return self._submit(output.submission)
            self._append("user", player.render("observation", output=output))
        prompt = "\n\n".join(str(one["content"]) for one in self.messages[self.asked :])
        choice, generation = await player.endpoint.complete(
            [dict(one) for one in self.messages], prompt, seed=self.rng.getrandbits(31), temperature=self.temperature
        )
        content = choice.message.content or ""
        self.asked = len(self.messages)
        commands = commands_of(content, prompts)
        self.has_run = len(commands) == 1
        if self.has_run:
            self._append("assistant", content)
            self.asked = len(self.messages)
            self.errors_in_a_row = 0
            return Action(call_of(commands[0], prompts, self._folder), generation=generation)
        self.errors_in_a_row += 1
        if self.errors_in_a_row >= prompts.max_format_errors:
            return Action(self._submit(""), generation=generation)
        error = f"the answer has {len(commands)} commands instead of one"
        values = {"actions": commands, "error": error, "finish_reason": choice.finish_reason or ""}
        self._append("user", player.render("format_error", **values))
        return Action("", generation=generation)

    @property
    def _folder(self) -> str:
        return str(self.start.info.get("folder") or "")

    def _in_folder(self, text: str) -> str:
        """Return a message with the actual folder of the package in place of the prompts' folder."""
        known = self.player.prompts.folder
        return text.replace(known, self._folder) if known and self._folder else text

    def _append(self, role: str, content: str) -> None:
        self.messages.append({"role": role, "content": content})

    def _submit(self, text: str) -> str:
        return write_call("submit", answer=text) if self.submits_text and text else write_call("submit")
