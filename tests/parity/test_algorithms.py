"""Parity of the parts of algorithms with functions of verl and TRL, on the same numbers.

Each row of the table is one of their functions and one of our parts. Values and gradients agree, or the row says how
theirs differs; then ours, with this change, agrees with theirs. ``pytest -s`` prints the rows, and this the table:

    .venv/bin/python -m tests.parity.test_algorithms .venv/algorithm-peers/bin/python

Not compared: functions without a counterpart in envkit (verl's ``geo_mean``, ``opo`` and optimal token baselines, TRL's
``vespo``), and verl's ``grpo_passk``, another definition of pass@k: only the best episode of a group has an advantage,
by how much it exceeds the second best. Our parts without a row have no counterpart that can be called.

Axes: N policy tokens, L tokens of a padded rollout.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from envkit.trainer_bridge.algorithms.parts import Segments, Tokens
from envkit.trainer_bridge.algorithms.terms import kl_loss
from envkit.trainer_bridge.trainers.evaluate_part import evaluate_part

pytestmark = [pytest.mark.peers, pytest.mark.xdist_group("algorithm_peers")]

CALLER = Path(__file__).with_name("algorithm_peers.py")
TOLERANCE = 1e-5  # of numbers above 1, relative

Array: TypeAlias = NDArray[np.float64]
Result: TypeAlias = Mapping[str, Array]
"""Numbers for each token: ``value``, and ``gradient`` of a loss, or ``targets`` of a critic."""
Answer: TypeAlias = tuple[Mapping[str, str], list[Result]]
Keys: TypeAlias = Mapping[str, Any]
Rollout: TypeAlias = dict[str, Any]

_OF_TOKENS = ("logp", "old", "sampled", "reference", "advantage", "entropy", "values")


class Case:
    """Some rollouts, in the form of `evaluate_part`; `played` are those with policy tokens."""

    def __init__(self, rollouts: Sequence[Rollout]) -> None:
        self.rollouts = rollouts
        self.played = [rollout for rollout in rollouts if any(_joined(rollout, "mask"))]
        self.length = max(len(_joined(rollout, "mask")) for rollout in rollouts)
        self.groups = [str(rollout["group"]) for rollout in rollouts]
        self.returns = np.array([sum(turn["reward"] for turn in rollout["turns"]) for rollout in rollouts])
        sizes = [int(sum(_joined(rollout, "mask"))) for rollout in rollouts]
        self.rollout_N = np.repeat(np.arange(len(rollouts)), sizes)

    def of(self, name: str) -> Array:
        """Return a number of each policy token [N]."""
        return np.array(
            [
                one
                for rollout in self.rollouts
                for one, own in zip(_joined(rollout, name), _joined(rollout, "mask"), strict=True)
                if own
            ]
        )

    def with_tokens(self, change: Callable[[dict[str, float]], Mapping[str, float]]) -> Case:
        """Return a case with other numbers of the tokens: what `change` makes of the old ones."""
        rollouts = []
        for rollout in self.rollouts:
            turns = []
            for turn in rollout["turns"]:
                tokens = [{name: turn[name][at] for name in _OF_TOKENS} for at in range(len(turn["mask"]))]
                changed = [{**token, **change(token)} for token in tokens]
                turns.append({**turn, **{name: [token[name] for token in changed] for name in _OF_TOKENS}})
            rollouts.append({**rollout, "turns": turns})
        return Case(rollouts)

    def padded(self) -> dict[str, Any]:
        """Return the numbers as `algorithm_peers.py` takes them; a turn's reward is at its last token."""
        numbers: dict[str, list[list[float]]] = {
            name: [_joined(rollout, name) for rollout in self.rollouts] for name in (*_OF_TOKENS, "mask")
        }
        numbers["value"] = numbers.pop("values")
        numbers["reward"] = [
            [one for turn in rollout["turns"] for one in (*[0.0] * (len(turn["mask"]) - 1), turn["reward"])]
            for rollout in self.rollouts
        ]
        names = self.rollouts[0]["turns"][0].get("rewards", {})
        named = {
            name: [sum(turn["rewards"][name] for turn in rollout["turns"]) for rollout in self.rollouts]
            for name in names
        }
        tables = {key: [row + [0.0] * (self.length - len(row)) for row in table] for key, table in numbers.items()}
        return {**tables, "groups": self.groups, "named": named}


