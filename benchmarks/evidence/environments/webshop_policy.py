"""Train a tiny policy to shop, and compare it with the rules and the expert of WebShop-v0 on 500 unseen goals.

    python benchmarks/evidence/environments/webshop_policy.py

Trains ``examples/webshop.yaml`` with one thread: imitation of the expert, then GRPO. Afterwards all players play the
same tasks of the split ``eval``. The paired differences compare the scores of the greedy policy task by task; the
intervals hold with a confidence of 95 %. ``missing`` says for each part of the score how much of a whole point a player
loses on average; the parts and the mean score add up to 1. Takes at most 30 minutes on one core.
"""

from __future__ import annotations

import os
import resource
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser, run

from envkit import evaluate
from envkit.environments.answer import answer_text
from envkit.environments.webshop.compact import CompactPage
from envkit.environments.webshop.env import WebShopOptions, open_session
from envkit.runs.episodes import EPISODES, read_episodes
from envkit.types import EpisodeRecord
from envkit.wiring import data

NAME = "webshop-policy"
STALE_AFTER = (
    "environments/webshop",
    "examples/webshop.yaml",
    "trainer_bridge/algorithms",
    "trainer_bridge/sources",
    "trainer_bridge/trainers",
)
TWIN = (
    "tests/environments/webshop/test_players.py::test_the_rule_beats_the_first_hit_and_both_score_the_same_on_all_pages"
)
ENV_ID = "WebShop-v0"
TASKS = 500
PLAYERS = ("first_hit", "rule", "expert", "greedy policy", "sampled policy")
PARTS = ("type", "attributes", "options", "price", "not bought")


def train(file: Path, folder: Path) -> dict[str, Any]:
    """Train in `folder`, or continue there, and return the minutes."""
    os.environ["OMP_NUM_THREADS"] = "1"
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    command = [sys.executable, "-m", "envkit", "train", file, "--output", folder]
    made = run([*command, *(["--resume"] if folder.exists() else [])], ROOT)
    if made["exit_code"]:
        raise SystemExit("the training failed")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    used_s = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"minutes": round(made["seconds"] / 60, 1), "minutes_of_one_core": round(used_s / 60, 1)}


def play(player: str, policy: Path, folder: Path) -> list[EpisodeRecord]:
    """Let a player play all tasks, and return its episodes in the order of the tasks."""
    name = f"checkpoint:{policy}" if player.endswith("policy") else player
    options = {"observation": "compact"}
    arguments: dict[str, Any] = {"greedy": True} if player == "greedy policy" else {}
    evaluate(ENV_ID, name, episodes=TASKS, options=options, output=folder, **arguments)
    return sorted(read_episodes(folder / EPISODES), key=lambda episode: episode.index)


def missing(episode: EpisodeRecord) -> dict[str, float]:
    """Return how much of a whole point each part of the score has cost in an episode, found by playing it again."""
    chosen = WebShopOptions(**{"observation": "compact", **episode.options})
    session = open_session(data.folder_of(chosen.catalogue), episode.seed, chosen)
    for turn in episode.turns:
        session.act(CompactPage(session).choices.get(answer_text(turn.action).strip(), ""))
    score, goal = session.score, session.goal
    if score is None:
        return {"not bought": 1.0}
    assert score.total == episode.outcome.metrics["score"], "the same episode"
    parts = len(goal.attributes) + len(goal.options) + 1
    lost = {
        "attributes": (len(goal.attributes) - score.attributes) / parts,
        "options": (len(goal.options) - score.options) / parts,
        "price": (1 - score.price) / parts,
    }
    return {**lost, "type": 1 - sum(lost.values()) - score.total}


def figures(episodes: Sequence[EpisodeRecord]) -> dict[str, Any]:
    """Return the figures of a player."""
    lost: Counter[str] = Counter()
    for episode in episodes:
        lost.update(missing(episode))
    found = {name: statistics.fmean(episode.outcome.values[name] or 0.0 for episode in episodes) for name in METRICS}
    turns = statistics.fmean(len(episode.turns) for episode in episodes)
    return {
        **{name: round(value, 4) for name, value in found.items()},
        "turns": round(turns, 2),
        "missing": {part: round(lost[part] / len(episodes), 4) for part in PARTS},
        "scores": " ".join(f"{episode.outcome.metrics['score'] or 0.0:.4g}" for episode in episodes),
    }


METRICS = ("bought", "score", "success")


def difference(ours: str, theirs: str) -> dict[str, float]:
    """Return the mean difference of two lists of scores of the same tasks, and its interval."""
    pairs = zip(map(float, ours.split()), map(float, theirs.split()), strict=True)
    differences = [one - other for one, other in pairs]
    mean, half = statistics.fmean(differences), 1.96 * statistics.stdev(differences) / len(differences) ** 0.5
    return {"mean": round(mean, 4), "low": round(mean - half, 4), "high": round(mean + half, 4)}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--runs", type=Path, help="folder for the training and the episodes; default: a new one")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    with tempfile.TemporaryDirectory() as scratch:
        runs: Path = (asked.runs or Path(scratch)).resolve()
        data.build("webshop", print)
        policy = runs / "policy"
        if not evidence.has("training") or (not policy.exists() and not all(map(evidence.has, PLAYERS))):
            evidence.part("training", partial(train, ROOT / "examples" / "webshop.yaml", policy))
        found = {
            player: evidence.part(player, lambda: figures(play(player, policy, runs / player.replace(" ", "_"))))  # noqa: B023
            for player in PLAYERS
        }

        def compare() -> dict[str, Any]:
            others = (player for player in PLAYERS if player != "greedy policy")
            return {other: difference(found["greedy policy"]["scores"], found[other]["scores"]) for other in others}

        print(evidence.part("greedy policy minus another player", compare))
    return 0


if __name__ == "__main__":
    sys.exit(main())
