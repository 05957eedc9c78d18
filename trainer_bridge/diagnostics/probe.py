"""The probe of a push: the engine completes a fixed prompt, and the trainer scores exactly these tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass

import anyio
import numpy as np

from envkit.protocols import Engine, Trainer
from envkit.types import Completion, FinishReason, Sample, SamplingParams

from ..weights.channel import Push
from .checks import PushProbe

TOKENS = 8
"""Maximum number of tokens of the completion."""
_SEED = 20_240_501


@dataclass(frozen=True, slots=True)
class Probe:
    """Probes an engine. The request has no session, so it neither uses nor leaves anything in the engine's cache.

    Attributes:
        engine: The engine, which must not be generating for others at the time. If it has the attribute `replicas`, as
            `VllmEngine` has, each of them is probed.
        trainer: The trainer, whose current weights are those of the last push.
        temperature: Sampling temperature of the run, which the trainer's log-probabilities take into account.
        max_tokens: Maximum total length of prompt and completion in tokens.
        timeout_s: Maximum seconds of the completion.
    """

    engine: Engine
    trainer: Trainer
    temperature: float
    max_tokens: int
    timeout_s: float = 600.0

    async def measure(self, prompt: Sequence[int], push: Push) -> list[PushProbe]:
        """Return the completion of `prompt` after `push` by each replica.

        A replica that misses the deadline or is aborted, because it was lost, is left out.
        """
        count = max(1, min(TOKENS, self.max_tokens - len(prompt)))
        params = SamplingParams(temperature=self.temperature, max_tokens=count, seed=_SEED)
        probes: list[PushProbe] = []
        replicas: Mapping[int, Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]]
        replicas = getattr(self.engine, "replicas", {0: self.engine.generate})
        for index, generate in replicas.items():
            with anyio.move_on_after(self.timeout_s) as scope:
                completion = await generate(prompt, params)
            if scope.cancelled_caught or completion.finish is FinishReason.ABORTED:
                continue
            (scored,) = await self.trainer.score([_sample(prompt, completion)])
            probes.append(
                PushProbe(
                    version=push.weights.version,
                    is_changed=push.is_changed,
                    token_ids=tuple(completion.token_ids.tolist()),
                    engine_logprobs=tuple(completion.logprobs.tolist()),
                    trainer_logprobs=tuple(scored.tolist()),
                    replica=index,
                )
            )
        return probes


def _sample(prompt: Sequence[int], completion: Completion) -> Sample:
    count, size = len(prompt), len(completion.token_ids)
    mask = np.arange(count + size) >= count
    return Sample(
        group="probe",
        token_ids=np.concatenate([np.array(prompt, dtype=np.int32), completion.token_ids]),
        mask=mask,
        logprobs=np.concatenate([np.zeros(count, dtype=np.float32), completion.logprobs]),
        turn_ids=np.zeros(count + size, dtype=np.int32),
        rewards=np.zeros(1, dtype=np.float32),
        versions=np.where(mask, completion.versions[-1][0], -1),
        episode="probe",
    )