def _joined(rollout: Rollout, name: str) -> list[float]:
    return [one for turn in rollout["turns"] for one in turn[name]]


def ragged(**sizes: int) -> Case:
    """Return a case with groups of these sizes: turns and rollouts of different lengths, with tokens of tools.

    All returns of the group `b` are equal. The numbers are multiples of 1/64, which float32 holds exactly.
    """
    chance = random.Random(7)

    def number(low: float, high: float) -> float:
        return chance.randint(round(64 * low), round(64 * high)) / 64

    def tokens(length: int, advantage: float) -> dict[str, list[float]]:
        old = [number(-5, -0.125) for _ in range(length)]
        near = [min(one + number(-0.4, 0.4), -1 / 64) for one in old]
        return {
            "old": old,
            "logp": [chance.choice((number(-5, -0.125), one)) for one in near],
            "sampled": [min(one + number(-0.8, 0.8), -1 / 64) for one in old],
            "reference": [number(-5, -1 / 64) for _ in range(length)],
            "advantage": [advantage] * length,
            "entropy": [number(0, 3) for _ in range(length)],
            "values": [number(-1, 1) for _ in range(length)],
            "mask": [1.0] * length,
        }

    misleading = {"old": -9.0, "logp": -0.5, "sampled": -2.0, "reference": -7.0, "advantage": -90.0, "entropy": 9.0}
    rollouts = []
    for group, size in sizes.items():
        for _ in range(size):
            turns: list[dict[str, Any]] = []
            for _ in range(chance.randint(1, 3)):
                own = tokens(chance.randint(1, 4), number(-2, 2))
                tools = chance.randint(0, 2)
                of_tools = {**misleading, "values": 50.0, "mask": 0.0}
                turn: dict[str, Any] = {name: [of_tools[name]] * tools + own[name] for name in own}
                rewards = {"first": number(0, 1), "second": number(-8, 8)}
                turns.append({**turn, "reward": 0.0 if group == "b" else number(-1, 1), "rewards": rewards})
            if group == "b":
                turns[-1]["reward"] = 0.5
            rollouts.append({"group": group, "turns": turns})
    return Case(rollouts)


def steady(case: Case) -> Case:
    """Return the case with one advantage for each rollout: that of its last token."""
    rollouts = []
    for rollout in case.rollouts:
        last = rollout["turns"][-1]["advantage"][-1]
        turns = [{**turn, "advantage": [last if own else -90.0 for own in turn["mask"]]} for turn in rollout["turns"]]
        rollouts.append({**rollout, "turns": turns})
    return Case(rollouts)


def single_tokens(case: Case) -> Case:
    """Return the case with a rollout for each policy token."""
    keys = (*_OF_TOKENS, "mask")
    return Case(
        [
            {"group": "a", "turns": [{"reward": 0.0, **{key: [turn[key][at]] for key in keys}}]}
            for rollout in case.rollouts
            for turn in rollout["turns"]
            for at, own in enumerate(turn["mask"])
            if own
        ]
    )


def reward_at_end(case: Case) -> Case:
    """Return the case with the rewards of the last turns only."""
    return Case(
        [
            {
                **rollout,
                "turns": [*({**turn, "reward": 0.0} for turn in rollout["turns"][:-1]), rollout["turns"][-1]],
            }
            for rollout in case.rollouts
        ]
    )


