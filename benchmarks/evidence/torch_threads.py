"""Time sampling and learning with OpenMP threads that spin or sleep while they wait, quiet and beside a busy process.

    python benchmarks/evidence/torch_threads.py

Each measurement is one train step of a small run in a process of its own; the seconds are those of its `metrics.jsonl`.
The policies are the tiny one of the quickstart (random weights) and SmolLM2-135M (untrained). "Spinning" is OpenMP's
default, which envkit replaces: GOMP_SPINCOUNT=300000 keeps it. All settings are measured in turns, and the medians
of the rounds are reported. Nothing else may run on the machine; the load average before each process is recorded.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, Evidence, parser

NAME = "torch-threads"
STALE_AFTER = ("trainer_bridge/threads.py", "trainer_bridge/engines/transformers.py")
TWIN = "tests/trainer_bridge/trainers/test_threads.py::test_torch_starts_with_threads_that_sleep_while_they_wait"

WAITING = {"spinning": {"GOMP_SPINCOUNT": "300000"}, "passive": {}}
FILES = {
    "tiny policy": ("quickstart.yaml", ["imitation.updates=1"]),
    "SmolLM2-135M": ("llm-arithmetic.yaml", ["trainer.groups_per_step=8"]),
}
COMMON = ["trainer.steps=1", "evaluation.episodes=0", "tracking.to=[]"]
_SET_BY_USERS = ("OMP_NUM_THREADS", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")


@contextmanager
def beside(is_busy: bool) -> Iterator[None]:
    """Run the block, if `is_busy` beside a process that uses one core."""
    if not is_busy:
        yield
        return
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


def measured(policy: str, waiting: str, threads: int, *, is_busy: bool) -> dict[str, float]:
    """Run one train step and return its seconds."""
    file, overrides = FILES[policy]
    words = [word for one in (*COMMON, f"threads={threads}", *overrides) for word in ("--set", one)]
    env = {name: value for name, value in os.environ.items() if name not in _SET_BY_USERS} | WAITING[waiting]
    load = os.getloadavg()[0]
    with TemporaryDirectory(prefix="envkit-threads-") as place, beside(is_busy):
        command = [sys.executable, "-m", "envkit", "train", str(ROOT / "examples" / file), "--output", f"{place}/run"]
        subprocess.run([*command, *words], env=env, check=True, stdout=subprocess.DEVNULL)
        row = json.loads((Path(place) / "run" / "metrics.jsonl").read_text().splitlines()[0])
    return {"sampling_s": round(row["rollout_s"], 2), "learning_s": round(row["train_s"], 2), "load": round(load, 2)}


def main() -> None:
    """Measure all settings in turns, `--rounds` times, and print the medians."""
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--rounds", type=int, default=3)
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    found: dict[str, list[dict[str, Any]]] = {}
    for number in range(asked.rounds):
        for policy, is_busy, threads, waiting in product(FILES, (False, True), (1, 2), WAITING):
            name = f"{policy}, {'busy' if is_busy else 'quiet'}, {threads} thread{'s' * (threads > 1)}, {waiting}"
            measure = partial(measured, policy, waiting, threads, is_busy=is_busy)
            found.setdefault(name, []).append(evidence.part(f"{name}, round {number + 1}", measure))
            print(name, found[name][-1], flush=True)

    def medians() -> dict[str, Any]:
        keys = ("sampling_s", "learning_s")
        return {
            name: {key: statistics.median(one[key] for one in rows) for key in keys} for name, rows in found.items()
        }

    print(json.dumps(evidence.part(f"medians of {asked.rounds} rounds", medians), indent=2))


if __name__ == "__main__":
    main()
