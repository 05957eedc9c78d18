"""Records of episodes as they lie in files, one JSON object a line: readable text first, token ids after it.

Training runs and evaluations write the same records, and `envkit show` reads them. They are independent of
`Trajectory` and its parts, which hold what the trainer needs.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Self

import msgspec

from envkit.types.environments import Observation, Reset, Step, Task
from envkit.types.sandboxes import Cause
from envkit.types.training import FinishReason, StopReason

FORMAT = 1
"""Number of the format; grows when older readers would misread a line."""


class GenerationRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a language model was given and what it wrote in one turn. N prompt tokens, M completion tokens.

    Attributes:
        prompt: The tokens since the last completion as text, special tokens included.
        completion: The sampled tokens as text, special tokens included.
        finish: Why the completion ended.
        prompt_ids: The tokens behind `prompt` [N].
        completion_ids: The tokens behind `completion` [M].
        logprobs: Their log-probabilities in nats [M]; None where not finite.
        versions: Policy version of the completion, as ranges of (version, number of tokens) in order.
        seconds: Duration of the generation.
        usage: Prompt and completion tokens as an endpoint counted them, which does not tell their ids; otherwise None.
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
    """One action and the environment's answer.

    Attributes:
        generation: How a language model came to the action; None for other players.
        action: The text that the environment was given.
        observation: What the environment showed next; None when the episode was cut off before that.
        reward: Reward of the step; None where not finite or cut off.
        info: What the environment reported about the step.
        seconds: Duration of the step; None where not measured.
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
        """Return the record of a turn; `step` is None when the environment did not answer."""
        made = cls(generation=generation, action=action, seconds=seconds)
        if step is None:
            return made
        return msgspec.structs.replace(made, observation=step.observation, reward=step.reward, info=step.info)


class EpisodeRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One episode.

    Attributes:
        format: `FORMAT` of the writer.
        env_id: Id of the environment.
        seed: Seed of the task.
        options: Options of the task.
        index: Number of the task in its train step or evaluation, from 0.
        member: Number of the attempt at the task, from 0.
        train_step: Train step that it was played for; None in an evaluation.
        valid: False when infrastructure failed, so that the episode says nothing about the policy.
        stop: Why it is over.
        error: One line when it is not valid, otherwise None.
        reward: Sum of the rewards; None where not finite.
        metrics: The environment's own metrics, folded over the episode; None where not finite.
        start: What the environment showed at reset; None when the episode was lost before.
        start_info: What it reported at reset.
        turns: What happened, in order.
        cause: Why its sandbox was lost, if it was and that is known.
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
    ) -> Self:
        """Return the record of an episode of `task`."""
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
        )

    @property
    def succeeded(self) -> bool:
        """Whether the environment calls it a success, or without such a metric, whether the reward is positive."""
        if not self.valid:
            return False
        success = self.metrics.get("success", float((self.reward or 0.0) > 0))
        return success is not None and success > 0
