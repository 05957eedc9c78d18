"""Stop a run at random moments and resume it: only the work since the last checkpoint may be lost.

    python benchmarks/evidence/stopping.py

Small runs are stopped by Ctrl-C (ten runs), by kill -9 (ten runs), and by ``timeout 20``: during imitation, a train
step or an evaluation, and while the run writes a checkpoint. Each run is resumed and compared with an uninterrupted
run: metrics and evaluations must be equal to the last digit. The processes that start the runs adopt orphans, so they
detect processes that a run leaves behind.
"""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

from record import Evidence, parser
from record.processes import adopt_orphans, left_behind

from envkit import clock
from envkit.trainer_bridge.run_folder import checkpoint

CONFIG = """
seed: 3
env: {id: FrozenLake-v0, num_envs: 64, options: {size: 3}}
engine: {hidden_size: 32, layers: 2}
rollout: {group_size: 4, max_turns: 10, max_tokens: 256}
threads: 1
trainer: {steps: 6, groups_per_step: 32, checkpoint_every: 3}
evaluation: {episodes: 64, every: 2}
imitation: {states: 500, updates: 140, batch: 64, check_episodes: 32}
tracking: {to: []}
"""
CHECKPOINT_EVERY = 3
NAME = "stopping"
STALE_AFTER = (
    "trainer_bridge",
    "envkit/wiring/training/run.py",
    "envkit/wiring/training/sources.py",
)
TWIN = "tests/e2e/training/test_training.py::test_a_killed_run_loses_nothing_since_its_last_checkpoint"
MOMENTS = ("imitation", "train step", "evaluation", "checkpoint", "imitation")
PATIENCE_S = 600.0
"""Seconds after which a run counts as hanging."""

Figures = dict[str, Any]


