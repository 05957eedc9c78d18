"""Kill a part of asynchronous training runs with SIGKILL again and again, and check that their accounts add up.

    python benchmarks/evidence/training/kills.py [--only PART]

Runs of a tiny policy on FrozenLake-v0 with ``rollout.asynchronous``:

- ``trainer``: one run is killed at 20 random events, such as the n-th row of a file or the n-th file of a checkpoint,
  and resumed each time;
- ``sandbox worker``: the env servers in the sandboxes (backend ``local``) are killed while episodes run ahead, which
  are then rebuilt in other sandboxes;
- ``tool sandbox``: on a task of Terminal-v0, the sandboxes of some episodes are killed, of some of them in each retry;
- ``server``: the ``envkit serve`` that plays the episodes is killed, and started again on the same port;
- ``server that stays away``: it is not started again, so that the run ends with an error, and is resumed;
- ``engine replica``: the run has a language model with random weights on two vLLM servers, one of which is killed;
- ``cluster``: on a Ray cluster of two nodes, which are processes of this machine, the run starts a vLLM server and a
  node for sandboxes on each. On the other node, the node for sandboxes, the vLLM server, the Ray actor that runs its
  successor, and Ray itself are killed, one after the other.

A part holds if all attempts and tokens are accounted for after every train step, each group was trained on once or is
void with its cause, no row of a checkpoint changed, and no process is left. The exit status is 1 if a part does not.
Needs bubblewrap and, for ``engine replica`` and ``cluster``, ``make vllm`` and ``envkit model get smollm2-135m``. Takes
forty minutes.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from multiprocessing import get_context
from multiprocessing.context import ForkProcess
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event
from typing import Any

import yaml

sys.path.append(str(Path(__file__).parents[1]))  # the folder of `record`
from record import Evidence, parser
from record.processes import adopt_orphans, descendants, left_behind, name_of, words_of

from envkit import clock
from envkit.cli import main as envkit_main
from envkit.wiring.training import torch_parts  # noqa: F401 - the runs are forked from this process
from tests.e2e.fleet.fleet import NOTHING, Gateway, free_port, serving
from tests.e2e.training.accounts import accounts, key, rows
from tests.e2e.training.terminals import train_and_kill
from tests.wiring.launch.ray_cluster import two_nodes

NAME = "kills"
STALE_AFTER = (
    "envkit/wiring/training/run.py",
    "tests/e2e/training/accounts.py",
    "trainer_bridge/loop.py",
    "trainer_bridge/rollout",
    "trainer_bridge/run_folder",
    "trainer_bridge/scheduler",
)
TWIN = "tests/e2e/training/test_asynchronous.py::test_a_killed_run_trains_on_every_task_once_and_its_accounts_add_up"
"""Twins of the server, ``engine replica`` and ``cluster`` are in ``tests/e2e/training/test_served_training.py``,
``tests/trainer_bridge/engines/vllm/test_losses.py`` and ``tests/wiring/launch/test_ray.py``."""
GROUPS, SIZE = 4, 4
CONFIG: dict[str, Any] = {
    "seed": 3,
    "env": {"id": "FrozenLake-v0", "num_envs": 16, "options": {"size": 3}},
    "sandbox": {"kind": "local"},
    "engine": {"hidden_size": 16, "layers": 1},
    "rollout": {"group_size": SIZE, "max_turns": 10, "max_tokens": 256, "asynchronous": True},
    "threads": 1,
    "trainer": {"groups_per_step": GROUPS, "checkpoint_every": 2},
    "evaluation": {"episodes": 4, "every": 7},
    "imitation": {"states": 100, "updates": 5, "batch": 16, "check_episodes": 0},
    "tracking": {"to": [], "trajectories_every": 1, "trajectories": 2},
}
EVENTS = (
    "row of metrics",
    "row of the schedule",
    "file of a checkpoint",
    "checkpoint",
    "evaluation",
    "moment",
    "timeline",
)
KILLS = {"trainer": 20, "sandbox worker": 20, "server": 5, "engine replica": 1}
STEPS = {
    "trainer": 100,
    "sandbox worker": 40,
    "server": 30,
    "server that stays away": 10,
    "engine replica": 6,
    "cluster": 12,
}
ENV_SERVER = "envkit.wiring.env_server"
GONE_S = 90.0
"""Seconds in which the processes of a node must end whose Ray was killed; Ray's workers notice that by themselves."""
PATIENCE_S = 1800.0
"""Seconds after which a run counts as hanging."""

