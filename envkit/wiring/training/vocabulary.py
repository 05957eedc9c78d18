"""The texts from which a tiny policy gets its vocabulary: those of episodes with random moves, and of vocabularies."""

from __future__ import annotations

import random
import sys
from dataclasses import dataclass
from functools import partial

from envkit import clock
from envkit.config import RunConfig
from envkit.config.training import EnvSection
from envkit.errors import EnvkitError, PlayerStoppedError
from envkit.protocols import EpisodePlayer, Player
from envkit.registry import EnvSpec
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.trainer_bridge.rollout.players import Chooser
from envkit.trainer_bridge.scheduler import Rollout
from envkit.types import Observation, Reset, RolloutRequest, StopReason
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.training.resolve import specs_of

_VOCABULARY_EPISODES = 64
"""Number of randomly played episodes from which the vocabulary of a tiny policy is built."""
_EPISODES_BESIDE_VOCABULARY = 8
"""The same for an environment that has a vocabulary; they only find the moves and the lengths of first observations."""


@dataclass(frozen=True, slots=True)
class Texts:
    """Texts of the environments, collected in episodes with random moves and from vocabularies.

    Attributes:
        openings: The id of the environment and the first observation of each episode.
        observations: All observations, and the texts of vocabularies.
        moves: All legal moves.
    """

    openings: list[tuple[str, str]]
    observations: list[str]
    moves: set[str]


def collect_texts(run: RunConfig) -> Texts:
    """Play episodes with random moves in every environment and collect their texts."""
    player, texts = _AnyMove(random.Random(run.seed)), Texts([], [], set())
    for section, spec in zip(run.envs, specs_of(run), strict=True):
        clock.run(partial(_collect_section, section, spec, run.seed, player, texts))
    return texts


async def _collect_section(section: EnvSection, spec: EnvSpec, seed: int, player: Player, texts: Texts) -> None:
    """Add the texts of one environment to `texts`."""
    if spec.vocabulary is not None:
        words = list(environments.open_helper(spec, spec.vocabulary, section.options))
        texts.observations.extend(words)
        texts.moves.update(word for word in words if word.isdecimal())
    count = _VOCABULARY_EPISODES if spec.vocabulary is None else _EPISODES_BESIDE_VOCABULARY
    tasks = [task_sets.task(spec, section.options, "train", seed, number) for number in range(count)]
    async with environments.slots(1, section.options) as host:
        result = await Rollout(host, player, _ANY_LENGTH, 1).groups(tasks, phase="vocabulary", seed=seed)
    for played in result.trajectories:
        if played.is_void or played.start is None:
            raise EnvkitError(played.outcome.error or f"{section.id}: no episode was played")
        steps = [turn.step.observation for turn in played.turns if turn.step is not None]
        texts.openings.append((section.id, played.start.observation.text))
        for seen in (played.start.observation, *steps):
            texts.observations.append(seen.text)
            texts.moves.update(seen.legal_moves)


_ANY_LENGTH = RolloutLimits(max_turns=sys.maxsize)


@dataclass(frozen=True, slots=True)
class _AnyMove(Player):
    """Plays random moves until there are none; `rng` is shared by all episodes."""

    rng: random.Random

    def begin(self, request: RolloutRequest, start: Reset) -> EpisodePlayer:
        known: list[str] = []

        def choose(observation: Observation) -> str:
            known[:] = observation.legal_moves or known
            if not known:
                raise PlayerStoppedError(StopReason.MAX_TURNS)
            return f"<answer>{self.rng.choice(known)}</answer>"

        return Chooser(choose)
