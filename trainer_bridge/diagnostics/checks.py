"""The events of a training run, and the checks: pure functions of events that return what is wrong.

Checks of metrics look at the last train steps of a run. A problem must occur in each of them, unless a single train
step proves it. If a problem is the cause of another, only the cause is returned: for example, without valid actions all
episodes of a group have the same return.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from envkit.types import JSON

STEPS = 5
"""Number of consecutive train steps in which a problem must occur, unless another number is given."""
INVALID_STEPS = 10
"""Number of consecutive train steps without a valid action that is a problem."""
MIN_VOID, VOID_SHARE = 8, 0.05
"""Minimum number, and share, of episodes that are void after the same kind of action, that is a problem."""
CUT_SHARE = 0.5
"""Minimum share of cut-off completions that is a problem."""
COLLAPSED_SHARE = 0.02
"""Share of the run's first entropy below which the entropy has collapsed."""
MIN_ENTROPY_NATS = 0.01
"""Minimum first entropy: a policy that was nearly deterministic from the start does not collapse."""
SOLVED = 0.99
"""Success rate from which a deterministic policy is not a problem."""
TOLERANCE_NATS: Mapping[str, float] = {"float32": 1e-3, "bfloat16": 0.1}
"""Maximum mean absolute difference of the log-probabilities of engine and trainer, by the coarser number format."""
FEW_TOKENS = 3.0
"""Factor of the tolerance for the few tokens of a probe, whose mean varies more: for SmolLM2 in bfloat16, means over 8
tokens were between 0.007 and 0.11 nats."""
RESOLUTION_NATS: Mapping[str, float] = {"float32": 1e-5, "bfloat16": 1e-3}
"""Change of a log-probability that is certainly visible in an engine of this number format."""

_ROUNDING_KL = 1e-11
"""KL divergence (nats) from rounding alone: float32 log-probabilities of engine and trainer differ by about 1e-6."""

WEIGHTS_NOT_APPLIED = "weights_not_applied"
ENGINE_DISAGREES = "engine_disagrees"
NO_VALID_ACTION = "no_valid_action"
EVERY_GROUP_FILTERED = "every_group_filtered"
RATIO_ALWAYS_1 = "ratio_always_1"
ENTROPY_COLLAPSE = "entropy_collapse"
SAMPLES_LOST_OR_REPEATED = "samples_lost_or_repeated"
VOID_AFTER_ACTION = "void_after_action"
COMPLETIONS_CUT_OFF = "completions_cut_off"

Row = Mapping[str, JSON]
"""The metrics of a train step, as in ``metrics.jsonl``."""
Rows = Sequence[Row]
"""Rows of consecutive train steps, oldest first."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Something that is wrong with a run: its name, which `diagnostics.stop_on` uses, and a line with advice."""

    name: str
    line: str


@dataclass(frozen=True, slots=True)
class PushProbe:
    """The completion of a fixed prompt after a push: always the same prompt, sampling parameters and random seed.

    Attributes:
        version: Policy version that was pushed.
        is_changed: Whether the weights differ from those of the previous probe, in the engine's number format.
        token_ids: Tokens that the engine sampled.
        engine_logprobs: The engine's log-probabilities of these tokens, in nats.
        trainer_logprobs: The trainer's log-probabilities of these tokens under the pushed weights, in nats.
        replica: Index of the replica of the engine.
    """

    version: int
    is_changed: bool
    token_ids: tuple[int, ...]
    engine_logprobs: tuple[float, ...]
    trainer_logprobs: tuple[float, ...]
    replica: int = 0

    def equals(self, other: PushProbe) -> bool:
        """Whether the engine sampled the same tokens with bit-equal log-probabilities."""
        return (self.token_ids, self.engine_logprobs) == (other.token_ids, other.engine_logprobs)


@dataclass(frozen=True, slots=True)
class TrainStep:
    """A finished train step, and its metrics (`values`).

    Attributes:
        samples: Number of samples that were passed to the trainer.
        accounting: The error of its `accounting.Ledger`; empty if the sums add up.
        void_after: Number of void attempts by the kind of their last action; see `accounting.last_actions`.
        played_after: The same for the others.
    """

    step: int
    values: Row
    samples: int
    accounting: str = ""
    void_after: Mapping[str, int] = field(default_factory=dict)
    played_after: Mapping[str, int] = field(default_factory=dict)


# --- Weights ---------------------------------------------------------------------------------------------------------


def weights_not_applied(before: PushProbe, after: PushProbe, *, resolution_nats: float) -> Finding | None:
    """Check whether the engine runs the weights that were pushed between two probes.

    Equal output alone proves nothing: the weights may not have changed in the engine's number format, or the policy may
    be so sure of these tokens that they have probability 1 under both. The trainer's log-probabilities must have
    changed by more than `resolution_nats`. `after.is_changed` must cover all pushes since `before`.
    """
    if not after.is_changed or not after.equals(before):
        return None
    change = max(map(_distance, after.trainer_logprobs, before.trainer_logprobs), default=0.0)
    if change <= resolution_nats:
        return None
    return Finding(
        WEIGHTS_NOT_APPLIED,
        f"the engine does not run the weights of version {after.version}: it sampled the same {len(after.token_ids)} "
        f"tokens with bit-equal log-probabilities as with version {before.version}, but by the trainer they changed by "
        f"up to {change:.2g} nats; check how the engine loads weights (its log, its cache, its number format)",
    )


