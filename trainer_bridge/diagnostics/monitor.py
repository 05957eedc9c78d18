"""The monitor of a run, which feeds its events to the checks, and the probe, which makes those of pushes."""

from __future__ import annotations

from collections import deque
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import anyio
import numpy as np

from envkit.protocols import Engine, Trainer
from envkit.types import JSON, Completion, FinishReason, Sample, SamplingParams

from ..weights.channel import Push
from . import checks
from .checks import Finding, PushProbe, Row, TrainStep

TOKENS = 8
"""Maximum number of tokens of the completion."""
_SEED = 20_240_501


class Diagnostics:
    """Watches a run. Each method takes an event, and returns the findings that are new or that stop the run.

    Args:
        rows: Rows of ``metrics.jsonl`` if the run is resumed.
        found: Findings of the run before the resume, as `found` has them; changed in place.
        stop_on: Names of the findings that stop the run.
        dtype: The coarser number format of engine and trainer: float32 or bfloat16.

    Attributes:
        found: For each finding by name: `line`, and `first_step` and `last_step`, the train steps after which it was
            first and last seen.
    """

    def __init__(
        self,
        rows: Iterable[Row] = (),
        found: dict[str, JSON] | None = None,
        *,
        stop_on: Collection[str] = (checks.WEIGHTS_NOT_APPLIED,),
        dtype: str = "float32",
    ) -> None:
        self.stop_on = stop_on
        self._tolerance_nats, self._resolution_nats = checks.TOLERANCE_NATS[dtype], checks.RESOLUTION_NATS[dtype]
        self.found = {} if found is None else found
        self._recorded: list[JSON] = []
        self._step = 0
        self._first: Row | None = None
        self._steps: deque[TrainStep] = deque(maxlen=checks.STEPS)
        self._rows: deque[Row] = deque(maxlen=checks.INVALID_STEPS)
        self._before: dict[int, PushProbe] = {}
        self._is_changed: dict[int, bool] = {}
        for row in rows:
            self._recorded.append(row.get("step"))
            self._add(row)

    def begun(self, step: int) -> list[Finding]:
        """The run begins, or continues after train step `step`."""
        recorded, self._recorded, self._step = self._recorded, [], step
        return self._enter(step, [checks.steps_lost_or_repeated(recorded, step)])

    def pushed(self, probe: PushProbe) -> list[Finding]:
        """Weights were pushed to the engine, and `probe` is that of one of its replicas."""
        found: list[Finding | None] = []
        replica, before = probe.replica, self._before.get(probe.replica)
        if before is not None and probe.equals(before):
            # Compare with the first probe that had this output: several small updates may be visible only together.
            self._is_changed[replica] |= probe.is_changed
            probe = replace(probe, is_changed=self._is_changed[replica])
            found.append(checks.weights_not_applied(before, probe, resolution_nats=self._resolution_nats))
        else:
            self._before[replica], self._is_changed[replica] = probe, False
        where = f"{len(probe.token_ids)} tokens sampled after the push of version {probe.version}"
        gap_nats, tolerance_nats = checks.probe_gap_nats(probe), checks.FEW_TOKENS * self._tolerance_nats
        found.append(checks.engine_disagrees(gap_nats, tolerance_nats=tolerance_nats, where=where))
        return self._enter(probe.version, found)

    def stepped(self, event: TrainStep) -> list[Finding]:
        """A train step is finished."""
        self._add(event.values)
        self._steps.append(event)
        previous, self._step = self._step, event.step
        found = [checks.samples_lost_or_repeated(event, previous), checks.void_after_action(self._steps)]
        return self._enter(event.step, [*found, *self._of_metrics()])

    def summary(self) -> list[JSON]:
        """Return all findings for ``summary.json``. A run shorter than the period of a check is judged as a whole."""
        more = [one for one in self._of_metrics(is_over=True) if not self._has_cause(one, self._step)]
        found = {one.name: _entry(one, self._step) for one in more} | self.found
        return [{"name": name, **entry} for name, entry in found.items() if isinstance(entry, dict)]

    def _of_metrics(self, *, is_over: bool = False) -> list[Finding]:
        return checks.of_metrics(self._first, list(self._rows), tolerance_nats=self._tolerance_nats, is_over=is_over)

    def _add(self, row: Row) -> None:
        self._rows.append(row)
        if self._first is None and checks.entropy_nats(row) is not None:
            self._first = row

    def _enter(self, step: int, found: Iterable[Finding | None]) -> list[Finding]:
        """Remember findings, and return those that are new or stop the run."""
        shown: list[Finding] = []
        for one in found:
            if one is None or self._has_cause(one, step):
                continue
            before = self.found.get(one.name)
            first = before.get("first_step") if isinstance(before, dict) else step
            self.found[one.name] = _entry(one, step) | {"first_step": first}
            if before is None or one.name in self.stop_on:
                shown.append(one)
        return shown

    def _has_cause(self, finding: Finding, step: int) -> bool:
        """Whether a disagreement follows from old weights in the engine, which were found at the last push."""
        if finding.name != checks.ENGINE_DISAGREES:
            return False
        entry = self.found.get(checks.WEIGHTS_NOT_APPLIED)
        last = entry.get("last_step") if isinstance(entry, dict) else None
        return isinstance(last, int) and last >= step - 1


def _entry(finding: Finding, step: int) -> dict[str, JSON]:
    return {"line": finding.line, "first_step": step, "last_step": step}


@dataclass(frozen=True, slots=True)
class Probe:
    """Probes an engine. The request has no session, so it neither uses nor leaves anything in the engine's cache.

    Attributes:
        engine: The engine, which must not be generating for others at the time. If it has the attribute
            `completers`, as `VllmEngine` has, each of them is probed.
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
        completers: Mapping[int, Callable[[Sequence[int], SamplingParams], Awaitable[Completion]]]
        completers = getattr(self.engine, "completers", {0: self.engine.generate})
        for index, generate in completers.items():
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
