"""Play envkit's terminal tasks with Harbor itself: it must read all folders, and agree with envkit on rewards.

The own tasks and six tasks of each family are written as `envkit tasks Terminal-v0 export` writes them. Harbor from
PyPI, unmodified, runs in a container of its own and reads each folder. Then its agents oracle and nop play three of the
own tasks in containers, and so do the players of envkit with the same names.

    DEBIAN_SUITE=trixie docker/base-from-debootstrap envkit/base:trixie
    python benchmarks/evidence/environments/terminal_harbor.py

Requires a Docker daemon of this machine, the image above (Harbor needs Python 3.12), a package index and a Debian
archive. It takes about five minutes, most of them for images.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser

from envkit import clock
from envkit.checks.tasks import check_tasks
from envkit.environments.terminal import commands
from envkit.environments.terminal.families import FAMILIES
from envkit.sandbox.docker.images import OFFLINE_BASE

NAME = "terminal-harbor"
ENV_ID = "Terminal-v0"
STALE_AFTER = (
    "environments/terminal/formats",
    "environments/terminal/harness.py",
    "environments/terminal/own",
    "environments/terminal/verifier.py",
)
TWIN = "tests/environments/terminal/formats/test_harbor.py::test_a_written_task_has_what_harbor_needs"
HARBOR = "harbor==0.26.0"
IMAGE = "envkit/base:trixie"
TRIALS = ("csv-to-sqlite", "lost-commit", "tls-virtual-hosts")
SEEDS = range(3)
PROVIDER = Path(__file__).with_name("harbor_docker.py")
SOCKET = "/var/run/docker.sock"
READ = """
import json, sys
from pathlib import Path
from harbor.models.task.task import Task
read = {}
for folder in sorted(Path(sys.argv[1]).iterdir()):
    try:
        read[folder.name] = Task(folder).name
    except Exception as error:
        read[folder.name] = f"failed: {error}"
print(json.dumps(read))
"""
INSTALL = f"""
set -e
apt-get update -qq
apt-get install -y -qq --no-install-recommends python3-venv docker-cli >/dev/null
python3 -m venv /venv
PIP_CERT=/etc/ssl/certs/ca-certificates.crt /venv/bin/pip install -q --disable-pip-version-check {HARBOR}
"""


def run(*words: str | Path) -> str:
    """Run a command and return its output."""
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise SystemExit(f"{words} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    return done.stdout


@contextmanager
def harbor(folder: Path) -> Iterator[str]:
    """Yield the id of a container with Harbor, which sees the folder and the Docker daemon."""
    mounts = [f"--volume={path}:{path}" for path in (SOCKET, folder)]
    certificates = "--volume=/etc/ssl/certs:/etc/ssl/certs:ro"
    options = ("--detach", "--network=host", *mounts, certificates)
    container = run("docker", "run", *options, IMAGE, "sleep", "infinity").strip()
    try:
        run("docker", "exec", "--env=DEBIAN_FRONTEND=noninteractive", container, "sh", "-c", INSTALL)
        yield container
    finally:
        run("docker", "rm", "--force", container)


def export(folder: Path) -> dict[str, int]:
    """Write the own tasks and some of each family, and return their numbers."""
    commands.export(folder)
    count = len(list(folder.iterdir()))
    families = list(FAMILIES)
    for family in families:
        for difficulty in (1, 5):
            commands.export_family(family, SEEDS, difficulty, folder)
    return {"own": count, "families": len(families), "generated": len(list(folder.iterdir())) - count}


def read_all(container: str, folder: Path) -> dict[str, Any]:
    """Let Harbor read all folders."""
    counts = export(folder)
    script = folder.parent / "read.py"
    script.write_text(READ, encoding="utf-8")
    read = json.loads(run("docker", "exec", container, "/venv/bin/python", script, folder))
    failed = {name: result for name, result in read.items() if result.startswith("failed")}
    version = run("docker", "exec", container, "/venv/bin/harbor", "--version").strip()
    return {"harbor": version, **counts, "read": len(read) - len(failed), "failed": failed}


def play(container: str, folder: Path) -> dict[str, Any]:
    """Let the oracle and the nop of Harbor and of envkit play three tasks."""
    tasks = folder.parent / "trials"
    for name in TRIALS:
        shutil.copytree(folder / name, tasks / name)
    shutil.copyfile(PROVIDER, folder.parent / PROVIDER.name)
    figures: dict[str, Any] = {}
    for agent in ("oracle", "nop"):
        began = clock.stopwatch()
        words = ("run", "-p", tasks, "-e", "harbor_docker:PlainDocker", "-a", agent, "-o", "jobs", "--job-name", agent)
        inside = (
            f"--env=PYTHONPATH={folder.parent}",
            f"--env=ENVKIT_BASE={OFFLINE_BASE}",
            f"--workdir={folder.parent}",
        )
        run("docker", "exec", *inside, container, "/venv/bin/harbor", *words, "-q", "-y", "-n", "1")
        jobs = folder.parent / "jobs" / agent
        found = [json.loads(file.read_text()) for file in sorted(jobs.glob("*/result.json"))]
        rewards = {one["task_name"].rpartition("/")[2]: (one["verifier_result"] or {}).get("rewards") for one in found}
        figures[f"harbor {agent}"] = {name: (reward or {}).get("reward") for name, reward in rewards.items()}
        figures[f"harbor {agent} seconds"] = round(clock.stopwatch() - began)
    run(sys.executable, "-m", "envkit", "tasks", ENV_ID, "build", "--tasks", tasks)
    names = sorted(folder.name for folder in tasks.iterdir())
    options = {"tasks": str(tasks), "image": "task"}
    results, _ = check_tasks(ENV_ID, names, players=["oracle", "nop"], repeat=1, options=options, backend="docker")
    for one in results:
        figures[f"envkit {one.player}"] = {episode.task: episode.outcome.reward for episode in one.episodes}
    return figures


def main() -> int:
    asked = parser(__doc__, NAME).parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    with tempfile.TemporaryDirectory(prefix="envkit-harbor-") as scratch, harbor(Path(scratch)) as container:
        folder = Path(scratch) / "tasks"
        print("read", evidence.part("read", lambda: read_all(container, folder)), flush=True)
        if not folder.exists():  # this part was measured before
            export(folder)
        print("play", evidence.part("play", lambda: play(container, folder)), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