def engine_disagrees(gap_nats: float, *, tolerance_nats: float, where: str) -> Finding | None:
    """Check whether engine and trainer agree on the log-probabilities of the same tokens under the same weights.

    `gap_nats` is their mean absolute difference, and `where` names the tokens for the user.
    """
    if gap_nats <= tolerance_nats:
        return None
    return Finding(
        ENGINE_DISAGREES,
        f"engine and trainer differ by {gap_nats:.2g} nats per token (limit {tolerance_nats:g}) on {where}: they do "
        "not compute the same policy, so the gradient is biased; compare their weights, number formats and temperature",
    )


def probe_gap_nats(probe: PushProbe) -> float:
    """Return the mean absolute difference of the log-probabilities of engine and trainer."""
    gaps = [*map(_distance, probe.engine_logprobs, probe.trainer_logprobs)]
    return math.fsum(gaps) / max(len(gaps), 1)


def _distance(one: float, other: float) -> float:
    """Return the absolute difference; infinity if it is not a number."""
    difference = abs(one - other)
    return math.inf if math.isnan(difference) else difference


# --- Metrics ---------------------------------------------------------------------------------------------------------


def of_metrics(first: Row | None, rows: Rows, *, tolerance_nats: float, is_over: bool = False) -> list[Finding]:
    """Run all checks of metrics.

    `first` is the first row of the run whose entropy is known, and `rows` are the last ones. If the run is over, one
    with too few train steps is judged by all of them.
    """

    def last(count: int) -> Rows:
        return rows[-count:] if len(rows) >= count or is_over else ()

    window = last(STEPS)
    invalid, collapse = no_valid_action(last(INVALID_STEPS)), entropy_collapse(first, window)
    has_other_cause = bool(invalid or collapse) or (not is_over and _all(window, _has_no_valid_action))
    found = [
        completions_cut_off(window),
        invalid,
        collapse,
        None if has_other_cause else every_group_filtered(window),
    ]
    if rows:
        found.append(ratio_always_1(rows[-1]))
        gap_nats = _number(rows[-1], "sampler_gap_nats")
        if gap_nats is not None:
            where = "the tokens of the last train step"
            found.append(engine_disagrees(gap_nats, tolerance_nats=tolerance_nats, where=where))
    return [one for one in found if one is not None]


def completions_cut_off(rows: Rows) -> Finding | None:
    """Check for rows in which half of the completions or more reached the token limit."""
    if not _all(rows, lambda row: (_number(row, "cut_completions") or 0.0) >= CUT_SHARE):
        return None
    shares = [_number(row, "cut_completions") or 0.0 for row in rows]
    return Finding(
        COMPLETIONS_CUT_OFF,
        f"{math.fsum(shares) / len(shares):.0%} of the completions of {_period(rows)} were cut off at "
        "rollout.turn_tokens; raise it (and rollout.max_tokens), or ask for shorter answers",
    )


def no_valid_action(rows: Rows) -> Finding | None:
    """Check for rows without a valid action, or in which the renderer read no action at all."""
    if not _all(rows, _has_no_valid_action):
        return None
    if _all(rows, lambda row: _number(row, "empty_actions") == 1):
        seen = f"every action of {_period(rows)} was empty: the renderer found no action in the completions"
        advice = "read trajectories/, check renderer.thinking, rollout.turn_tokens and `envkit check-template`"
    else:
        seen = f"no action of {_period(rows)} was valid: the policy does not use the answer format of the environment"
        advice = "read trajectories/, then try imitation of demonstrations or a model that follows instructions"
    return Finding(NO_VALID_ACTION, f"{seen}; {advice}")


def every_group_filtered(rows: Rows) -> Finding | None:
    """Check for rows in which no group has anything to learn from, because its episodes had the same return."""
    if not _all(rows, lambda row: _number(row, "advantage_abs") == 0):
        return None
    if _all(rows, lambda row: _number(row, "success") == 1):
        why = "every episode succeeded; use harder levels (env.options)"
    else:
        why = (
            "all episodes of each group had the same return, so every advantage was 0; try easier levels "
            "(env.options), a larger rollout.group_size, a higher rollout.temperature or longer imitation"
        )
    return Finding(EVERY_GROUP_FILTERED, f"nothing to learn in {_period(rows)}: {why}")


