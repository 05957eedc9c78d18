"""Measure WebShop-v0: steps per second, equality of processes, start in a sandbox, and memory that processes share.

    python benchmarks/evidence/environments/webshop_shop.py

Every part uses the generated catalogue of 10,000 products, which the first run builds. The original's speed is from a
run of its text environment with 1,000 products on a machine of the same kind (34 steps per second). Requires
bubblewrap; takes about three minutes.
"""

from __future__ import annotations

import json
import os
import random
import re
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import anyio

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.config.parts import BuiltInSandboxSection
from envkit.environments.webshop.env import WebShopOptions, open_session
from envkit.environments.webshop.pages import rich_text
from envkit.types import Task, stable_hash
from envkit.wiring import data, environments
from envkit.wiring.sandboxes.env_sandboxes import sandbox_host

NAME = "webshop-shop"
STALE_AFTER = ("environments/webshop",)
TWIN = "tests/environments/webshop/test_env.py::test_the_goals_prices_and_pages_of_a_seed_never_change"
ENV_ID = "WebShop-v0"
ORIGINAL_STEPS_PER_S = 34.0
SEEDS = 1000
STEPS = 20_000
SESSIONS, WORKERS = 64, 4
RUNS = 5


def actions(moves: list[str], rng: random.Random) -> str:
    """Choose a move; buying is rare, so that episodes are long."""
    move = moves[int(rng.random() * len(moves))]
    return moves[0] if move == "click[buy now]" and rng.random() < 0.8 else move


def play(steps: int, **options: Any) -> Iterator[tuple[str, float]]:
    """Yield the observation and reward of each step of random episodes, whose first action is a search."""
    env = environments.make(ENV_ID, **options)
    rng, seed = random.Random(0), 0
    _, info = env.reset(seed=seed)
    for _ in range(steps):
        text, reward, terminated, truncated, info = env.step(actions(info["legal_moves"], rng))
        yield text, float(reward)
        if terminated or truncated:
            seed += 1
            _, info = env.reset(seed=seed)


def speed(steps: int) -> dict[str, Any]:
    """Return steps per second of processor time, resets included, for three observations."""
    found: dict[str, Any] = {"steps": steps, "policy": "random legal moves"}
    settings: dict[str, dict[str, Any]] = {
        "strict, text_rich": {},
        "strict, compact": {"observation": "compact"},
        "parity, text": {"rules": "parity", "observation": "text", "catalogue": "webshop-1k"},
    }
    for name, options in settings.items():
        for _ in play(1000, **options):
            pass
        began = time.process_time()
        for _ in play(steps, **options):
            pass
        per_s = steps / (time.process_time() - began)
        found[name] = {"steps_per_s": round(per_s), "times_the_original": round(per_s / ORIGINAL_STEPS_PER_S)}
    return found


def hash_of_seeds(seeds: int) -> str:
    """Return a hash of the goals, prices and pages of the first seeds, after three scripted actions each."""
    found = 0
    folder = data.folder_of("webshop")
    for seed in range(seeds):
        session = open_session(folder, seed, WebShopOptions())
        texts = [repr(session.goal)]
        session.act(f"search[{session.goal.instruction}]")
        texts.append(rich_text(session))
        if session.shown:
            session.act(f"click[{session.shown[seed % len(session.shown)].asin}]")
            texts.append(rich_text(session))
            session.act("click[buy now]")
            texts.append(rich_text(session))
        found = stable_hash(found, *texts)
    return f"{found:016x}"


def two_processes(seeds: int) -> dict[str, Any]:
    """Hash the seeds in two processes with different hash seeds."""
    command = [sys.executable, __file__, "--hash-of", str(seeds)]
    hashes = [
        subprocess.run(
            command, env={**os.environ, "PYTHONHASHSEED": seed}, check=True, capture_output=True, text=True
        ).stdout.strip()
        for seed in ("1", "2")
    ]
    return {"seeds": seeds, "hashes": hashes, "equal": hashes[0] == hashes[1]}


async def first_page(runs: int) -> dict[str, Any]:
    """Measure the seconds from nothing until a fresh sandbox shows the first page of an episode."""
    until_page = []
    for _ in range(runs):
        began = clock.stopwatch()
        section = BuiltInSandboxSection(kind="local", count=1)
        async with (
            sandbox_host(section, slots_per_sandbox=1, call_timeout_s=60) as host,
            host.lease(Task(ENV_ID, 0)) as episode,
        ):
            await episode.reset()
            until_page.append(clock.stopwatch() - began)
    return {
        "runs": runs,
        "products": 10_000,
        "median_s_from_nothing_to_first_page": round(statistics.median(until_page), 3),
    }


async def memory(sessions: int, workers: int) -> dict[str, Any]:
    """Open sessions in sandboxes, and return the memory of the workers that have the catalogue, in MiB."""
    section = BuiltInSandboxSection(kind="local", count=workers)
    found: dict[str, Any] = {"workers": workers, "sessions_per_worker": sessions}
    opened, done = anyio.Semaphore(0), anyio.Event()

    async def hold(seed: int) -> None:
        async with host.lease(Task(ENV_ID, seed)) as episode:
            start = await episode.reset()
            await episode.step(start.observation.legal_moves[0])
            opened.release()
            await done.wait()

    async with (
        sandbox_host(section, slots_per_sandbox=sessions, call_timeout_s=60) as host,
        anyio.create_task_group() as tasks,
    ):
        for seed in range(sessions * workers):
            tasks.start_soon(hold, seed)
        for _ in range(sessions * workers):
            await opened.acquire()
        found |= await anyio.to_thread.run_sync(memory_of_workers)
        done.set()
    return found


def memory_of_workers() -> dict[str, Any]:
    """Return the memory of all processes that map the catalogue, and how much of it is the catalogue's."""
    rows = []
    for folder in Path("/proc").iterdir():
        if not folder.name.isdecimal() or int(folder.name) == os.getpid():
            continue
        try:
            smaps = (folder / "smaps").read_text()
        except OSError:
            continue
        sizes = {"rss": 0, "pss": 0, "catalogue_rss": 0, "catalogue_pss": 0}
        inside = False
        for line in smaps.splitlines():
            if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
                inside = "/webshop/" in line
            elif found := re.match(r"(Rss|Pss): +(\d+) kB", line):
                name = found[1].lower()
                sizes[name] += int(found[2])
                sizes[f"catalogue_{name}"] += int(found[2]) * inside
        if sizes["catalogue_rss"]:
            rows.append({name: round(size / 1024, 1) for name, size in sizes.items()})
    return {"processes": len(rows), "mib_of_each": rows}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--hash-of", type=int, help="only print the hash of that many seeds")
    asked = arguments.parse_args()
    if asked.hash_of is not None:
        print(hash_of_seeds(asked.hash_of))
        return 0
    for name in ("webshop", "webshop-1k"):
        data.build(name, print)
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    parts = {
        "speed": partial(speed, STEPS),
        "two processes": partial(two_processes, SEEDS),
        "first page in a fresh sandbox": partial(clock.run, partial(first_page, RUNS)),
        f"memory of 1 worker with {SESSIONS} sessions": partial(clock.run, partial(memory, SESSIONS, 1)),
        f"memory of {WORKERS} workers": partial(clock.run, partial(memory, SESSIONS // WORKERS, WORKERS)),
    }
    for name, measure in parts.items():
        print(name, json.dumps(evidence.part(name, measure)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
