"""The launcher of Ray on a real cluster of two nodes: a program on the other node, and what is left when parts die."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Awaitable, Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import ClassVar, cast

import anyio
import pytest

from envkit import clock, config, registry
from envkit.checks.cluster import Finding, examine_cluster
from envkit.env import AsyncEnv
from envkit.metrics import Fold
from envkit.protocols import Judge, Process
from envkit.runs.display import SilentDisplay
from envkit.types import Observation, Options, Place, Reset, Step
from envkit.wiring.launch.local import LOOPBACK, RelayLauncher
from envkit.wiring.launch.ray import open_ray
from envkit.wiring.training.run import train
from tests.trainer_bridge.engines.vllm import fake_vllm
from tests.trainer_bridge.models import write_chat

from .ray_cluster import Cluster, two_nodes

pytestmark = [pytest.mark.ray, pytest.mark.slow]

ROOT = Path(__file__).parents[3]

PROGRAM = """
import os, subprocess, sys, time
deaf = "trap '' TERM; " if os.environ["WORD"] == "deaf" else ""
child = subprocess.Popen(["sh", "-c", deaf + "exec sleep 600"])
print(os.environ["WORD"], os.getpid(), child.pid, flush=True)
time.sleep(600)
"""

# Starts the program on the other node, prints the path of its log, and waits.
OWNER = """
import sys
import anyio
from envkit import clock
from envkit.types import Place
from envkit.wiring.launch.ray import open_ray

async def main():
    launcher = await open_ray()
    argv = [sys.executable, "-c", sys.argv[1]]
    process = await launcher.start(argv, {"WORD": "hello"}, place=Place("n1"), name="test")
    print(process.log, flush=True)
    await anyio.sleep(600)

clock.run(main)
"""


@pytest.fixture(scope="module")
def two() -> Iterator[Cluster]:
    with two_nodes() as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def cluster(two: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    for name, value in two.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return two


@cache
def launcher() -> RelayLauncher:
    """The launcher of all tests, since it takes seconds to connect."""
    return clock.run(open_ray)


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        with anyio.fail_after(120):
            await test()

    launcher()
    clock.run(main)


async def started(word: str = "hello") -> tuple[Process, list[int]]:
    """Start the program on the other node; return it, and the pids that it has printed. "deaf": its child is."""
    assert [node.name for node in launcher().nodes] == ["n0", "n1"]
    argv = [sys.executable, "-c", PROGRAM]
    process = await launcher().start(argv, {"WORD": word}, place=Place("n1"), name="test")
    return process, await pids_in(process.log)


async def pids_in(log: Path) -> list[int]:
    while not (words := log.read_text().split())[2:]:  # noqa: ASYNC110, ASYNC240 - a file sets no event
        await anyio.sleep(0.1)
    return [int(word) for word in words[1:]]


async def gone(pids: list[int]) -> None:
    while any(map(command, pids)):  # noqa: ASYNC110 - the kernel sets no event
        await anyio.sleep(0.1)


def command(pid: int) -> str:
    """Return the command line of a process; empty if it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return ""


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_killed_actor_is_the_cause_within_five_seconds_and_its_program_ends() -> None:
    async def test() -> None:
        process, pids = await started()
        actor = parent(parent(pids[0]))  # the parent of the supervisor
        assert "Runner" in command(actor)
        os.kill(actor, signal.SIGKILL)
        with anyio.fail_after(5):
            reason = await process.wait()
        assert reason.startswith("lost the actor on its node: ")
        await process.kill()
        await gone(pids)

    run(test)


def test_if_ray_is_killed_on_a_node_nothing_is_left_there(cluster: Cluster) -> None:
    async def test() -> None:
        process, pids = await started()
        actor = parent(parent(pids[0]))
        os.kill(parent(actor), signal.SIGKILL)
        assert (await process.wait()).startswith("lost the actor on its node: ")
        await process.kill()
        await gone([actor, *pids])

    try:
        run(test)
    finally:
        cluster.replace_node()
        launcher.cache_clear()


def test_a_program_that_is_killed_ends_within_five_seconds_with_a_child_that_ignores_signals() -> None:
    async def test() -> None:
        process, pids = await started("deaf")
        os.kill(pids[0], signal.SIGKILL)
        with anyio.fail_after(5):
            assert (await process.wait(), process.returncode) == ("killed by signal 9", -9)
        assert not command(pids[1])
        await process.kill()

    run(test)


def test_a_killed_owner_leaves_nothing_on_the_other_node() -> None:
    async def test() -> None:
        async with await anyio.open_process([sys.executable, "-c", OWNER, PROGRAM], cwd=ROOT) as owner:
            assert owner.stdout is not None
            log = Path((await owner.stdout.receive()).decode().strip())
            pids = await pids_in(log)
            owner.kill()
            await owner.wait()
        await gone(pids)

    run(test)