_FORK = get_context("fork")
Figures = dict[str, Any]


class Run:
    """A training run in a new folder `place`, whose file is `CONFIG` with other sections."""

    def __init__(self, place: Path, part: str, **sections: Any) -> None:
        self.folder = place / "run"
        self._file, self._log = place / "run.yaml", place / "run.log"
        self.steps = STEPS[part]
        self.kept: dict[int, str] = {}
        sections["trainer"] = {"steps": self.steps, **sections.get("trainer", {})}
        merged = {**CONFIG}
        for name, section in sections.items():
            merged[name] = section if "kind" in section else {**CONFIG.get(name, {}), **section}
        if "url" in merged["env"]:
            del merged["sandbox"]
        self._file.write_text(yaml.safe_dump(merged))

    @contextmanager
    def running(self) -> Iterator[ForkProcess]:
        """Start or resume it in a process of its own; it has ended at the end of the block."""
        word = "--resume" if self.checkpoint is not None else "--force"
        process = _FORK.Process(target=_train, args=(self._log, [str(self._file), "--output", str(self.folder), word]))
        process.start()
        yield process
        process.join(PATIENCE_S)

    @property
    def log(self) -> str:
        return self._log.read_text()

    @property
    def checkpoint(self) -> int | None:
        """The train step of the newest checkpoint."""
        return max((int(one.name[5:]) for one in (self.folder / "checkpoints").glob("step-*")), default=None)

    def count(self, file: str) -> int:
        """Return the number of rows of a file."""
        with suppress(FileNotFoundError):
            return (self.folder / file).read_bytes().count(b"\n")
        return 0

    def keep(self) -> None:
        """Note the rows that the newest checkpoint has; they must be the same in the end."""
        known = self.checkpoint or 0
        for row in rows(self.folder / "schedule.jsonl"):
            if row["step"] <= known:
                self.kept.setdefault(row["step"], json.dumps(row))

    def figures(self, left: list[str], **found: Any) -> Figures:
        """Return the figures of the run, which has ended."""
        if not (self.folder / "summary.json").exists():
            raise SystemExit(f"the run has failed:\n{self.log}")
        made = accounts(self.folder, steps=self.steps, groups=GROUPS, size=SIZE)
        final = {row["step"]: json.dumps(row) for row in rows(self.folder / "schedule.jsonl")}
        changed = [step for step, row in self.kept.items() if final.get(step) != row]
        if changed:
            made["problems"].append(f"the train steps {changed} were in a checkpoint, and are others now")
        made["problems"] += [f"left running: {one}" for one in left]
        return {**found, **counted(made)}


def counted(made: Figures) -> Figures:
    """Return the accounts of a part, with the causes of void episodes without the names of sandboxes."""
    causes: Counter[str] = Counter()
    for cause, count in made["void_by_cause"].items():
        causes[re.sub(r"sandbox \S+ lost", "sandbox lost", cause)] += count
    return {**made, "void_by_cause": dict(causes), "holds": not made["problems"]}


def _train(log: Path, words: Sequence[str]) -> None:
    """Run ``envkit train`` in this process. It is forked, so that 20 starts do not import torch 20 times."""
    with log.open("ab") as file:
        for number in (1, 2):
            os.dup2(file.fileno(), number)
    envkit_main(["train", *words])


