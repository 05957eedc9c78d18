"""Wrapper that adds statistics of the whole episode to the info of its last step."""

from __future__ import annotations

from typing import Any

from envkit.metrics import fold_infos
from envkit.wrappers.wrapping import TextEnv, TextStep, TextWrapper


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