class Lines(SilentDisplay):
    """Keeps what is announced."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def announce(self, line: str) -> None:
        self.lines.append(line)


def nodes_for_sandboxes() -> dict[str, int]:
    """Return the pids of the nodes for sandboxes that runs of this process have started, by their addresses."""
    found = {}
    for path in Path("/proc").glob("[0-9]*"):
        words = command(int(path.name)).split("\0")
        if "--node" in words and words[1:3] == ["-m", "envkit"] and os.environ["RAY_TMPDIR"] in variables_of(path):
            found[words[words.index("--host") + 1]] = int(path.name)
    return found


def variables_of(process: Path) -> str:
    try:
        return (process / "environ").read_text(errors="replace")
    except OSError:
        return ""


class Judged(AsyncEnv):
    """One turn, whose reward is the answer of the judge."""

    metrics: ClassVar[Mapping[str, Fold]] = {"success": "last"}
    answers: ClassVar[set[str]] = set()

    def __init__(self, *, judge: Judge) -> None:
        self._judge = judge

    async def reset(self, *, seed: int, options: Options) -> Reset:
        return Reset(Observation("1 + 1"), {})

    async def step(self, action: str) -> Step:
        self.answers.add(await self._judge.ask([{"role": "user", "content": "Is it 2?"}]))
        return Step(Observation(""), 1.0, terminated=True, truncated=False, info={"success": True})

    async def close(self) -> None: ...


def test_a_run_has_servers_on_the_other_node_and_outlives_a_killed_node_for_sandboxes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    registry.register("JudgedOnRay-v0", Judged, needs={"judge"})
    model = str(write_chat(tmp_path / "chat", seed=3))
    content = {
        "env": [
            {"id": "Arithmetic-v0", "num_envs": 4, "options": {"instructions": False}},  # short prompts
            {"id": "JudgedOnRay-v0", "num_envs": 4, "judge": model},
        ],
        "sandbox": {"kind": "process", "count": 2},
        "threads": 1,
        "engine": {
            "kind": "vllm",
            "model": model,
            "python": str(fake_vllm.scripted(tmp_path, ROOT)),
            "dtype": "float32",
        },
        "placement": {"launcher": "ray", "engines": ["n1"], "judge": "n1", "nodes": "all"},
        "renderer": {"system": ""},
        "rollout": {"group_size": 2, "max_turns": 1, "max_tokens": 128, "turn_tokens": 4},
        "trainer": {"steps": 3, "groups_per_step": 2, "precision": "float32"},
        "evaluation": {"episodes": 0},
        "imitation": {"kind": "none"},
        "diagnostics": {"stop_on": []},
        "tracking": {"to": []},
    }
    display = Lines()
    pids: dict[str, int] = {}

    def kill(step: int, _: object) -> None:
        if step == 1:
            pids.update(nodes_for_sandboxes())
            os.kill(next(pid for host, pid in pids.items() if host != LOOPBACK), signal.SIGKILL)

    async def test() -> None:
        run, folder = config.parse(content), tmp_path / "run"
        summary = await train(run, folder, resume=False, force=False, display=display, on_step=kill)
        assert (summary["train_steps"], len(pids)) == (3, 2)
        fates = cast("dict[str, int]", summary["accounting"])
        assert fates["trained"] == 12
        assert fates["asked"] == 12 + fates.get("voided", 0), fates
        assert "placement: trainer n0, servers n1, judge n1" in display.lines
        assert Judged.answers == {"policy-base says 1"}
        assert any(" on n1 (" in line and "in a network that must be private" in line for line in display.lines)
        assert any(
            line.startswith("the node for sandboxes on n1 killed by signal 9 (")
            and line.endswith("; it is started again")
            for line in display.lines
        )
        servers = [int(name) for name in (tmp_path / "pids").read_text().split()]
        assert len(servers) == 2
        await gone([*servers, *pids.values()])
        assert nodes_for_sandboxes() == {}

    run(test)


def test_the_doctor_sends_a_file_to_each_node_of_the_cluster_and_back(tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()

    def run_file(launcher: str, **weights: str) -> Path:
        file = tmp_path / f"{launcher}{len(weights)}.yaml"
        engine = {"kind": "vllm", "model": "unused", **weights}
        content = {"env": {"id": "FrozenLake-v0"}, "engine": engine, "placement": {"launcher": launcher}}
        file.write_text(json.dumps(content))
        return file

    async def test() -> None:
        shared, served, wrong = await at_once(
            run_file("ray", weights_folder=str(folder)),
            run_file("ray"),
            run_file("local", weights_url="http://127.0.0.2:18300"),  # the server is at 127.0.0.1
        )
        assert [one for one in (*shared.values(), *served.values()) if one.remedy] == []
        for node in ("n0", "n1"):
            assert shared[node, "weights"].result == f"{folder} is shared"
            assert {check for name, check in shared if name == node} > {"start", "clock", "version", "architecture"}
        assert list(folder.iterdir()) == []
        assert ("n0", "weights") not in served  # its servers read the files
        assert served["n1", "weights"].result.startswith("fetches from http://")
        assert wrong["n0", "weights"].result.startswith("cannot fetch from http://127.0.0.2:18300: ")
        assert "set engine.weights_url" in wrong["n0", "weights"].remedy

    async def at_once(*files: Path) -> list[dict[tuple[str, str], Finding]]:
        found: dict[Path, dict[tuple[str, str], Finding]] = {}

        async def examine(file: Path) -> None:
            found[file] = {(one.machine.partition(" ")[0], one.check): one for one in await examine_cluster(file)}

        async with anyio.create_task_group() as tasks:
            for file in files:
                tasks.start_soon(examine, file)
        return [found[file] for file in files]

    run(test)
