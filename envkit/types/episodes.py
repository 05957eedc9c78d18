"""Records of episodes. In files, each is one line of JSON, in which readable text comes before token ids.

Training runs and evaluations write the same records, and `envkit show` reads them. The trainer does not read these
records: it gets each episode as a `Trajectory`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec

from envkit.types.environments import Observation, Reset, Step, Task, ToolSchema
from envkit.types.sandboxes import Cause
from envkit.types.training import FinishReason, StopReason

FORMAT = 2
"""Version of the file format. Increase it when a change makes older versions of envkit misread a record."""


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """New prompt tokens (N) and completion tokens (M) of one turn.

    Attributes:
        prompt: The part of the prompt after the previous completion, as text with special tokens.
        completion: The sampled tokens, as text with special tokens.
        finish: Why the completion ended.
        prompt_ids: The token ids of `prompt` [N].
        completion_ids: The token ids of `completion` [M].
        logprobs: Log-probabilities of the completion's tokens in nats [M]; a value that is not finite is None.
        versions: Policy versions that sampled the completion, in order: pairs of a version and its number of tokens.
        seconds: Time in seconds that the model needed for the completion.
        usage: Numbers of prompt and completion tokens, if an endpoint returned them without token ids; otherwise None.
    """

    prompt: str
    completion: str
    finish: FinishReason
    prompt_ids: tuple[int, ...]
    completion_ids: tuple[int, ...]
    logprobs: tuple[float | None, ...]
    versions: tuple[tuple[int, int], ...]
    seconds: float
    usage: tuple[int, int] | None = None


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
        valid: False if the sandbox, server or environment failed, so that the result says nothing about the policy.
        stop: Why the episode ended.
        error: What failed, in one line, if `valid` is false; otherwise None.
        reward: Sum of the rewards; None if it is not finite.
        metrics: The environment's own metrics, one value per episode; a value that is not finite is None.
        start: The observation that the reset returned; None if the reset did not return.
        start_info: The environment's info at reset.
        turns: The turns, in order.
        cause: Why the episode's sandbox was lost; None if no sandbox was lost, or if the cause is unknown.
        grade: Reward that the grader gave after the last turn, included in `reward`; None if there was no grader.
        system: System prompt of the environment; None if it has none.
        tools: Tools of the environment.
    """

    format: int
    env_id: str
    seed: int
    options: dict[str, Any]
    index: int
    member: int
    train_step: int | None
    valid: bool
    stop: StopReason
    error: str | None
    reward: float | None
    metrics: dict[str, float | None]
    start: Observation | None
    start_info: dict[str, Any]
    turns: tuple[TurnRecord, ...]
    cause: Cause | None = None
    grade: float | None = None
    system: str | None = None
    tools: tuple[ToolSchema, ...] = ()

    @classmethod
    def of(
        cls,
        task: Task,
        start: Reset | None,
        turns: Iterable[TurnRecord],
        stop: StopReason,
        *,
        index: int,
        member: int,
        reward: float,
        metrics: Mapping[str, float],
        error: str | None,
        cause: Cause | None = None,
        train_step: int | None = None,
        grade: float | None = None,
    ) -> Self:
        """Return the record of an episode of `task`; `start` is None if the reset did not return."""
        return cls(
            format=FORMAT,
            env_id=task.env_id,
            seed=task.seed,
            options=dict(task.options),
            index=index,
            member=member,
            train_step=train_step,
            valid=not stop.is_void,
            stop=stop,
            error=error,
            reward=reward,
            metrics=dict(metrics),
            start=None if start is None else start.observation,
            start_info={} if start is None else start.info,
            turns=tuple(turns),
            cause=cause,
            grade=grade,
            system=None if start is None else start.system,
            tools=() if start is None else start.tools,
        )

    @property
    def succeeded(self) -> bool:
        """Whether the episode is valid and its metric ``success`` is positive; without this metric, its reward."""
        if not self.valid:
            return False
        success = self.metrics.get("success", float((self.reward or 0.0) > 0))
        return success is not None and success > 0