def wait(process: ForkProcess, reached: Callable[[], bool]) -> bool:
    """Wait until `reached` returns true; return false if the run has ended before."""
    until = clock.stopwatch() + PATIENCE_S
    while not reached():
        if not process.is_alive():
            return False
        if clock.stopwatch() > until:
            raise SystemExit("the run took too long to reach the moment of the kill")
        pause(0.005)
    return True


def pause(seconds: float) -> None:
    Event().wait(seconds)


def reached(run: Run, event: str, number: int, chance: random.Random) -> Callable[[], bool]:
    """Return a function that tells whether an event has come since the run was started or resumed."""
    first, checkpoints = run.checkpoint or 0, run.folder / "checkpoints"

    def is_far() -> bool:  # in case that the event does not come
        return run.count("metrics.jsonl") >= first + 5

    if event in ("row of metrics", "row of the schedule"):
        file = "metrics.jsonl" if event == "row of metrics" else "schedule.jsonl"
        return lambda: run.count(file) >= first + number
    if event == "file of a checkpoint":
        return lambda: is_far() or len([*checkpoints.glob(".step-*/**/*")]) >= number
    if event == "checkpoint":
        return lambda: is_far() or (run.checkpoint or 0) > first
    if event == "evaluation":
        before = run.count("evaluations.jsonl")
        return lambda: is_far() or run.count("evaluations.jsonl") > before
    if event == "timeline":
        return (run.folder / "timeline" / f"step-{first + number}.json.gz").exists
    at_s = clock.stopwatch() + chance.uniform(0.5, 20)
    return lambda: is_far() or clock.stopwatch() >= at_s


def trainer(place: Path) -> Figures:
    """Kill and resume one run, until it was killed often enough; then let it end."""
    run, chance, kills, left = Run(place, "trainer"), random.Random(1), list[Figures](), list[str]()
    while len(kills) < KILLS["trainer"]:
        event, number = EVENTS[len(kills) % len(EVENTS)], chance.randint(1, 4)
        with run.running() as process:
            if not wait(process, reached(run, event, number, chance)):
                break
            process.kill()
        left += left_behind()
        run.keep()
        kill = {"event": event, "number": number, "rows": run.count("metrics.jsonl"), "checkpoint": run.checkpoint}
        kills.append(kill)
        print(kill, flush=True)
    with run.running():
        pass
    return run.figures(left + left_behind(), kills=len(kills), events=kills)


def sandbox_worker(place: Path) -> Figures:
    """Kill env servers at random moments, from the first train step on."""
    sandbox = {"kind": "local", "count": 3, "restarts": {"budget": 1000}}
    run = Run(place, "sandbox worker", sandbox=sandbox, tracking={"trajectories": GROUPS * SIZE})
    chance, killed = random.Random(2), 0
    with run.running() as process:
        wait(process, lambda: run.count("metrics.jsonl") > 0)
        while process.is_alive() and killed < KILLS["sandbox worker"]:
            pause(chance.uniform(0.1, 0.6))
            servers = [pid for pid in descendants(process.pid) if ENV_SERVER in words_of(pid)]
            if servers:
                os.kill(chance.choice(servers), signal.SIGKILL)
                killed += 1
    rebuilt = sum(
        any("rebuilt" in turn.get("info", {}) for turn in episode["turns"])
        for path in run.folder.glob("trajectories/*.jsonl")
        for episode in rows(path)
    )
    return run.figures(left_behind(), kills=killed, episodes_rebuilt=rebuilt, exit_code=process.exitcode)


