"""One part of an algorithm on plain lists: for tests, and to see what a part does."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from envkit.config import kinds
from envkit.config.algorithm import AlgorithmSection
from envkit.errors import UsageError
from envkit.types import Floats, Sample, StopReason, floats, hashes, stable_hash

from ..algorithms.algorithm import Algorithm, Chosen
from ..algorithms.parts import Advantages, PolicyLoss, Tokens
from ..algorithms.terms import kl_loss
from .batching import TrainRows
from .rollouts import rollouts_of

_FAMILIES = ("advantages", "losses", "aggregations", "corrections")


class Evaluated(NamedTuple):
    """What a part makes of some rollouts. There is a list for each rollout, with a number for each policy token.

    Attributes:
        value: The advantages, losses, weights or factors.
        gradient: For a loss, the derivative of the sum of all losses with respect to each log-probability; else empty.
        targets: For an advantage with critics, the target of each critic for each turn or token of each rollout.
        metrics: For a loss, its further values.
        entropy_weight: For an advantage that has them, the factors of the entropy bonus; else empty.
    """

    value: list[list[float]]
    gradient: Sequence[list[float]] = ()
    targets: Sequence[list[list[float]]] = ()
    metrics: Mapping[str, list[list[float]]] = MappingProxyType({})
    entropy_weight: Sequence[list[float]] = ()


def evaluate_part(
    kind: str,
    settings: Mapping[str, Any],
    rollouts: Sequence[Mapping[str, Any]],
    algorithm: Mapping[str, Any] | None = None,
) -> Evaluated:
    """Apply one part to plain numbers, by the same steps as the trainer.

    Args:
        kind: Name of the part.
        settings: Its keys.
        rollouts: The rollouts. Each has ``turns``, and may have ``group`` (default: all in one), ``member`` (its number
            in the group), ``stop`` (name of a `StopReason`; ``"terminated"``) and ``after`` (the value after its last
            token, like ``value`` of a turn; 0). A turn may have ``reward`` (0),
            ``rewards`` (by name), ``observation`` (a text), ``value`` (a number, or one for each critic),
            ``starts_sample`` (false) and one number for each of its tokens: ``logp`` (0), ``old`` (as ``logp``),
            ``sampled`` (as ``old``), ``reference``, ``entropy`` (0), ``advantage`` (0), ``values`` (for a critic of
            tokens) and ``mask`` (1; 0 for tokens of tools, whose other numbers mean nothing). A turn without any of
            these has one token.
        algorithm: Further keys of the section `algorithm`: for an advantage, ``overlong``, and ``kl`` with ``place:
            reward``; for a loss, ``kl`` in the loss and ``entropy_coefficient``, whose terms are added to it.

    Raises:
        UsageError: There is no such part.
        ValueError: A rollout or turn has an unknown name, or numbers for different numbers of tokens, or there is no
            policy token.
        ValidationError: A key of the settings is wrong.
    """
    family = next((name for name in _FAMILIES if kind in kinds.names(name)), None)
    if family is None:
        known = ", ".join(name for one in _FAMILIES for name in kinds.names(one))
        raise UsageError(f"no part is called {kind!r}; there are: {known}")
    part = kinds.find(family, kind)
    chosen = Chosen(part, part.section.model_validate({"kind": kind, **settings}))
    _check(rollouts)
    numbers = _Numbers(rollouts)
    segments = numbers.rows.segments(range(len(numbers.rows.samples)))
    if family == "aggregations":
        return Evaluated(numbers.by_rollout(chosen(segments)))
    if family == "corrections":
        return Evaluated(numbers.by_rollout(chosen(numbers.of("old"), numbers.of("sampled"), segments)))
    whole = Algorithm.of(AlgorithmSection.model_validate(algorithm or {}))
    if family == "advantages":
        whole = replace(whole, advantage=chosen)
    kl_coefficient = whole.section.kl.coefficient
    given = rollouts_of(
        numbers.rows, whole, *numbers.values(chosen), numbers.lists("entropy"), kl_coefficient=kl_coefficient
    )
    if family == "advantages":
        made: Advantages = chosen(given)
        weight_N = made.entropy_weight_N
        return Evaluated(
            numbers.by_rollout(made.advantage_N),
            targets=() if made.targets is None else [numbers.targets(one) for one in made.targets],
            entropy_weight=() if weight_N is None else numbers.by_rollout(weight_N),
        )
    logp_N = numbers.of("logp").requires_grad_()
    prepared_N = None
    if chosen.part.prepare is not None:
        prepared_N = chosen.part.prepare(given, numbers.of("advantage").float(), chosen.section)
    reference_N = numbers.of("reference") if numbers.rows.reference else None
    inputs = (reference_N, numbers.of("entropy"), numbers.of("advantage"))
    tokens = Tokens(logp_N, numbers.of("old"), numbers.of("sampled"), *inputs, segments, prepared_N)
    loss: PolicyLoss = chosen(tokens)
    total_N = loss.loss_N - whole.section.entropy_coefficient * tokens.entropy_N
    if kl_coefficient > 0 and whole.section.kl.place == "loss":
        total_N = total_N + kl_coefficient * kl_loss(tokens, whole.section.kl.estimator)
    (gradient_N,) = torch.autograd.grad(total_N.sum(), logp_N)
    return Evaluated(
        numbers.by_rollout(total_N.detach()),
        numbers.by_rollout(gradient_N),
        metrics={name: numbers.by_rollout(value_N) for name, value_N in loss.metrics.items()},
    )


class _Numbers:
    """The numbers of `rollouts` as samples, and results by rollout."""

    def __init__(self, rollouts: Sequence[Mapping[str, Any]]) -> None:
        self._turns: list[list[Mapping[str, Any]]] = []  # of each sample
        self._rollouts = rollouts
        samples, self._owners = [], list[int]()
        for number, rollout in enumerate(rollouts):
            for part in _samples(rollout["turns"]):
                if any(own for _, turn in part for own in _of(turn, "mask")):  # as in a train step
                    samples.append(_sample(number, rollout, part))
                    self._owners.append(number)
                    self._turns.append([turn for _, turn in part])
        owners = [sorted({*self._owners}).index(owner) for owner in self._owners]
        has_reference = any("reference" in turn for rollout in rollouts for turn in rollout["turns"])
        reference = self.lists("reference") if has_reference else []
        self.rows = TrainRows(samples, owners, self.lists("advantage"), self.lists("old"), [], [], reference)

    def lists(self, name: str) -> list[Floats]:
        """Return a number of each policy token, sample by sample."""
        return [floats(self._of_policy(turns, name)) for turns in self._turns]

    def of(self, name: str) -> Tensor:
        """Return a number of each policy token [N], in float64."""
        return torch.tensor([one for turns in self._turns for one in self._of_policy(turns, name)], dtype=torch.float64)

    def _of_policy(self, turns: Sequence[Mapping[str, Any]], name: str) -> list[float]:
        found = [one for turn in turns for one in zip(_of(turn, name), _of(turn, "mask"), strict=True)]
        return [float(value) for value, own in found if own]

    def values(self, chosen: Chosen) -> tuple[list[Tensor], list[Tensor]]:
        """Return the estimates of the critics that a part needs, sample by sample, and those after the last token."""
        if not any(need.startswith("critics:") for need in chosen.needs):
            return [], []
        after = [self._rollouts[owner].get("after", 0.0) for owner in self._owners]
        ends = [torch.tensor(one if isinstance(one, Sequence) else [one], dtype=torch.float32) for one in after]
        if "token_values" in chosen.needs:
            return [torch.tensor(one)[None] for one in self.lists("values")], [one[:1] for one in ends]
        found = []
        for turns in self._turns:
            own = [turn.get("value", 0.0) for turn in turns if any(_of(turn, "mask"))]
            found.append(
                torch.tensor([one if isinstance(one, Sequence) else [one] for one in own], dtype=torch.float32).T
            )
        return found, ends

    def by_rollout(self, value_N: Tensor) -> list[list[float]]:
        """Return the values of the tokens of each rollout."""
        found: list[list[float]] = [[] for _ in self._rollouts]
        sizes = [sample.num_policy_tokens for sample in self.rows.samples]
        for owner, part in zip(self._owners, torch.split(value_N, sizes), strict=True):
            found[owner] += part.tolist()
        return found

    def targets(self, target: Tensor) -> list[list[float]]:
        """Return the targets of a critic [E, T] or [N] for the turns or tokens of each rollout."""
        if target.ndim == 1:
            return self.by_rollout(target)
        rows = dict(zip(sorted({*self._owners}), target.tolist(), strict=True))
        return [rows.get(number, [])[: len(one["turns"])] for number, one in enumerate(self._rollouts)]


def _samples(turns: Sequence[Mapping[str, Any]]) -> list[list[tuple[int, Mapping[str, Any]]]]:
    """Divide the numbered turns of a rollout into samples."""
    parts: list[list[tuple[int, Mapping[str, Any]]]] = []
    for number, turn in enumerate(turns):
        if not parts or turn.get("starts_sample"):
            parts.append([])
        parts[-1].append((number, turn))
    return parts


def _sample(owner: int, rollout: Mapping[str, Any], part: Sequence[tuple[int, Mapping[str, Any]]]) -> Sample:
    """Return some turns of a rollout as a sample. A token for the prompt precedes the turns' own tokens."""
    turns = rollout["turns"]
    mask = [False, *(bool(own) for _, turn in part for own in _of(turn, "mask"))]
    names = sorted({name for turn in turns for name in turn.get("rewards", {})})
    return Sample(
        group=rollout.get("group", "all"),
        token_ids=[0] * len(mask),  # type: ignore[arg-type]  # the constructor converts sequences
        mask=mask,  # type: ignore[arg-type]
        logprobs=floats([0.0, *(one for _, turn in part for one in _of(turn, "sampled"))]),
        turn_ids=[part[0][0], *(number for number, turn in part for _ in _of(turn, "mask"))],  # type: ignore[arg-type]
        rewards=floats([turn.get("reward", 0.0) for turn in turns]),
        versions=[0] * len(mask),  # type: ignore[arg-type]
        episode=str(owner),
        member=rollout.get("member", owner),
        stop=StopReason(rollout.get("stop", "terminated")),
        observations=hashes([stable_hash(turn["observation"]) if "observation" in turn else 0 for turn in turns]),
        named_rewards={name: floats([turn.get("rewards", {}).get(name, 0.0) for turn in turns]) for name in names},
    )


