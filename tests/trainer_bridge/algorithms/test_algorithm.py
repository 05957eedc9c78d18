"""Algorithms: presets, the parts that a training file chooses, and combinations that cannot work."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest

from envkit import config
from envkit.config import kinds
from envkit.config.algorithm import PRESETS, AdvantageSection, AggregationSection, CorrectionSection, LossSection
from envkit.errors import ConfigError
from envkit.trainer_bridge.algorithms.algorithm import Algorithm, Chosen
from envkit.trainer_bridge.algorithms.parts import Part
from tests.trainer_bridge.trainees import algorithm_of

FAMILIES = {
    "advantages": AdvantageSection,
    "losses": LossSection,
    "aggregations": AggregationSection,
    "corrections": CorrectionSection,
}
NEEDS = (
    "critics:",
    "groups",
    "recomputed",
    "reference",
    "on_policy",
    "whole_rollouts",
    "sequences",
    "advantages",
    "entropy",
)


def parts_of(algorithm: Algorithm) -> list[str]:
    return [one.section.kind for _, one in algorithm._parts()]


def lines(**keys: Any) -> tuple[str, ...]:
    """The problems of a training file with this section `algorithm`."""
    with pytest.raises(ConfigError) as caught:
        config.parse({"env": {"id": "FrozenLake-v0"}, "algorithm": keys})
    return tuple(caught.value.problems)


# --- Parts -----------------------------------------------------------------------------------------------------------


def test_a_preset_is_a_choice_of_parts() -> None:
    assert {name: parts_of(algorithm_of(preset=name)) for name in PRESETS} == {
        "grpo": ["group_normalised", "clipped", "token_mean"],
        "dr_grpo": ["group_normalised", "clipped", "constant"],
        "dapo": ["group_normalised", "clipped", "token_mean"],
        "rloo": ["group_normalised", "reinforce", "constant"],
        "reinforce": ["batch_normalised", "reinforce", "token_mean"],
        "rebn": ["batch_normalised", "clipped", "token_mean"],
        "reinforce_plus_plus": ["reinforce_plus_plus", "clipped", "token_mean"],
        "ppo": ["gae", "clipped", "token_mean"],
        "gspo": ["group_normalised", "clipped", "rollout_mean"],
        "cispo": ["group_normalised", "cispo", "token_mean"],
        "topr": ["group_normalised", "topr", "constant"],
        "gigpo": ["gigpo", "clipped", "token_mean"],
        "lite_ppo": ["group_normalised", "clipped", "token_mean"],
        "ipa": ["chunk_returns", "chunk_clipped", "token_mean"],
        "asyppo": ["asyppo", "clipped", "token_mean"],
        "decoupled_ppo": ["gae", "clipped", "token_mean", "tis"],
    }
    assert all(algorithm_of(preset=name).problems(group_size=8, whole_history=True) == [] for name in PRESETS)
    assert algorithm_of() == algorithm_of(preset="grpo", minibatches=None, loss=None)


def test_changes_replace_what_they_name_and_nothing_else() -> None:
    ppo = algorithm_of(preset="ppo")
    changed = algorithm_of(preset="ppo", loss={"clip_low": 0.1}, correction="tis", kl={"coefficient": 0.0})
    assert changed == replace(
        ppo,
        section=changed.section,
        loss=Chosen(ppo.loss.part, ppo.loss.section.model_copy(update={"clip_low": 0.1})),
        correction=Chosen(kinds.find("corrections", "tis"), kinds.find("corrections", "tis").section()),
    )
    # The preset's own keys stay with a section without a kind, and go with its part.
    gammas = [algorithm_of(preset="ppo", advantage=one).advantage for one in ({"gae_lambda": 0.5}, "group_normalised")]
    assert [one.section.gamma for one in gammas if one is not None] == [0.95, 1.0]  # type: ignore[attr-defined]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_part_has_a_section_of_its_family_a_source_and_known_needs(family: str) -> None:
    for name in kinds.names(family):
        part = kinds.find(family, name)
        assert callable(part.function)
        assert issubclass(part.section, FAMILIES[family])
        assert part.section().kind == name
        assert part.source
        assert all(need.startswith(NEEDS) for need in part.needs_of(part.section()))


def test_critics_and_the_reference_are_those_that_the_parts_need() -> None:
    critics = {name: found for name in PRESETS if (found := algorithm_of(preset=name).critics)}
    assert critics == {"ppo": 1, "asyppo": 2, "decoupled_ppo": 1}
    assert algorithm_of(advantage="gae").critics == 1
    assert [algorithm_of(kl={"coefficient": kl}).needs_reference for kl in (0.0, 0.1)] == [False, True]
    loss = Chosen(Part(print, LossSection, frozenset({"critics:2", "reference"})), LossSection(kind="own"))
    own = replace(algorithm_of(preset="ppo"), loss=loss)
    assert (own.critics, own.needs_reference) == (2, True)


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"preset": "PPO"},
            "algorithm.preset: no algorithm is called 'PPO'; there are: grpo, dr_grpo, dapo, rloo, reinforce, ",
        ),
        (
            {"advantage": "group_normalized"},
            "algorithm.advantage.kind: no advantage is called 'group_normalized'; did you mean 'group_normalised'?",
        ),
        ({"preset": "reinforce", "loss": {"clip_low": 0.1}}, "algorithm.loss.clip_low: no such key"),
        ({"loss": {"clip_low": "wide"}}, "algorithm.loss.clip_low: must be a number, got 'wide'"),
    ],
)
def test_an_unknown_part_or_key_is_refused_with_its_place(keys: dict[str, Any], problem: str) -> None:
    (line,) = lines(**keys)
    assert line.startswith(problem)


# --- Combinations ----------------------------------------------------------------------------------------------------


def needing(*needs: str, **keys: Any) -> Algorithm:
    """GRPO with a loss of another package that has these needs, and changes of the algorithm."""
    loss = Chosen(Part(print, LossSection, frozenset(needs)), LossSection(kind="own"))
    return replace(algorithm_of(minibatches=1), loss=loss, **keys)


REFUSED = [
    (
        algorithm_of(),
        {"group_size": 1},
        ["rollout.group_size: group_normalised compares the episodes of a group, so it must be at least 2, got 1"],
    ),
    (
        algorithm_of(preset="reinforce", epochs=2, minibatches=3),
        {},
        [
            f"algorithm.{key}: the loss reinforce is only valid for samples of the current policy; use 1, got {count}"
            for key, count in (("epochs", 2), ("minibatches", 3))
        ],
    ),
    (
        algorithm_of(correction="tis"),
        {},
        [
            (
                "algorithm.old_logprobs: the correction tis needs what the trainer computes before the first "
                "update; use recomputed, got sampled"
            )
        ],
    ),
    (
        algorithm_of(kl={"coefficient": 0.1, "estimator": "k1"}),
        {},
        [
            (
                "algorithm.kl.estimator: k1 in the loss has a gradient of 0 on average; use k2 or k3_unbiased, or "
                "kl.place: reward"
            )
        ],
    ),
    (
        algorithm_of(kl={"coefficient": 0.1, "estimator": "k3_unbiased", "place": "reward"}),
        {},
        ["algorithm.kl.estimator: k3_unbiased differs from k3 only in its gradient; use k3 in the reward"],
    ),
    (
        algorithm_of(kl={"target": 0.1}, reference="/teacher", value_clip=0.2),
        {},
        [
            "algorithm.kl.target: a coefficient of 0 stays 0; use a larger kl.coefficient",
            "algorithm.reference: no part needs a reference policy; use kl.coefficient, or leave it out",
            "algorithm.value_clip: the advantage has no critic; leave it out",
        ],
    ),
    (
        algorithm_of(advantage={"kind": "pass_at_k", "k": 4}),
        {"group_size": 4},
        ["algorithm.advantage.k: 4 must be less than rollout.group_size, which is 4"],
    ),
    (
        algorithm_of(
            advantage="distillation",
            kl={"coefficient": 0.1, "place": "reward"},
            overlong={"max_tokens": 2, "buffer_tokens": 3},
        ),
        {},
        [
            "algorithm.reference: distillation needs a teacher; name a model with the same tokenizer",
            *(
                f"algorithm.{key}: the advantage distillation does not read the reward that this changes; leave it out"
                for key in ("overlong", "kl.place")
            ),
            "algorithm.overlong.buffer_tokens: must be at most max_tokens, or empty answers are penalised",
        ],
    ),
    (
        algorithm_of(loss="dppo", correction="tis", old_logprobs="recomputed"),
        {},
        ["algorithm.correction: the ratio of dppo already makes up for the sampler; leave it out"],
    ),
    (
        needing("sequences"),
        {"whole_history": False},
        ["renderer.history: the loss own needs whole episodes, but each turn is a sample of its own; use all"],
    ),
]


@pytest.mark.parametrize(("algorithm", "how", "problems"), REFUSED)
def test_a_combination_that_cannot_work_is_refused_with_the_reason(
    algorithm: Algorithm, how: dict[str, Any], problems: list[str]
) -> None:
    assert algorithm.problems(**{"group_size": 2, "whole_history": True, **how}) == problems


def test_parts_are_read_without_torch() -> None:
    script = "import sys, envkit.trainer_bridge.algorithms.advantages.gae; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
