"""Records of episodes. In files, each is one line of JSON, in which readable text comes before token ids.

Training runs and evaluations write the same records, and `envkit show` reads them. The trainer does not read these
records: it gets each episode as a `Trajectory`.
"""

from __future__ import annotations

from typing import Any, Self

import msgspec

from envkit.types.environments import Observation, Step, ToolSchema
from envkit.types.outcomes import Outcome
from envkit.types.training import GenerationRecord

FORMAT = 3
"""Version of the file format. Increase it when a change makes older versions of envkit misread a record."""


class TurnRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One action and the environment's response.

    Attributes:
        generation: The language model's prompt and completion; None if the player uses no language model.
        action: The text sent to the environment.
        observation: The observation after the action; None if the episode was cut off before the environment responded.
        reward: Reward of the step; None if it is not finite, or if the environment did not respond.
        info: The environment's info about the step.
        seconds: Time in seconds that the environment needed for the step; None if it was not measured.
    """

    generation: GenerationRecord | None = None
    action: str
    observation: Observation | None = None
    reward: float | None = None
    info: dict[str, Any] = {}
    seconds: float | None = None

    @classmethod
    def of(
        cls, action: str, step: Step | None, generation: GenerationRecord | None = None, seconds: float | None = None
    ) -> Self:
        """Return the record of a turn. Pass `step` as None if the environment did not respond."""
        made = cls(generation=generation, action=action, seconds=seconds)
        if step is None:
            return made
        return msgspec.structs.replace(made, observation=step.observation, reward=step.reward, info=step.info)


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One episode.

    Attributes:
        format: Version of the file format: the value of `FORMAT` in the version of envkit that wrote the record.
        env_id: Id of the environment.
        seed: Seed of the task.
        options: Options of the task.
        index: Number of the task in its train step or evaluation, from 0.
        member: Number of the episode among the episodes of the same task, from 0.
        train_step: Number of the train step that the episode was played for; None in an evaluation.
        outcome: Why it ended, and its reward, success and metrics.
        start: The observation that the reset returned; None if the reset did not return.
        start_info: The environment's info at reset.
        turns: The turns, in order.
        system: System prompt of the environment; None if it has none.
        tools: Tools of the environment.
    """

    format: int = FORMAT
    env_id: str
    seed: int
    options: dict[str, Any]
    index: int
    member: int
    train_step: int | None = None
    outcome: Outcome
    start: Observation | None
    start_info: dict[str, Any]
    turns: tuple[TurnRecord, ...]
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()

    @property
    def label(self) -> str:
        """The task, for people: its number, with its name or else its seed."""
        name = self.start_info.get("task")
        return f"task {self.index} ({name if isinstance(name, str) else f'seed {self.seed}'})"