def one_reward(case: Case) -> Case:
    """Return the case without the named rewards."""
    return Case(
        [{**rollout, "turns": [{**turn, "rewards": {}} for turn in rollout["turns"]]} for rollout in case.rollouts]
    )


def with_void(case: Case) -> Case:
    """Return the case with a further rollout, all of whose tokens are masked."""
    first = case.rollouts[0]
    turns = [{**turn, "mask": [0.0] * len(turn["mask"])} for turn in first["turns"]]
    return Case([*case.rollouts, {**first, "turns": turns}])


_RAGGED = ragged(a=4, b=3, c=2)
CASES: Mapping[str, Case] = {
    "ragged": _RAGGED,
    "group of one": ragged(a=4, b=3, c=1),
    "reward at the end": reward_at_end(_RAGGED),
    "reward at the end, a group of one": reward_at_end(ragged(a=4, b=3, c=1)),
    "equal groups": one_reward(ragged(a=4, b=4, c=4)),
    "equal groups, two rewards": ragged(a=4, b=4, c=4),
    "one advantage a rollout": steady(_RAGGED),
    "sampler is old policy": _RAGGED.with_tokens(lambda token: {"sampled": token["old"]}),
    "first update": _RAGGED.with_tokens(lambda token: {"logp": token["old"]}),
    "all ratios 1.06": _RAGGED.with_tokens(lambda token: {"logp": token["old"] + 1 / 16}),
    "no advantage": _RAGGED.with_tokens(lambda token: {"advantage": 0.0}),
    "one token a rollout": single_tokens(_RAGGED),
    "a void rollout": with_void(_RAGGED),
}


class Row(NamedTuple):
    """A row of the table.

    Attributes:
        project: Whose function it is.
        function: Its name.
        theirs: Its settings.
        kind: Our part, or ``kl``.
        ours: Its settings.
        case: Name of the rollouts.
        aggregation: The part, and its settings, whose weights the losses have; None for 1.
        compared: What is compared: names of results of theirs by those of ours.
        difference: How theirs differs; empty if it agrees.
        change: Makes theirs of ours.
    """

    project: str
    function: str
    theirs: Keys
    kind: str
    ours: Keys
    case: str = "ragged"
    aggregation: tuple[str, Keys] | None = None
    compared: Mapping[str, str] = {"value": "value", "gradient": "gradient"}
    difference: str = ""
    change: Callable[[Result, Case], Result] | None = None


def standardised(value_N: Array, epsilon: float = 0.0) -> Array:
    return np.asarray((value_N - value_N.mean()) / (value_N.std(ddof=1) + epsilon))


def with_raw_reward(result: Result, case: Case, divisor: float = 1.0) -> Result:
    """An episode without others in its group keeps its reward."""
    raw_E = np.array([case.groups.count(group) == 1 for group in case.groups]) * case.returns / divisor
    return {"value": result["value"] + raw_E[case.rollout_N]}


def with_whole_returns(result: Result, case: Case) -> Result:
    """All tokens have the return of the whole episode; without others in its group, less no mean."""
    mean_E = np.array([case.returns[np.array(case.groups) == group].mean() for group in case.groups])
    alone_E = np.array([case.groups.count(group) == 1 for group in case.groups])
    return {"value": standardised((case.returns - mean_E * ~alone_E)[case.rollout_N])}


def normalised_over_tokens(result: Result, case: Case) -> Result:
    return {"value": standardised(result["value"])}


def with_epsilon(result: Result, case: Case, *, of_batch: bool) -> Result:
    """The deviation of the returns has 1e-4 added, not 1e-6."""
    keys_E = np.array(["all"] * len(case.groups) if of_batch else case.groups)
    deviation_E = np.array([case.returns[keys_E == key].std(ddof=1) for key in keys_E])
    return {"value": result["value"] * ((deviation_E + 1e-6) / (deviation_E + 1e-4))[case.rollout_N]}