def entropy_collapse(first: Row | None, rows: Rows) -> Finding | None:
    """Check for rows whose entropy is a small share of the first one's, although the tasks are not solved."""
    before = None if first is None else entropy_nats(first)
    if before is None or before < MIN_ENTROPY_NATS:
        return None

    def is_collapsed(row: Row) -> bool:
        now, success = entropy_nats(row), _number(row, "success")
        return now is not None and now < COLLAPSED_SHARE * before and (success is None or success < SOLVED)

    if not _all(rows, is_collapsed):
        return None
    return Finding(
        ENTROPY_COLLAPSE,
        f"the entropy fell from {before:.2g} to {entropy_nats(rows[-1]) or 0.0:.2g} nats per token in {_period(rows)}: "
        "the policy repeats itself and explores no more; go back to an earlier checkpoint, lower "
        "trainer.learning_rate, or raise algorithm.entropy_coefficient or algorithm.kl.coefficient",
    )


def entropy_nats(row: Row) -> float | None:
    """Return the entropy of a train step; None if it is unknown, because no token contributed to the loss."""
    return None if _number(row, "learned_tokens") == 0 else _number(row, "entropy_nats")


def ratio_always_1(row: Row) -> Finding | None:
    """Check whether the probability ratio never moved, although several updates with a gradient were made."""
    names = ("updates", "advantage_abs", "learning_rate", "approx_kl")
    updates, advantage, rate, kl = (_number(row, name) for name in names)
    if not updates or updates < 2 or not advantage or not rate or kl is None or abs(kl) > _ROUNDING_KL:
        return None
    return Finding(
        RATIO_ALWAYS_1,
        f"the probability ratio was 1 for every token in all {updates:.0f} updates of the last train step, so nothing "
        "was clipped: the old log-probabilities are computed anew in each update, or the updates do not reach the "
        "weights; check the trainer and algorithm.old_logprobs",
    )


# --- Samples ---------------------------------------------------------------------------------------------------------


def samples_lost_or_repeated(event: TrainStep, previous: int) -> Finding | None:
    """Check whether the episodes of a train step were trained on exactly once. `previous` is the last step's number."""
    problems: list[str] = []
    if event.step != previous + 1:
        problems.append(f"train step {event.step} follows train step {previous}")
    if event.accounting:
        problems.append(event.accounting)
    trained = _number(event.values, "samples")
    if trained is not None and trained != event.samples:
        problems.append(f"the trainer got {event.samples} samples, but trained on {trained:.0f}")
    return _lost_or_repeated(problems)


def steps_lost_or_repeated(recorded: Sequence[JSON], step: int) -> Finding | None:
    """Check whether the recorded train steps are 1 to `step`, each once."""
    if list(recorded) == list(range(1, step + 1)):
        return None
    wrong = next((row for row, one in enumerate(recorded, 1) if one != row), len(recorded) + 1)
    found = f"row {wrong} is not that of train step {wrong}"
    return _lost_or_repeated([f"metrics.jsonl has {len(recorded)} rows for {step} train steps: {found}"])


def _lost_or_repeated(problems: Sequence[str]) -> Finding | None:
    if not problems:
        return None
    advice = "the results of this run cannot be trusted; check the trainer, and that one process writes the run folder"
    return Finding(SAMPLES_LOST_OR_REPEATED, f"{'; '.join(problems)}; {advice}")


def void_after_action(events: Sequence[TrainStep]) -> Finding | None:
    """Check whether attempts become void after one kind of action, and after hardly any other.

    Void attempts are not trained on. So a policy that can cause them gets rid of the episodes that go badly.
    """
    void, played = Counter[str](), Counter[str]()
    for event in events:
        void.update(event.void_after)
        played.update(event.played_after)
    if not void:
        return None
    kind, count = void.most_common(1)[0]
    others_void, others_played = void.total() - count, played.total() - played[kind]
    is_frequent = count >= MIN_VOID and count >= VOID_SHARE * (void.total() + played.total())
    is_alone = others_void <= VOID_SHARE * (others_void + others_played) and others_played >= MIN_VOID
    if not is_frequent or not is_alone or count < played[kind]:
        return None
    return Finding(
        VOID_AFTER_ACTION,
        f"{count} of the {void.total()} void episodes of the last {len(events)} train steps ended with an action of "
        f"the kind {kind!r}, after which only {played[kind]} others were valid: the policy can leave an episode by it; "
        "read trajectories/, and mend the limit or the environment that makes such an episode void",
    )


# --- Rows ------------------------------------------------------------------------------------------------------------


def _has_no_valid_action(row: Row) -> bool:
    return _number(row, "action_is_valid") == 0 or _number(row, "empty_actions") == 1


def _all(rows: Rows, test: Callable[[Row], bool]) -> bool:
    """Return whether there are rows and all of them pass `test`."""
    return bool(rows) and all(test(row) for row in rows)


def _number(row: Row, name: str) -> float | None:
    value = row.get(name)
    return float(value) if isinstance(value, (int, float)) else None


def _period(rows: Rows) -> str:
    return "the last train step" if len(rows) == 1 else f"the last {len(rows)} train steps"
