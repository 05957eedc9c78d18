"""Do what docs/train-your-agent.md prints, word for word: train mini-swe-agent for two steps, and evaluate a function.

    python benchmarks/evidence/training/agent_page.py

Each section of the page that prints commands is a part: in a fresh folder with the files that the section shows, its
commands run in a shell, in order, and must succeed. They are those of this Python's envkit. Requires bubblewrap, and a
package index with mini-swe-agent; the model is in the user's cache, or downloaded. Takes about five minutes on two
quiet cores.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser, run

from tests.docs.pages import AGENTS, sections_of

NAME = "train-your-agent"
STALE_AFTER = (
    "docs/train-your-agent.md",
    "envkit/config/parts.py",
    "envkit/wiring/training/agents.py",
    "sandbox/egress",
    "trainer_bridge/agents",
)
TWIN = "tests/docs/test_docs.py::test_the_agent_of_the_page_about_agents_is_evaluated_as_printed"
PACKAGES = ("litellm", "mini-swe-agent", "openai")


def main() -> int:
    asked = parser(__doc__, NAME).parse_args()
    os.environ["PATH"] = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    for heading, (files, commands) in sections_of(AGENTS.read_text(encoding="utf-8")).items():
        figures = evidence.part(heading, partial(followed, files, commands))
        print(json.dumps(figures, indent=1))
    return 0


def followed(files: Mapping[str, str], commands: Sequence[str]) -> dict[str, Any]:
    """Run the commands beside the files; return their seconds, the versions of packages, and what runs trained on."""
    seconds = {}
    with TemporaryDirectory(prefix="envkit-agent-page-") as place:
        folder = Path(place)
        for name, text in files.items():
            (folder / name).write_text(text, encoding="utf-8")
        for command in commands:
            done = run(["bash", "-c", command], folder)
            if done["exit_code"]:
                raise SystemExit(f"{command}: exit code {done['exit_code']}")
            seconds[command] = done["seconds"]
        summaries = {path.parent.name: json.loads(path.read_text()) for path in folder.glob("runs/*/summary.json")}
        return {
            "seconds": seconds,
            "versions": {path.parent.name: versions(path / "python") for path in folder.glob("agents/*/bin")},
            "runs": {name: trained(summary) for name, summary in summaries.items()},
        }


def versions(python: Path) -> dict[str, str]:
    """Return the versions of the agent's packages in a virtual environment."""
    done = subprocess.run([python, "-m", "pip", "list", "--format=json"], check=True, capture_output=True, text=True)
    return {one["name"]: one["version"] for one in json.loads(done.stdout) if one["name"] in PACKAGES}


def trained(summary: Mapping[str, Any]) -> dict[str, Any]:
    """Return the number of train steps, and what became of the episodes and tokens of a run."""
    fates = {name: count for name, count in summary["accounting"].items() if count}
    if not fates.get("tokens_trained"):
        raise SystemExit(f"nothing was trained on: {fates}")
    return {"train_steps": summary["train_steps"], **fates}


if __name__ == "__main__":
    sys.exit(main())
