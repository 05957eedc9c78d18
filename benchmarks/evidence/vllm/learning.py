"""Train SmolLM2-135M on sums with the engine vllm and with the engine transformers, in the same way.

    envkit model get smollm2-135m
    python benchmarks/evidence/vllm/learning.py

Both runs have the same file, seed, order of tasks, number format (float32) and one thread for torch. A vLLM server on
two cores computes with one of them. The intervals of the curve hold with a confidence of 95 %. Takes about an hour.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import ROOT, Evidence, parser
from runs import Figures, engine_of, train

NAME = "vllm-learning"
STALE_AFTER = (
    "environments/arithmetic.py",
    "examples/llm-arithmetic.yaml",
    "trainer_bridge/algorithms",
    "trainer_bridge/engines/vllm",
    "trainer_bridge/trainers/token_logps.py",
    "trainer_bridge/trainers/torch_local.py",
    "trainer_bridge/weights",
)
TWIN = "tests/contract/engines/test_training.py::test_asynchronous_train_steps_on_a_server_have_no_finding"
FILE = ROOT / "examples" / "llm-arithmetic.yaml"
KINDS = ("vllm", "transformers")
MAX_GAP_NATS = 1e-4
LENGTH = "completions_cut_off"
"""The untrained model chats beyond the limit of tokens; in the first steps the diagnostics say so."""


def main() -> None:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=KINDS, help="train only with this engine")
    arguments.add_argument("--python", type=Path, help="interpreter with vllm; default: that of `make vllm`")
    arguments.add_argument("--steps", type=int, default=40, help="number of train steps")
    arguments.add_argument("--tasks", type=int, default=200, help="number of held-out tasks of an evaluation")
    options = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=options.folder, fresh=options.fresh)
    settings = [
        *("engine.dtype=float32", "trainer.precision=float32", "threads=1", "trainer.groups_per_step=8"),
        *(f"trainer.steps={options.steps}", f"evaluation.every={max(1, options.steps // 4)}"),
        f"evaluation.episodes={options.tasks}",
    ]
    for kind in KINDS:
        if options.only in (None, kind):
            evidence.part(kind, partial(train, FILE, [*settings, *engine_of(kind, options)]))
    if all(map(evidence.has, KINDS)):
        runs = [evidence.part(kind, dict) for kind in KINDS]
        evidence.part("claims", lambda: claims(runs))


def claims(runs: Sequence[Figures]) -> Figures:
    """Compare the two runs."""
    vllm, transformers = runs
    ends = [run["curve"][-1]["sampled"] for run in runs]
    return {
        "held-out success before, vllm and transformers": [run["curve"][0]["sampled"][0] for run in runs],
        "held-out success after, vllm and transformers": [end[0] for end in ends],
        "both learn: the intervals before and after are apart": all(
            run["curve"][0]["sampled"][2] < run["curve"][-1]["sampled"][1] for run in runs
        ),
        "the intervals after overlap": ends[0][1] <= ends[1][2] and ends[1][1] <= ends[0][2],
        "findings of the diagnostics, vllm and transformers": [names(run) for run in runs],
        "vllm: no finding except on the length of answers, and no server lost": {*names(vllm)} <= {LENGTH}
        and not vllm["servers_lost"],
        f"vllm: log-probabilities within {MAX_GAP_NATS} nats": vllm["sampler_gap_nats"]["max"] <= MAX_GAP_NATS,
        "seconds of a rollout, vllm / transformers": round(
            vllm["seconds"]["total"]["rollout"] / transformers["seconds"]["total"]["rollout"], 2
        ),
    }


def names(run: Figures) -> list[str]:
    """Return the names of what the diagnostics of a run found."""
    return sorted(finding["name"] for finding in run["diagnosis"])


if __name__ == "__main__":
    main()
