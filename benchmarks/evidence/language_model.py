"""A pretrained language model learns on this machine's CPU: SmolLM2-135M-Instruct, in all that follows.

    envkit model get smollm2-135m
    make .venv/trl/done
    python benchmarks/evidence/language_model.py [--only memory|sums|lake|trl]

memory  Peak of one update with 4,096 tokens a pass: of the model, with and without gradient checkpointing; and of two
      layers of its width beyond weights, gradients and optimiser state, with vocabularies of 1,000 and 152,000.
sums  ``examples/llm-arithmetic.yaml`` (GRPO) with three seeds, REINFORCE and PPO with one each and a quarter of
      the train steps: reward alone. Beside them the untrained model with 64 tokens an answer and three prompts, and how
      many of its answers hold a number at all, which separates the form of an answer from arithmetic.
lake  ``examples/llm-lake.yaml``: imitation, then reward, one board at a time; beside it imitation alone for as many
      seconds, and whole histories with half as many train steps.
trl   Seconds until the sums reach the same held-out success, beside TRL's GRPOTrainer, unmodified, in a virtual
      environment of its own: the same model, sums in the same order, episodes a train step, learning rate, clipping,
      float32 weights under bfloat16 autocast, one thread; both policies are evaluated by the same command. Loading,
      evaluating and saving do not count.

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
from envkit.wiring.training.models import locate
from envkit.wiring.training.resolve import resolve, task_of

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
    "trainer_bridge/trainers/batching.py",
    "trainer_bridge/trainers/token_logps.py",
    "trainer_bridge/trainers/torch_local.py",
    "trainer_bridge/warmup/warmup.py",
)
TWIN = "tests/e2e/training/test_language_model.py::test_a_language_model_learns_from_reward"
SEEDS = (3, 7, 11)
MINUTES = 20
PROMPTS = {
    "the question alone": "",
    "asked for a number": "Answer with a number.",
    "asked for nothing else": "You are a calculator. Give only the result, as a number, and nothing else.",
}
TRL_STEPS, TRL_EVERY, TRL_SUCCESS = 18, 6, 0.5
TRL_PASSES = 2
"""Into which TRL cuts a train step: the faster of 2 and 4 here."""


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=PARTS, help="measure one of the three")
    arguments.add_argument("--python", type=Path, default=ROOT / ".venv/trl/bin/python", help="which has TRL")
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
    """Return what ``tests/trainer_bridge/trainers/memory_of_an_update.py`` prints for 4,096 tokens a pass."""
    command = [sys.executable, "-m", "tests.trainer_bridge.trainers.memory_of_an_update", what, kind, "4096"]
    return round(float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout))


def growth_mib(kind: str) -> float:
    """Return how much more an update peaks with a vocabulary of 152,000 than with one of 1,000."""
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
    factor = whole["curve"][-1]["training_s"] / whole["warmup_s"]
    evidence.part("lake: imitation alone", partial(train, "llm-lake", "trainer.steps=0", *longer(factor)))
    evidence.part("lake: whole histories", partial(train, "llm-lake", "renderer.history=all", "trainer.steps=12"))
    claims = {"at least 0.75 within 20 minutes": success_within(whole["curve"], MINUTES * 60) >= 0.75}
    evidence.part("lake: claims", lambda: claims)


def longer(factor: float) -> list[str]:
    """Return the changes that make the lake's imitation that many times as long."""
    content = yaml.safe_load((ROOT / "examples" / "llm-lake.yaml").read_text())["warmup"]
    return [f"warmup.{key}={round(value * factor)}" for key, value in content.items() if key.endswith("_updates")]


def trl(evidence: Evidence, python: Path) -> None:
    short = (f"trainer.steps={TRL_STEPS}", f"evaluation.every={TRL_EVERY}", "trainer.threads=1")
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
    """Train with TRL as `train` does with envkit, and return its curve."""
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
    """Return the held-out success of a model folder, played as the run plays."""
    options = [word for name, value in run.env.options.items() for word in ("--option", f"{name}={json.dumps(value)}")]
    limits = ["--turn-tokens", str(run.rollout.turn_tokens), "--batch", str(run.env.num_envs)]
    words = [*options, *limits, "--system", run.renderer.system or "", "--episodes", str(run.evaluation.episodes)]
    mean: float = evaluate(f"model:{policy}", run.env.id, *words)["success"]["mean"]
    return round(mean, 4)


def questions(run: config.RunConfig, steps: int) -> list[Figures]:
    """Return the sums of the first train steps in their order, as the conversations that both policies see."""
    spec = environments.find(run.env.id)
    expert = environments.open_expert(run.env.id, run.env.options)
    found = []
    with environments.make(run.env.id) as env:
        for number in range(steps * run.trainer.groups_per_step):
            task = task_of(run, spec, "train", run.seed, number)
            text, _ = env.reset(seed=task.seed, options=dict(task.options))
            prompt = [{"role": "system", "content": run.renderer.system}, {"role": "user", "content": text}]
            found.append({"prompt": prompt, "answer": int(expert.moves(Observation(text))[0])})
    return found


PARTS: dict[str, Callable[[Evidence, Path], None]] = {"memory": memory, "sums": sums, "lake": lake, "trl": trl}


if __name__ == "__main__":
    main()