class Runs:
    """Runs of one training file, each with a separate folder in the empty folder `place`."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self._file = place / "small.yaml"
        self._file.write_text(CONFIG)

    def folder(self, name: str) -> Path:
        return self._place / name

    def start(self, name: str, *words: str, before: Sequence[str] = ()) -> subprocess.Popen[str]:
        command = [*before, sys.executable, "-m", "envkit", "train", str(self._file), "--output"]
        log = (self._place / f"{name}.log").open("a")
        with log:
            return subprocess.Popen(
                [*command, str(self.folder(name)), *words], stdout=log, stderr=subprocess.STDOUT, text=True
            )

    def log(self, name: str) -> str:
        return (self._place / f"{name}.log").read_text()

    def finish(self, name: str, *words: str) -> None:
        """Run ``envkit train`` to its end; exit with its log if it fails."""
        code = self.start(name, *words).wait(PATIENCE_S)
        if code != 0:
            raise SystemExit(f"{name} ended with exit code {code}:\n{self.log(name)}")

    def rows(self, name: str, file: str) -> list[Figures]:
        """Return the recorded rows without values that depend on the machine, and without a truncated last line."""
        path = self.folder(name) / file
        lines = path.read_text().splitlines(keepends=True) if path.exists() else []
        whole = [json.loads(line) for line in lines if line.endswith("\n")]
        return [{key: value for key, value in row.items() if not key.endswith(("_s", "_mib"))} for row in whole]

    def checkpoint(self, name: str) -> int | None:
        """Return the train step of the newest checkpoint."""
        steps = [int(path.name[5:]) for path in (self.folder(name) / "checkpoints").glob("step-*")]
        return max(steps, default=None)

    def facts(self, name: str) -> Figures:
        """Return the facts that the newest checkpoint records."""
        return checkpoint.load_state(checkpoint.latest(self.folder(name) / "checkpoints")).facts


def stopped(runs: Runs, name: str, send: signal.Signals, moment: str, chance: random.Random) -> Figures:
    """Start a run, send it the signal `send` at the given moment, resume it, and return the figures."""
    process = runs.start(name)
    _wait(process, _reached(runs, name, moment, chance))
    if moment != "checkpoint":
        _pause(chance.uniform(0, 1.5 if moment == "imitation" else 0.3))
    has_ended = process.poll() is not None
    process.send_signal(send)
    began = clock.stopwatch()
    code = process.wait(PATIENCE_S)
    seconds = clock.stopwatch() - began
    left = left_behind()
    recorded, kept = len(runs.rows(name, "metrics.jsonl")), runs.checkpoint(name)
    imitates = kept == 0 and "imitation" not in runs.facts(name)
    waited = [line.partition("for ")[2].partition(";")[0] for line in _lines(runs.log(name), "stopping: waiting")]
    runs.finish(name, "--resume")
    lost = recorded - (kept or 0)
    bound = 0 if send is signal.SIGINT else CHECKPOINT_EVERY
    same = all(runs.rows(name, file) == runs.rows("unbroken", file) for file in ("metrics.jsonl", "evaluations.jsonl"))
    return {
        "moment": "after the end" if has_ended else moment,
        "exit_code": code,
        "seconds_to_end": round(seconds, 2),
        "waited_for": waited,
        "train_steps_recorded": recorded,
        "train_steps_lost": lost,
        "resumed_in_imitation": imitates,
        "processes_left": left + left_behind(),
        "same_as_unbroken": same,
        "holds": same and not left and kept is not None and lost <= bound and (code in (0, 130) or send.value == 9),
    }


def timed_out(runs: Runs, seconds: int) -> Figures:
    """Run under ``timeout`` twice; the second part resumes the first."""
    name = "timeout"
    parts: list[Figures] = []
    for _ in range(2):
        # On busy cores, the first part may end before it has a checkpoint.
        resume = () if runs.checkpoint(name) is None else ("--resume",)
        words = ("--set", "trainer.steps=100000", *resume)
        code = runs.start(name, *words, before=("timeout", str(seconds))).wait(PATIENCE_S)
        steps = [row["step"] for row in runs.rows(name, "metrics.jsonl")]
        kept, left = runs.checkpoint(name), left_behind()
        holds = code == 124 and steps == list(range(1, (kept or 0) + 1)) and not left
        part = {"exit_code": code, "train_steps": len(steps), "checkpoint": kept, "processes_left": left}
        parts.append({**part, "holds": holds})
    unbroken = runs.rows("unbroken", "metrics.jsonl")
    same = all(ours == theirs for ours, theirs in zip(runs.rows(name, "metrics.jsonl"), unbroken, strict=False))
    return {"parts": parts, "same_as_unbroken": same, "holds": same and all(part["holds"] for part in parts)}


def _reached(runs: Runs, name: str, moment: str, chance: random.Random) -> Callable[[], bool]:
    """Return a function that tells whether a run has reached `moment` (of `MOMENTS`); `chance` draws the step."""
    checkpoints, steps = runs.folder(name) / "checkpoints", chance.randrange(6)

    def count(file: str) -> int:
        return len(runs.rows(name, file))

    if moment == "imitation":
        return (checkpoints / "step-0").exists
    if moment == "train step":
        return lambda: count("evaluations.jsonl") > 0 and count("metrics.jsonl") >= steps
    if moment == "evaluation":
        return lambda: count("metrics.jsonl") >= 2 * (1 + steps % 3)
    return lambda: any(checkpoints.glob(".step-*")) and count("metrics.jsonl") >= 3 * (1 + steps % 2)


def _wait(process: subprocess.Popen[str], reached: Callable[[], bool]) -> None:
    """Wait until `reached` returns true or the run has ended."""
    until = clock.stopwatch() + PATIENCE_S
    while not reached() and process.poll() is None:
        if clock.stopwatch() > until:
            raise SystemExit("the run took too long to reach the moment at which it is to be stopped")
        _pause(0.001)


def _pause(seconds: float) -> None:
    Event().wait(seconds)


def _lines(text: str, beginning: str) -> list[str]:
    return [line for line in text.splitlines() if line.startswith(beginning)]


def main() -> int:
    """Measure; return exit code 1 if a stopped run lost too much work, left processes or resumed differently."""
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--jobs", type=int, default=1, help="number of concurrent runs")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    found: dict[str, Mapping[str, Any]] = {}
    with (
        TemporaryDirectory(prefix="envkit-stopping-") as place,
        ProcessPoolExecutor(asked.jobs, initializer=adopt_orphans) as pool,
    ):
        runs = Runs(Path(place))
        runs.finish("unbroken")
        parts: dict[str, Callable[[], Figures]] = {"timeout": partial(timed_out, runs, 20)}
        for word, send in (("ctrl-c", signal.SIGINT), ("kill", signal.SIGKILL)):
            for name, moment in ((f"{word}-{number}", moment) for number, moment in enumerate(MOMENTS * 2)):
                parts[name] = partial(stopped, runs, name, send, moment, random.Random(name))
        begun = {name: pool.submit(measure) for name, measure in parts.items() if not evidence.has(name)}
        for name in parts:
            found[name] = evidence.part(name, lambda name=name: begun[name].result())  # type: ignore[misc]
            print(name, json.dumps(found[name]), flush=True)
    broken = [name for name, figures in found.items() if not figures["holds"]]
    print(f"{len(found) - len(broken)} of {len(found)} held{': not ' + ', '.join(broken) if broken else ''}")
    return 1 if broken else 0


if __name__ == "__main__":
    sys.exit(main())
