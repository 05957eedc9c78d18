"""Base class of the wrappers, which tracks whether an episode is running, and the wrapper `EpisodeStatistics`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

import gymnasium
from gymnasium.utils import RecordConstructorArgs

from envkit.errors import StepOrderError
from envkit.metrics import Fold, fold_infos
from envkit.spaces import Utf8Text

TextEnv: TypeAlias = "gymnasium.Env[str, str]"
TextStep: TypeAlias = tuple[str, float, bool, bool, dict[str, Any]]


class TextWrapper(gymnasium.Wrapper[str, str, str, str], RecordConstructorArgs):
    """Base class for a wrapper of a text environment.

    Args:
        env: The environment to wrap, which may itself be wrapped.
        metrics: Metrics that the wrapper adds to ``info``, each with its aggregation over an episode.
        arguments: The arguments of the subclass's constructor, from which Gymnasium can recreate the wrapper.

    Raises:
        TypeError: The observation or action space is not text.
    """

    def __init__(self, env: TextEnv, *, metrics: Mapping[str, Fold] | None = None, **arguments: Any) -> None:
        RecordConstructorArgs.__init__(self, **arguments)
        gymnasium.Wrapper.__init__(self, env)
        for space, kind in ((env.observation_space, "observation"), (env.action_space, "action")):
            if not isinstance(space, (Utf8Text, gymnasium.spaces.Text)):
                raise TypeError(
                    f"{type(self).__name__} needs a text environment; this one has the {kind} space {space}"
                )
        if metrics:
            self.metadata = {**env.metadata, "metrics": {**env.metadata.get("metrics", {}), **metrics}}
        self._is_running = False

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[str, dict[str, Any]]:
        self._is_running = False
        observation, info = self.env.reset(seed=seed, options=options)
        self._is_running = True
        return self._began(observation, info)

    def step(self, action: str) -> TextStep:
        if not self._is_running:
            raise StepOrderError("step before reset, or after the end of the episode")
        step = self._played(action)
        self._is_running = not (step[2] or step[3])
        return step

    def _began(self, observation: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        """Return the result of `reset`, given the environment's result. Subclasses override this to change it."""
        return observation, info

    def _played(self, action: str) -> TextStep:
        """Call the environment's `step` and return its result. Subclasses override this to change the result."""
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, float(reward), terminated, truncated, info


class EpisodeStatistics(TextWrapper):
    """Adds ``info["episode"]`` to the last step: statistics of the whole episode.

    The statistics are ``r`` (sum of the rewards), ``l`` (number of steps) and each metric of the environment. The
    environment declares whether a metric is aggregated as mean, last or sum. Gymnasium's ``RecordEpisodeStatistics``
    also writes ``info["episode"]``, with the episode's time. To use both wrappers, wrap Gymnasium's in this one.
    """

    def __init__(self, env: TextEnv) -> None:
        super().__init__(env)
        self._rewards: list[float] = []
        self._measured: list[dict[str, Any]] = []

    def _began(self, observation: str, info: dict[str, Any]) -> tuple[str, dict[str, Any]]:
        self._rewards, self._measured = [], []
        return observation, info

    def _played(self, action: str) -> TextStep:
        observation, reward, terminated, truncated, info = super()._played(action)
        folds = self.env.metadata.get("metrics", {})
        self._rewards.append(reward)
        self._measured.append({name: info[name] for name in folds if name in info})
        if terminated or truncated:
            folded = fold_infos(self._measured, folds)
            totals = {"r": sum(self._rewards), "l": len(self._rewards)}
            info = {**info, "episode": {**totals, **info.get("episode", {}), **folded}}
        return observation, reward, terminated, truncated, info


def longest_text(env: TextEnv) -> int:
    """Return the maximum length of an observation of the text environment `env`, in characters."""
    assert isinstance(env.observation_space, (Utf8Text, gymnasium.spaces.Text))
    return env.observation_space.max_length
