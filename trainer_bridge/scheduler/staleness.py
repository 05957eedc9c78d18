"""Policy lag: which groups may be trained on when, and which tokens are too old. Pure functions.

A version is the number of train steps whose weights were published. The tokens of a batch that is taken at version v
train version v: the lag of a token that version s sampled is v - s. A group may be taken until version s + `max_lag`,
where s is the version of its oldest token.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from envkit.types import Sample, Trajectory

from ..samples import trained_parts


def can_wait(oldest: Sequence[int], version: int, max_lag: int, batch_sizes: Sequence[int]) -> bool:
    """Return whether all groups can be used in time if a batch is taken now without them.

    The next batches are then taken one version after the other, those with the oldest tokens first. `oldest` has the
    version of the oldest token of each group that has tokens and would not be in the batch, and `batch_sizes` the
    number of groups in each of the next `max_lag` batches.
    """
    deadlines = sorted(one + max_lag - version for one in oldest)  # batches from now; 0 is the one that is taken
    capacity = np.cumsum([0, *batch_sizes])
    needed = np.searchsorted(deadlines, np.arange(len(capacity)), side="right")
    return bool((needed <= capacity).all())


def lags(samples: Iterable[Sample], version: int) -> NDArray[np.int64]:
    """Return the lag of each policy token that is learned from in samples that train `version`."""
    learned = [sample.versions[sample.mask & ~sample.ignored] for sample in samples]
    return version - np.concatenate(learned).astype(np.int64)


def with_stale_ignored(samples: Iterable[Sample], version: int, max_lag: int) -> list[Sample]:
    """Return samples that train `version`; tokens whose lag exceeds `max_lag` are ignored."""
    found = []
    for sample in samples:
        is_stale = sample.mask & (version - sample.versions > max_lag)
        found.append(replace(sample, ignored=sample.ignored | is_stale) if is_stale.any() else sample)
    return found


def num_stale_tokens(trajectory: Trajectory, version: int, max_lag: int) -> int:
    """Return how many tokens of an episode that may be trained on are too old to train `version`."""
    versions = (one for completion in trained_parts(trajectory)[0] for one in completion.versions)
    return sum(count for own, count in versions if version - own > max_lag)


def num_tokens(trajectory: Trajectory) -> int:
    """Return the number of tokens that the policy sampled in an episode."""
    return sum(len(turn.completion.token_ids) for turn in trajectory.turns)
