"""Train a pretrained language model, SmolLM2-135M-Instruct, on this machine's CPU.

    envkit model get smollm2-135m
    make .venv/trl/done
    python benchmarks/evidence/language_model.py [--only memory|sums|lake|trl]

memory  Peak memory of an update with 4,096 tokens per pass, with and without gradient checkpointing. Also, for a
        model with two layers of the same width, the peak beyond weights, gradients and optimiser state, with
        vocabularies of 1,000 and 152,000 tokens.
sums    ``examples/llm-arithmetic.yaml`` (GRPO) with three seeds, and REINFORCE and PPO with one seed and a quarter of
        the train steps. For comparison, the untrained model with 64 tokens per answer and three prompts. The share of
        its answers with any number, right or wrong, shows how many fail because of their format.
lake    ``examples/llm-lake.yaml``: imitation, then GRPO, with one board per prompt. For comparison, imitation alone for
        the same time, and a run half as long whose prompts contain the whole history.
trl     Seconds until the sums reach the same held-out success, compared with TRL's unmodified GRPOTrainer in a separate
        virtual environment. Both have the same model, order of sums, episodes per train step, learning rate, clipping,
        float32 weights under bfloat16 autocast, and one thread. The same command evaluates both policies. The time for
        loading, evaluation and saving does not count.

Takes about two hours on two quiet cores.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import yaml
from record import Evidence, parser

from benchmarks.training.runs import MODEL, ROOT, Figures, evaluate, reached, success_within, train
from envkit import config
from envkit.types import Observation
from envkit.wiring import environments
from envkit.wiring import tasks as task_sets
from envkit.wiring.training.models import locate
from envkit.wiring.training.resolve import resolve

NAME = "language-model"
STALE_AFTER = (
    "environments/arithmetic.py",
    "examples/llm-arithmetic.yaml",
    "examples/llm-arithmetic-ppo.yaml",
    "examples/llm-arithmetic-reinforce.yaml",
    "examples/llm-lake.yaml",
    "trainer_bridge/algorithms",
    "trainer_bridge/engines/transformers.py",
    "trainer_bridge/render/chat.py",
    "trainer_bridge/sources",
    "trainer_bridge/trainers",
)
TWIN = "tests/e2e/training/test_language_model.py::test_a_language_model_imitates_and_then_learns_from_reward"
SEEDS = (3, 7, 11)
MINUTES = 20
PROMPTS = {
    "the question alone": "",
    "asked for a number": "Answer with a number.",
    "asked for nothing else": "You are a calculator. Give only the result, as a number, and nothing else.",
}
TRL_STEPS, TRL_EVERY, TRL_SUCCESS = 18, 6, 0.5
TRL_PASSES = 2
"""Number of passes into which TRL splits a train step: the faster of 2 and 4 on this machine."""


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=PARTS, help="measure only this part")
    arguments.add_argument("--python", type=Path, default=ROOT / ".venv/trl/bin/python", help="interpreter with TRL")
    options = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    for name, measure in PARTS.items():
        if options.only in (None, name):
            measure(evidence, options.python)


def memory(evidence: Evidence, _: Path) -> None:
    folder = locate(MODEL)
    peaks = {
        kind: evidence.part(f"memory: SmolLM2, {kind}", partial(peak_mib, folder, kind))
        for kind in ("checkpointing", "plain")
    }
    growth = {
        kind: evidence.part(
            f"memory: from 1,000 to 152,000 tokens of vocabulary, {kind}",
            partial(growth_mib, kind),
        )
        for kind in ("tied", "untied")
    }
    claims = {
        "an update of SmolLM2 peaks below 5 GiB": peaks["checkpointing"] < 5 * 1024,
        "a large vocabulary adds less than 256 MiB": max(growth.values()) < 256,
    }
    evidence.part("memory: claims", lambda: claims)


def peak_mib(what: str, kind: str) -> float:
    """Return an update's peak in MiB with 4,096 tokens per pass. `what` is a model folder or a vocabulary size."""
    command = [sys.executable, "-m", "tests.trainer_bridge.trainers.memory_of_an_update", what, kind, "4096"]
    return round(float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))


def growth_mib(kind: str) -> float:
    """Return the growth of an update's peak from 1,000 to 152,000 tokens of vocabulary. `kind` is tied or untied."""
    return round(peak_mib("152000", kind) - peak_mib("1000", kind))


def sums(evidence: Evidence, _: Path) -> None:
    words = ["--option", "operands=[1, 49]", "--option", "held_out=0.16", "--option", "instructions=false"]
    words += ["--episodes", "400", "--turn-tokens", "64", "--batch", "100"]
    for name, system in PROMPTS.items():
        ask = partial(evaluate, f"model:{MODEL}", "Arithmetic-v0", *words, "--system", system)
        evidence.part(f"sums: untrained, 64 tokens, {name}", ask)
    runs = [
        evidence.part(f"sums: GRPO, seed {seed}", partial(train, "llm-arithmetic", f"seed={seed}")) for seed in SEEDS
    ]
    for name in ("reinforce", "ppo"):
        evidence.part(f"sums: {name.upper()}, seed 7", partial(train, f"llm-arithmetic-{name}", "trainer.steps=20"))
    curves = [run["curve"] for run in runs]
    claims = {
        "at most 0.10 before": all(curve[0]["sampled"] <= 0.10 for curve in curves),
        "at least 0.50 after 5 minutes": all(success_within(curve, 5 * 60) >= 0.50 for curve in curves),
        "at least 0.65 within 20 minutes": all(success_within(curve, MINUTES * 60) >= 0.65 for curve in curves),
        "aim: at least 0.75 within 20 minutes": all(success_within(curve, MINUTES * 60) >= 0.75 for curve in curves),
        "seconds to 0.65": [reached(curve, 0.65) for curve in curves],
    }
    evidence.part("sums: claims", lambda: claims)


