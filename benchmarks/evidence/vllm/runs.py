"""Training runs as figures: learning curve, seconds by part, memory, and what the diagnostics found."""

from __future__ import annotations

import json
import re
import statistics
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from record import ROOT, run
from record.processes import peaks

from benchmarks.training.runs import rows
from envkit.trainer_bridge.evaluation.statistics import estimate

Figures = dict[str, Any]
_EVALUATED = re.compile(r"evaluate (\d+)/\1  (\d+):(\d+)$")
LEAST_MIB = 100
"""Smaller processes are left out of the figures on memory."""


def engine_of(kind: str, options: Namespace) -> list[str]:
    """Return the settings that choose an engine, with the interpreter of ``--python``."""
    python = [f"engine.python={options.python}"] if kind == "vllm" and options.python is not None else []
    return [f"engine.kind={kind}", *python]


def train(file: Path, settings: Sequence[str]) -> Figures:
    """Train with a training file and changed keys; return the figures of the run.

    Raises:
        SystemExit: The run failed.
    """
    with TemporaryDirectory() as name, peaks() as memory:
        folder = Path(name) / "run"
        command = [sys.executable, "-m", "envkit", "train", file, "--output", folder]
        made = run([*command, *(word for setting in settings for word in ("--set", setting))], ROOT)
        if made["exit_code"]:
            raise SystemExit("the training run failed")
        summary = json.loads((folder / "summary.json").read_text())
        steps, evaluations = rows(folder / "metrics.jsonl"), rows(folder / "evaluations.jsonl")
    return {
        "policy": summary["policy"],
        "wall_s": made["seconds"],
        "curve": [point(row) for row in evaluations],
        "success_by_step": [round(row["success"], 3) for row in steps],
        "diagnosis": summary["diagnosis"],
        "accounting": summary["accounting"],
        "servers_lost": sum("lost the vLLM server" in line for line in made["lines"]),
        "seconds": seconds_by_part(steps, made["seconds"]),
        "seconds of an evaluation": evaluation_seconds(made["lines"]),
        "tokens_per_step": round(statistics.mean(row["tokens"] for row in steps)),
        "tokens_per_rollout_s": round(statistics.median(row["tokens"] / row["rollout_s"] for row in steps), 1),
        "sampler_gap_nats": {
            "mean": statistics.mean(row["sampler_gap_nats"] for row in steps),
            "max": max(row["sampler_gap_nats"] for row in steps),
            "by step": [row["sampler_gap_nats"] for row in steps],
        },
        "peak_memory_mib": {name: mib for name, mib in sorted(memory.items()) if mib >= LEAST_MIB},
    }


def point(row: Figures) -> Figures:
    """Return one evaluation as a point of the learning curve, with 95 % intervals (Wilson)."""
    count = round(row["eval_episodes"])
    found: Figures = {"train_step": row["step"], "tasks": count}
    for name, key in (("sampled", "eval_success"), ("greedy", "eval_greedy")):
        successes = round(row[key] * count)
        interval = estimate([[1.0]] * successes + [[0.0]] * (count - successes), is_share=True)
        found[name] = [round(value, 4) for value in (interval.mean, interval.low, interval.high)]
    return found


def evaluation_seconds(lines: Sequence[str]) -> list[int]:
    """Return the seconds of each evaluation, from the lines that the run shows."""
    found = (_EVALUATED.match(line) for line in lines)
    return [int(one[2]) * 60 + int(one[3]) for one in found if one is not None]


def seconds_by_part(steps: Sequence[Figures], wall_s: float) -> Figures:
    """Return the median seconds of the parts of a train step, and the seconds of the whole run.

    ``push`` is what the engine waits for, and ``publish`` what the trainer needs before it, such as to write the file.
    ``start`` includes the start of the engine, and the end of the run.
    """
    parts = {
        "rollout": [row["rollout_s"] for row in steps],
        "train": [row["train_s"] for row in steps],
        "publish": [row["update_s"] - row["train_s"] - row["push_s"] for row in steps],
        "push": [row["push_s"] for row in steps],
        "probe": [row["probe_s"] for row in steps],
    }
    totals = {name: sum(values) for name, values in parts.items()}
    return {
        "median of a train step": {name: round(statistics.median(values), 3) for name, values in parts.items()},
        "total": {name: round(value, 1) for name, value in totals.items()},
        "start, evaluations and end": round(wall_s - sum(totals.values()), 1),
    }