def sum_with_epsilon(result: Result, case: Case) -> Result:
    """The same for each of the named rewards, and for their sum."""
    sum_E = np.zeros(len(case.groups))
    groups_E = np.array(case.groups)
    for returns in case.padded()["named"].values():
        for group in set(case.groups):
            own = groups_E == group
            sum_E[own] += standardised(np.array(returns)[own], 1e-4)
    return {"value": standardised(sum_E, 1e-4)[case.rollout_N]}


def with_mean_gradient(result: Result, case: Case) -> Result:
    """The gradient of a token is the mean over its rollout."""
    size_E = np.bincount(case.rollout_N)
    return {**result, "gradient": (np.bincount(case.rollout_N, result["gradient"]) / size_E)[case.rollout_N]}


def with_void_counted(result: Result, case: Case) -> Result:
    """Rollouts without policy tokens count in the denominator."""
    share = len(set(case.rollout_N.tolist())) / len(case.rollouts)
    return {name: number_N * share for name, number_N in result.items()}


def with_maximum_of_ten(result: Result, case: Case) -> Result:
    return {"value": result["value"].clip(max=10), "gradient": result["gradient"] * (result["value"] < 10)}


def with_truncated_ratio(result: Result, case: Case) -> Result:
    ratio_N = np.exp(case.of("logp") - case.of("old"))
    return {"gradient": result["gradient"] * ratio_N.clip(max=3) / ratio_N}


def times_logp(result: Result, case: Case) -> Result:
    return {**result, "value": result["value"] * case.of("logp")}