def tool_sandbox(place: Path) -> Figures:
    """Kill the sandboxes of 12 episodes once, of two in each attempt, and those of a whole group but one in each."""
    steps, groups, size, chance = 12, 2, 3, random.Random(5)
    keys = [key(number, member) for number in range(4, steps * groups) for member in range(size)]
    kills = dict.fromkeys(chance.sample(keys, 12), 1) | dict.fromkeys((key(1, 2), key(3, 0), key(2, 0), key(2, 1)), 4)
    train_and_kill(place, kills, steps=steps, groups=groups, size=size)
    found = accounts(place / "run", steps=steps, groups=groups, size=size)
    found["problems"] += [f"left running: {one}" for one in left_behind()]
    return {"kills": sum(kills.values()), **counted(found)}


def server(place: Path) -> Figures:
    """Kill the server at random rows and moments after them, and start it again on the same port after some seconds."""
    port, chance, ends = free_port(), random.Random(3), list[dict[str, Any]]()
    run = Run(place, "server", env={"url": f"http://127.0.0.1:{port}"})
    killed, started = 0, list[Gateway]()
    with ExitStack() as servers:

        def start() -> None:
            started.append(servers.enter_context(serving("local", place, "envs.sandboxes=1", "envs.warm=0", port=port)))

        start()
        with run.running() as process:
            for number in range(KILLS["server"]):
                if wait(process, partial(lambda row: run.count("metrics.jsonl") >= row, 1 + 4 * number)):
                    pause(chance.uniform(0, 0.5))
                    killed += process.is_alive()
                    started[-1].process.kill()
                    started[-1].process.wait()
                    pause(chance.uniform(0, 4))
                    start()
        started[-1].process.terminate()
        started[-1].process.wait()
        ends = [left for gateway in started if (left := gateway.left()) != NOTHING]
    outages = run.log.count(" s for the server")
    return run.figures([*map(str, ends), *left_behind()], kills=killed, outages=outages, exit_code=process.exitcode)


def server_away(place: Path) -> Figures:
    """Kill the server for longer than the run waits, and resume the run on another one."""
    port = free_port()
    run = Run(place, "server that stays away", env={"url": f"http://127.0.0.1:{port}", "outage_timeout_s": 3})
    codes, folder = list[int](), partial(serving, "local", place, "envs.sandboxes=1", "envs.warm=0", port=port)
    for is_killed in (True, False):
        with folder() as gateway, run.running() as process:
            if is_killed and wait(process, lambda: run.count("metrics.jsonl") >= 3):
                gateway.process.kill()
        codes.append(process.exitcode)
        run.keep()
    error = re.search(r"env\.url: lost the server.*", run.log)
    made = run.figures(left_behind(), exit_codes=codes, error=error[0] if error else "")
    return {**made, "holds": made["holds"] and codes == [1, 0] and "--resume" in made["error"]}


def engine_replica(place: Path) -> Figures:
    """Kill the API server of one of two vLLM servers after the second train step."""
    run = Run(place, "engine replica", **vllm_sections(place, replicas=2))
    chance, killed = random.Random(4), 0
    with run.running() as process:
        if wait(process, lambda: run.count("metrics.jsonl") >= 2):
            pause(chance.uniform(0, 1))
            os.kill(chance.choice(api_servers()), signal.SIGKILL)
            killed += 1
    losses = run.log.count("lost the vLLM server")
    return run.figures(left_behind(), kills=killed, servers_lost=losses, exit_code=process.exitcode)


