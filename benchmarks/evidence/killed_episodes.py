"""Play 1,000 episodes on a running ``envkit serve``, and kill the sandbox of about every twentieth episode.

Each episode must end exactly once, and nothing may be left behind. The same with terminal episodes, 16 at once, of
whose sandboxes about every twentieth is killed.

    python benchmarks/evidence/killed_episodes.py

Requires root, and for Docker the image ``envkit/base:bookworm``. Takes one to five minutes for each backend.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import Evidence, parser

from envkit import clock
from tests.e2e.campaign import accounted_for
from tests.e2e.terminal_campaign import terminals_accounted_for
from tests.sandbox.containers import docker

NAME = "killed-episodes"
STALE_AFTER = (
    "environments/tasks",
    "environments/terminal/env.py",
    "environments/terminal/screen.py",
    "environments/terminal/stage.py",
    "environments/terminal/verifier.py",
    "envkit/fleet",
    "envkit/http",
    "sandbox",
    "tests/e2e/campaign.py",
    "tests/e2e/terminal_campaign.py",
)
TWIN = "tests/e2e/fleet/test_episodes.py::test_every_episode_ends_once_when_sandboxes_are_killed"
KILL_CHANCE = 0.05
BACKENDS = ("local", "docker")


def play(campaign: Callable[[str, Path, int, float], dict[str, int]], backend: str, episodes: int) -> dict[str, Any]:
    """Play the given number of episodes, and return their outcomes."""
    began = clock.stopwatch()
    with TemporaryDirectory(prefix="envkit-campaign-") as folder:
        figures = campaign(backend, Path(folder), episodes, KILL_CHANCE)
    return {**figures, "kill_chance": KILL_CHANCE, "seconds": round(clock.stopwatch() - began)}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--episodes", type=int, default=1000, help="number of episodes per backend")
    arguments.add_argument("--terminals", type=int, default=160, help="number of terminal episodes per backend")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    try:
        for backend in BACKENDS:
            part = f"Terminal-v0, {backend}, {asked.terminals} episodes"
            measure = partial(play, terminals_accounted_for, backend, asked.terminals)
            print(part, evidence.part(part, measure), flush=True)
        for backend in BACKENDS:
            part = f"{backend}, {asked.episodes} episodes"
            print(part, evidence.part(part, partial(play, accounted_for, backend, asked.episodes)), flush=True)
    finally:
        for image in docker("images", "--quiet", f"envkit-test/games:{os.getpid()}").split():
            docker("image", "rm", "--force", image)
    return 0


if __name__ == "__main__":
    sys.exit(main())
