"""Statistics: what an episode came to, told with its last step."""

from __future__ import annotations

from typing import Any

from envkit.metrics import fold_infos
from envkit.wrappers.wrapping import TextEnv, TextStep, TextWrapper


class EpisodeStatistics(TextWrapper):
    """The last step's ``info["episode"]`` tells of the whole episode.

    It holds ``r`` (sum of the rewards), ``l`` (steps) and every metric that the world names, folded as the world says:
    mean, last or sum. The keys are those of Gymnasium's ``RecordEpisodeStatistics``, which adds the time; that one goes
    inside this one.
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