_VALUE, _GRADIENT = {"value": "value"}, {"gradient": "gradient"}
_CORRECTION = {"value": "correction"}
_CLIP = {"clip_ratio_low": 0.2, "clip_ratio_high": 0.28}
_OURS_CLIP: Keys = {"clip_low": 0.2, "clip_high": 0.28}
_EPSILON = {"epsilon": 0.2, "epsilon_high": 0.28}
_SHARE = round((len(_RAGGED.rollout_N) // 4 + 0.1) / len(_RAGGED.rollout_N), 3)
"""Just above a whole number of tokens: otherwise, their interpolated quantile has one token more than ours."""
_ALONE = "a group of one keeps its raw reward; ours is 0"
_BY_ROLLOUT: tuple[str, Keys] = ("rollout_mean", {})
_BY_TOKEN: tuple[str, Keys] = ("token_mean", {})


def _adv(*words: Any, **more: Any) -> Row:
    return _policy(*words, **more)._replace(compared=_VALUE)


def _policy(*words: Any, **more: Any) -> Row:
    return Row("verl", *words, **more)


def _scores(*words: Any, compared: Mapping[str, str] = _VALUE, **more: Any) -> Row:
    return _loss(*words, **more)._replace(function="_generate_and_score_completions", compared=compared)


def _loss(*words: Any, **more: Any) -> Row:
    return Row("TRL", "_compute_loss", *words, **more)


_grpo, _rloo = "compute_grpo_outcome_advantage", "compute_rloo_outcome_advantage"
_rf, _rf_baseline = (f"compute_reinforce_plus_plus{one}_outcome_advantage" for one in ("", "_baseline"))
_no_std: Keys = {"norm_adv_by_std_in_grpo": False}

ROWS: Sequence[Row] = (
    # verl: advantages
    _adv(_grpo, {}, "group_normalised", {}),
    _adv(_grpo, _no_std, "group_normalised", {"deviation": "none"}),
    _adv(
        *(_grpo, {}, "group_normalised", {}, "group of one"),
        difference=_ALONE,
        change=partial(with_raw_reward, divisor=1 + 1e-6),
    ),
    _adv("compute_grpo_vectorized_outcome_advantage", {}, "group_normalised", {}),
    _adv(_rloo, {}, "group_normalised", {"baseline": "others", "deviation": "none"}),
    _adv(
        *(_rloo, {}, "group_normalised", {"baseline": "others", "deviation": "none"}, "group of one"),
        difference=_ALONE,
        change=with_raw_reward,
    ),
    _adv(
        *("compute_rloo_vectorized_outcome_advantage", {}),
        *("group_normalised", {"baseline": "others", "deviation": "none"}, "group of one"),
    ),
    _adv(_rf, {"gamma": 0.9}, "reinforce_plus_plus", {"gamma": 0.9}),
    _adv(_rf_baseline, {}, "reinforce_plus_plus", {"baseline": "group"}),
    _adv(
        *(_rf_baseline, {}, "reinforce_plus_plus", {"baseline": "group"}, "reward at the end, a group of one"),
        difference="a group of one keeps its raw reward, also in the normalisation; ours is 0",
        change=with_whole_returns,
    ),
    _policy(
        *("compute_gae_advantage_return", {"gamma": 0.95, "lam": 0.9}),
        *("gae", {"unit": "token", "gamma": 0.95, "gae_lambda": 0.9, "bootstrap": False}),
        compared={"value": "value", "targets": "targets"},
    ),
    _adv(
        *("compute_gdpo_outcome_advantage", {"gdpo_reward_keys": ["first", "second"]}),
        *("several_rewards", {"whiten": False}),
        difference="the sum is normalised over tokens; ours over episodes",
        change=normalised_over_tokens,
    ),
    # verl: losses
    _policy("compute_policy_loss_vanilla", {**_CLIP, "clip_ratio_c": 3.0}, "clipped", {**_OURS_CLIP, "dual_clip": 3.0}),
    _policy("compute_policy_loss_gspo", _CLIP, "clipped", {**_OURS_CLIP, "ratio": "rollout", "dual_clip": None}),
    _policy(
        "compute_policy_loss_cispo", {**_CLIP, "clip_ratio_high": 0.5}, "cispo", {"clip_low": 0.2, "clip_high": 0.5}
    ),
    _policy(
        *("compute_policy_loss_sapo", {"tau_pos": 1.0, "tau_neg": 1.5}),
        *("sapo", {"tau_positive": 1.0, "tau_negative": 1.5}),
        aggregation=_BY_ROLLOUT,
    ),
    _policy("compute_policy_loss_gpg", {}, "reinforce", {}),
    _policy(
        *("compute_policy_loss_clip_cov", {**_CLIP, "clip_cov_ratio": 1.0, "clip_cov_lb": 0.5, "clip_cov_ub": 1.5}),
        *("clip_cov", {**_OURS_CLIP, "dual_clip": None, "share": 1.0, "low": 0.5, "high": 1.5}, "all ratios 1.06"),
    ),
    _policy(
        *("compute_policy_loss_kl_cov", {"kl_cov_ratio": 0.2, "ppo_kl_coef": 0.5}),
        *("kl_cov", {"share": 0.2, "coefficient": 0.5}, "all ratios 1.06"),
    ),
    _policy(
        *("compute_policy_loss_dro", {"dro_beta": 0.3}, "kimi", {"tau": 0.3}, "one token a rollout"),
    ),
    *(
        _policy(
            *(f"compute_policy_loss_dppo_{one}", {"clip_ratio_low": at, "clip_ratio_high": at, "clip_ratio_c": 1e9}),
            *("dppo", {"divergence": one, "low": at, "high": at}, "sampler is old policy"),
            difference="the value is that of the ratio times logp, with the same gradient",
            change=times_logp,
        )
        for one, at in (("tv", 0.15), ("kl", 0.05))
    ),
    _policy(
        *("compute_policy_loss_dppo_tv", {"clip_ratio_low": 0.15, "clip_ratio_high": 0.15}),
        *("dppo", {"divergence": "tv", "low": 0.15, "high": 0.15}, "sampler is old policy"),
        compared=_GRADIENT,
        difference="by default, the ratio is at most 3",
        change=with_truncated_ratio,
    ),
    # verl: aggregations
    *(
        _adv("agg_loss", {"loss_agg_mode": mode, **theirs}, kind, ours, "a void rollout")
        for mode, theirs, kind, ours in (
            ("token-mean", {}, "token_mean", {}),
            ("seq-mean-token-mean", {}, "rollout_mean", {}),
            ("seq-mean-token-sum", {}, "constant", {"tokens": 1}),
            ("seq-mean-token-sum-norm", {"loss_scale_factor": 16}, "constant", {"tokens": 16}),
        )
    ),
    # verl: divergence from the reference policy
    _policy("kl_penalty", {"kl_penalty": "k1"}, "kl", {"estimator": "k1"}),
    _policy("kl_penalty", {"kl_penalty": "k2"}, "kl", {"estimator": "k2"}),
    _policy(
        *("kl_penalty", {"kl_penalty": "k3"}, "kl", {"estimator": "k3"}),
        difference="at most 10, without a gradient beyond",
        change=with_maximum_of_ten,
    ),
    _policy(
        *("kl_penalty", {"kl_penalty": "k3+"}, "kl", {"estimator": "k3_unbiased"}, "first update"),
        difference="the value is at most 10",
        change=lambda result, case: {**result, "value": result["value"].clip(max=10)},
    ),
    # verl: corrections of the sampler
    *(
        _adv("compute_rollout_correction_weights", {"rollout_is": unit, "rollout_is_threshold": at}, kind, ours)
        for unit, at, kind, ours in (
            ("token", 1.5, "tis", {"cap": 1.5}),
            ("sequence", 1.5, "tis", {"cap": 1.5, "unit": "rollout"}),
            ("token", "0.6_1.5", "icepop", {"low": 0.6, "high": 1.5}),
            ("sequence", "0.6_1.5", "mis", {"low": 0.6, "cap": 1.5, "unit": "rollout"}),
        )
    ),
    *(
        _adv(
            *("compute_rollout_rejection_mask", {"rollout_rs": mode, "rollout_rs_threshold": at}),
            *("sequence_mask", {"mean": mean, **bounds}),
        )
        for mode, at, mean, bounds in (
            # Their k1 is minus the log-ratio, so their bounds are one divided by ours.
            ("seq_mean_k1", "0.8_1.1", "geometric", {"low": 1 / 1.1, "high": 1 / 0.8}),
            ("seq_sum_k1", "0.5_1.6", "product", {"low": 1 / 1.6, "high": 1 / 0.5}),
        )
    ),
    # TRL: advantages
    _scores(
        *({"scale_rewards": "group"}, "group_normalised", {}, "equal groups"),
        difference="1e-4 is added to the deviation; ours 1e-6",
        change=partial(with_epsilon, of_batch=False),
    ),
    _scores(
        *({"scale_rewards": "batch"}, "group_normalised", {"deviation": "batch"}, "equal groups"),
        difference="1e-4 is added to the deviation; ours 1e-6",
        change=partial(with_epsilon, of_batch=True),
    ),
    _scores({"scale_rewards": "none"}, "group_normalised", {"deviation": "none"}, "equal groups"),
    _scores(
        *({"multi_objective_aggregation": "normalize_then_sum"}, "several_rewards", {}, "equal groups, two rewards"),
        difference="1e-4 is added to the deviations; ours 1e-6",
        change=sum_with_epsilon,
    ),
    # TRL: losses
    *(
        _loss({"loss_type": name, **_EPSILON}, "clipped", {**_OURS_CLIP, "dual_clip": None}, aggregation=aggregation)
        for name, aggregation in (
            ("grpo", _BY_ROLLOUT),
            ("bnpo", _BY_TOKEN),
            ("dapo", _BY_TOKEN),
            ("dr_grpo", ("constant", {"tokens": _RAGGED.length})),
        )
    ),
    _loss(
        *({"loss_type": "grpo", **_EPSILON}, "clipped", {**_OURS_CLIP, "dual_clip": None}, "a void rollout"),
        aggregation=_BY_ROLLOUT,
        difference="a rollout without policy tokens counts in the mean over rollouts",
        change=with_void_counted,
    ),
    _loss(
        *({"loss_type": "dapo", **_EPSILON, "delta": 3.0}, "clipped", {**_OURS_CLIP, "dual_clip": 3.0}),
        aggregation=_BY_TOKEN,
    ),
    _loss(
        *({"loss_type": "grpo", "importance_sampling_level": "sequence", **_EPSILON}, "clipped"),
        *({**_OURS_CLIP, "ratio": "rollout", "dual_clip": None}, "one advantage a rollout"),
        aggregation=_BY_ROLLOUT,
    ),
    _loss(
        *({"loss_type": "grpo", "importance_sampling_level": "sequence", **_EPSILON}, "clipped"),
        {**_OURS_CLIP, "ratio": "rollout", "dual_clip": None},
        aggregation=_BY_ROLLOUT,
        difference="through the mean ratio, all tokens of a rollout have the same gradient, also if advantages differ",
        change=with_mean_gradient,
    ),
    _loss(
        *({"loss_type": "luspo", "importance_sampling_level": "sequence", **_EPSILON}, "clipped"),
        *({**_OURS_CLIP, "ratio": "rollout", "dual_clip": None}, "one advantage a rollout"),
        aggregation=("constant", {"tokens": 1}),
    ),
    _loss({"loss_type": "cispo", "epsilon_high": 5.0}, "cispo", {"clip_high": 4.0}, aggregation=_BY_TOKEN),
    _loss(
        *({"loss_type": "sapo", "sapo_temperature_pos": 1.0, "sapo_temperature_neg": 1.5}, "sapo"),
        {"tau_positive": 1.0, "tau_negative": 1.5},
        aggregation=_BY_ROLLOUT,
    ),
    _loss(
        *({"loss_type": "dapo", **_EPSILON, "top_entropy_quantile": _SHARE}, "top_entropy"),
        {**_OURS_CLIP, "dual_clip": None, "share": _SHARE},
        aggregation=_BY_TOKEN,
    ),
    *(
        _loss(
            *({"loss_type": "dapo", "beta": 1.0, "use_bias_correction_kl": name == "k3_unbiased"}, "kl"),
            *({"estimator": name}, "no advantage"),
            aggregation=_BY_TOKEN,
            compared=_GRADIENT,
        )
        for name in ("k3", "k3_unbiased")
    ),
    # TRL: corrections of the sampler
    *(
        _scores({"vllm_importance_sampling_mode": mode, **bounds}, kind, ours, "equal groups", compared=_CORRECTION)
        for mode, bounds, kind, ours in (
            ("token_truncate", {"vllm_importance_sampling_clip_max": 1.5}, "tis", {"cap": 1.5}),
            ("token_mask", {"vllm_importance_sampling_clip_max": 1.5}, "mis", {"cap": 1.5}),
            ("sequence_truncate", {"vllm_importance_sampling_clip_max": 1.5}, "tis", {"cap": 1.5, "unit": "rollout"}),
            (
                *(
                    "sequence_mask",
                    {"vllm_importance_sampling_clip_min": 0.6, "vllm_importance_sampling_clip_max": 1.5},
                ),
                *("mis", {"low": 0.6, "cap": 1.5, "unit": "rollout"}),
            ),
        )
    ),
)


def result_of(row: Row) -> Result:
    """Return what our part makes of the case."""
    case = CASES[row.case]
    if row.kind == "kl":
        made = _divergence(case, row.ours["estimator"])
    else:
        found = evaluate_part(row.kind, row.ours, case.played)
        lists: dict[str, Any] = {"value": found.value, "gradient": found.gradient}
        lists["targets"] = found.targets[0] if found.targets else []
        made = {name: np.array([one for part in parts for one in part]) for name, parts in lists.items() if parts}
    if row.aggregation is not None:
        kind, keys = row.aggregation
        weight_N = np.array([one for part in evaluate_part(kind, keys, case.played).value for one in part])
        made = {name: number_N * weight_N for name, number_N in made.items()}
    return made


def _divergence(case: Case, estimator: str) -> Result:
    logp_N, old_N, reference_N = (torch.from_numpy(case.of(name)) for name in ("logp", "old", "reference"))
    logp_N.requires_grad_()
    segments = Segments(*[torch.zeros(len(logp_N), dtype=torch.long)] * 4)
    tokens = Tokens(logp_N, old_N, old_N, reference_N, old_N, old_N, segments)
    loss_N = kl_loss(tokens, estimator)
    (gradient_N,) = torch.autograd.grad(loss_N.sum(), logp_N)
    return {"value": loss_N.detach().numpy(), "gradient": gradient_N.numpy()}


def call_peers(python: Path) -> Answer:
    """Return the versions of the projects, and what their functions return, row by row."""
    request = {
        "cases": {name: case.padded() for name, case in CASES.items()},
        "rows": [(row.function, row.theirs, row.case) for row in ROWS],
    }
    done = subprocess.run(
        [str(python), str(CALLER)], input=json.dumps(request), capture_output=True, text=True, check=True
    )
    answer = json.loads(done.stdout)
    results: list[Result] = [
        {name: np.array([one for part in parts for one in part]) for name, parts in result.items()}
        for result in answer["results"]
    ]
    return answer["versions"], results


def distance(row: Row, ours: Result, theirs: Result) -> float:
    """Return the largest difference between the numbers that are compared, relative above 1."""
    pairs = [(ours[own], theirs[other]) for own, other in row.compared.items()]
    assert all(own.shape == other.shape for own, other in pairs)
    return max(float((abs(own - other) / abs(other).clip(min=1)).max()) for own, other in pairs)


def line_of(row: Row, version: str, theirs: Result) -> str:
    """Return the row of the table in Markdown."""
    found = distance(row, result_of(row), theirs)
    names = [_written(row.function, row.theirs), _written(row.kind, row.ours)]
    if row.aggregation is not None:
        names[1] += f", {_written(*row.aggregation)}"
    result = f"{row.difference} ({found:.2g})" if row.difference else "agrees"
    return f"| {row.project} {version} | {' | '.join(names)} | {row.case} | {result} |"


def _written(name: str, keys: Keys) -> str:
    """Return a name and settings in one line."""
    settings = [f"{key}={value:.3g}" if isinstance(value, float) else f"{key}={value}" for key, value in keys.items()]
    return f"`{name}({', '.join(settings)})`" if settings else f"`{name}`"


@pytest.fixture(scope="module")
def answer(algorithm_peers_python: Path) -> Answer:
    return call_peers(algorithm_peers_python)


@pytest.mark.parametrize("number", range(len(ROWS)), ids=lambda number: f"{number}-{ROWS[number].function}")
def test_a_part_agrees_with_the_function_of_another_project_or_differs_as_stated(answer: Answer, number: int) -> None:
    row, (versions, results) = ROWS[number], answer
    ours, theirs = result_of(row), results[number]
    print(line_of(row, versions[row.project.lower()], theirs))
    if row.change is not None:
        assert distance(row, ours, theirs) > TOLERANCE
        ours = row.change(ours, CASES[row.case])
    assert distance(row, ours, theirs) < TOLERANCE


def main() -> None:
    versions, results = call_peers(Path(sys.argv[1]))
    print("| project | function | ours | rollouts | result |\n|---|---|---|---|---|")
    for row, theirs in zip(ROWS, results, strict=True):
        print(line_of(row, versions[row.project.lower()], theirs))


if __name__ == "__main__":
    main()