def lake(evidence: Evidence, _: Path) -> None:
    whole = evidence.part("lake: imitation, then reward", partial(train, "llm-lake"))
    factor = whole["curve"][-1]["training_s"] / whole["imitation_s"]
    evidence.part("lake: imitation alone", partial(train, "llm-lake", "trainer.steps=0", longer(factor)))
    evidence.part("lake: whole histories", partial(train, "llm-lake", "renderer.history=all", "trainer.steps=12"))
    claims = {"at least 0.75 within 20 minutes": success_within(whole["curve"], MINUTES * 60) >= 0.75}
    evidence.part("lake: claims", lambda: claims)


def longer(factor: float) -> str:
    """Return the configuration change that makes the lake's imitation `factor` times as long."""
    content = yaml.safe_load((ROOT / "examples" / "llm-lake.yaml").read_text())["imitation"]
    return f"imitation.updates={round(content['updates'] * factor)}"


def trl(evidence: Evidence, python: Path) -> None:
    short = (f"trainer.steps={TRL_STEPS}", f"evaluation.every={TRL_EVERY}", "threads=1")
    ours = evidence.part("trl: envkit", partial(train, "llm-arithmetic", *short))["curve"]
    theirs = evidence.part("trl: TRL", partial(train_with_trl, python))["curve"]
    seconds = [reached(curve, TRL_SUCCESS) for curve in (ours, theirs)]
    claims: Figures = {
        "success": TRL_SUCCESS,
        "seconds to it, envkit and TRL": seconds,
        "times as fast for the same episodes": round(theirs[-1]["training_s"] / ours[-1]["training_s"], 2),
    }
    if seconds[0] and seconds[1]:
        claims["times as fast to the same success"] = round(seconds[1] / seconds[0], 2)
    evidence.part("trl: claims", lambda: claims)


def train_with_trl(python: Path) -> Figures:
    """Train with TRL in the same way as `train` with envkit, and return the learning curve."""
    run = resolve(config.load(ROOT / "examples" / "llm-arithmetic.yaml"))
    steps = list(range(TRL_EVERY, TRL_STEPS + 1, TRL_EVERY))
    with TemporaryDirectory() as name:
        folder = Path(name)
        tasks = folder / "tasks.jsonl"
        tasks.write_text("".join(json.dumps(row) + "\n" for row in questions(run, TRL_STEPS)))
        episodes = run.rollout.group_size * run.trainer.groups_per_step
        settings = {
            "threads": 1,
            "output": name,
            "model": locate(MODEL),
            "tasks": str(tasks),
            "save_after": steps,
            "group_size": run.rollout.group_size,
            "steps": TRL_STEPS,
            "rows_a_pass": episodes // TRL_PASSES,
            "passes": TRL_PASSES,
            "learning_rate": run.trainer.learning_rate,
            "schedule": run.trainer.schedule,
            "turn_tokens": run.rollout.turn_tokens,
            "seed": run.seed,
        }
        program = ROOT / "benchmarks" / "training" / "trl_grpo.py"
        subprocess.run([python, program, json.dumps(settings)], check=True)
        seconds = json.loads((folder / "seconds.json").read_text())
        curve = [
            {
                "train_step": step,
                "training_s": round(seconds[str(step)], 1),
                "sampled": success_of(folder / f"step-{step}", run),
            }
            for step in steps
        ]
        return {"versions": json.loads((folder / "versions.json").read_text()), "curve": curve}


def success_of(policy: Path, run: config.RunConfig) -> float:
    """Return the held-out success of the policy in a model folder, with the settings of `run`."""
    env = run.envs[0]
    options = [word for name, value in env.options.items() for word in ("--option", f"{name}={json.dumps(value)}")]
    limits = ["--turn-tokens", str(run.rollout.turn_tokens), "--batch", str(env.num_envs)]
    words = [*options, *limits, "--system", run.renderer.system or "", "--episodes", str(run.evaluation.episodes)]
    mean: float = evaluate(f"model:{policy}", env.id, *words)["success"]["mean"]
    return round(mean, 4)


def questions(run: config.RunConfig, steps: int) -> list[Figures]:
    """Return the sums of the first train steps, in order, as the conversations that both policies see."""
    section = run.envs[0]
    spec = environments.find(section.id)
    expert = environments.open_expert(section.id, section.options)
    found = []
    with environments.make(section.id) as env:
        for number in range(steps * run.trainer.groups_per_step):
            task = task_sets.task(spec, section.options, "train", run.seed, number)
            text, _ = env.reset(seed=task.seed, options=dict(task.options))
            prompt = [{"role": "system", "content": run.renderer.system}, {"role": "user", "content": text}]
            found.append({"prompt": prompt, "answer": int(expert.moves(Observation(text))[0])})
    return found


PARTS: dict[str, Callable[[Evidence, Path], None]] = {"memory": memory, "sums": sums, "lake": lake, "trl": trl}


if __name__ == "__main__":
    main()