def _check(rollouts: Sequence[Mapping[str, Any]]) -> None:
    """Raise `ValueError` for unknown names, numbers of different tokens, and rollouts without a policy token."""
    turns = [turn for rollout in rollouts for turn in rollout["turns"]]
    for what, given, known in (("rollout", rollouts, _OF_ROLLOUTS), ("turn", turns, (*_OF_TURNS, *_OF_TOKENS))):
        if unknown := {name for one in given for name in one} - {*known}:
            raise ValueError(f"no such key of a {what}: {min(unknown)}; there are: {', '.join(known)}")
    for turn in turns:
        lengths = {name: len(turn[name]) for name in _OF_TOKENS if name in turn}
        if len({*lengths.values()}) > 1:
            raise ValueError(f"a turn has numbers of different tokens: {lengths}")
    if not any(own for turn in turns for own in _of(turn, "mask")):
        raise ValueError("there is no policy token")


_LIKE = {"old": "logp", "sampled": "old", "reference": "old"}
_OF_ROLLOUTS = ("turns", "group", "member", "stop", "after")
_OF_TURNS = ("reward", "rewards", "observation", "value", "starts_sample")
_OF_TOKENS = ("logp", "old", "sampled", "reference", "entropy", "advantage", "values", "mask")


def _of(turn: Mapping[str, Any], name: str) -> Sequence[float]:
    """Return the numbers of a turn's tokens."""
    if name in turn:
        found: Sequence[float] = turn[name]
        return found
    if name in _LIKE:
        return _of(turn, _LIKE[name])
    length = next((len(turn[other]) for other in _OF_TOKENS if other in turn), 1)
    return [1.0 if name == "mask" else 0.0] * length