def cluster(place: Path) -> Figures:
    """Kill parts of a run on the other node of a Ray cluster, and measure after how many seconds the run says so."""
    sections = vllm_sections(place)
    placement = {"launcher": "ray", "engines": ["n0", "n1"], "nodes": "all"}
    run = Run(place, "cluster", **sections, sandbox={"kind": "process", "count": 2}, placement=placement)
    noticed_s: dict[str, float] = {}
    with two_nodes() as variables:
        os.environ |= variables

        def kill(pids: Sequence[int], what: str, line: str) -> None:
            before, at_s = run.log.count(line), clock.stopwatch()
            os.kill(pids[-1], signal.SIGKILL)
            if wait(process, lambda: run.log.count(line) > before):
                noticed_s[what] = round(clock.stopwatch() - at_s, 1)

        def running(*words: str) -> list[int]:
            """Return the processes of this run and of the cluster whose command has these words."""
            return [pid for pid in descendants(os.getpid()) if all(word in words_of(pid) for word in words)]

        with run.running() as process:
            if wait(process, lambda: run.count("metrics.jsonl") >= 1):
                nodes = [pid for pid in running("envkit", "--node") if "127.0.0.1" not in words_of(pid)]
                kill(nodes, "node for sandboxes", "node n1 is lost")
            if wait(process, lambda: run.count("metrics.jsonl") >= 3):
                kill(sorted(pid for pid in api_servers() if actor_of(pid)), "vLLM server", "lost the vLLM server 1")
            if wait(process, lambda: run.log.count("the vLLM server 1 is back at ") >= 1):
                kill(
                    [found for pid in api_servers() if (found := actor_of(pid))], "Ray actor", "lost the vLLM server 1"
                )
            if wait(process, lambda: run.log.count("the vLLM server 1 is back at ") >= 2):
                actor = max(found for pid in api_servers() if (found := actor_of(pid)))  # others may still be ending
                kill([parent_of(actor)], "Ray on the node", "lost the vLLM server 1")
        kills, ended_s = len(noticed_s), clock.stopwatch()
        while (left := running("--node") + api_servers()) and clock.stopwatch() < ended_s + GONE_S:
            pause(0.1)
        noticed_s["end of all processes"] = round(clock.stopwatch() - ended_s, 1)
        found = [" ".join(words_of(pid)) for pid in left]
    for name in variables:
        del os.environ[name]
    return run.figures(found + left_behind(), kills=kills, noticed_s=noticed_s, exit_code=process.exitcode)


def vllm_sections(place: Path, **engine: Any) -> dict[str, Any]:
    """Make a language model with random weights, and return the sections of a run with vLLM."""
    sys.path.append(str(Path(__file__).parents[1] / "vllm"))
    from parts import new_qwen2  # imported late: loads torch

    sizes = {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    more = {"intermediate_size": 256, "max_position_embeddings": 512}
    new_qwen2(place / "model", dtype="float32", **sizes, **more)
    return {
        "engine": {"kind": "vllm", "model": str(place / "model"), "dtype": "float32", **engine},
        "imitation": {"kind": "none"},
        "rollout": {"max_turns": 4, "max_tokens": 512, "turn_tokens": 32},
        "trainer": {"precision": "float32"},
    }


def api_servers() -> list[int]:
    """Return the API servers of vLLM that runs of this process have started."""
    return [pid for pid in descendants(os.getpid()) if name_of(pid) == "vLLM APIServer"]


def actor_of(pid: int) -> int | None:
    """Return the Ray actor below which a process runs; None without one."""
    while pid > 1:
        if any("Runner" in word for word in words_of(pid)):
            return pid
        pid = parent_of(pid)
    return None


def parent_of(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


PARTS: dict[str, Callable[[Path], Figures]] = {
    "trainer": trainer,
    "sandbox worker": sandbox_worker,
    "tool sandbox": tool_sandbox,
    "server": server,
    "server that stays away": server_away,
    "engine replica": engine_replica,
    "cluster": cluster,
}


def main() -> int:
    arguments = parser(__doc__, NAME)
    arguments.add_argument("--only", choices=PARTS, help="measure only this part")
    asked = arguments.parse_args()
    evidence = Evidence(NAME, stale_after=STALE_AFTER, folder=asked.folder, fresh=asked.fresh)
    adopt_orphans()
    found: dict[str, Figures] = {}
    for name, measure in PARTS.items():
        if asked.only in (None, name):
            with TemporaryDirectory(prefix="envkit-kills-") as place:
                found[name] = evidence.part(name, partial(measure, Path(place)))
            print(name, json.dumps(found[name]), flush=True)
    return 0 if all(figures["holds"] for figures in found.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
