"""Training on tool calls in sandboxes: the environment of the guide, and a sandbox that is killed in a rollout."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import envkit
from envkit import clock
from envkit.environments.tools import ToolEnv, bash, submit, write_call
from envkit.runs import owners
from envkit.sandbox.host import run_dirs
from envkit.trainer_bridge.rollout import PolicyPlayer, RolloutLimits
from envkit.trainer_bridge.scheduler import Rollout, RolloutResult
from envkit.types import Options, SandboxSpec, StopReason, Task
from envkit.wiring.environments import Resources, slots
from envkit.wiring.sandboxes.tool_pool import open_tool_pool
from tests.contract.kinds import agent_above, new_marker, sleepers, traces, until
from tests.docs.pages import GUIDE, LIFT, install
from tests.docs.pages import run as run_command
from tests.e2e.fleet.fleet import processes_of, run, serving
from tests.programs.program import Program
from tests.trainer_bridge.fakes import Call, LetterRenderer, ScriptedEngine
from tests.trainer_bridge.models import write_chat

pytestmark = [pytest.mark.bwrap, pytest.mark.xdist_group("training")]

PATIENCE_S = 300
"""After which a run hangs; on a machine where much else runs, training takes many times as long."""
TRAINING = {
    "env": {"id": "Totals-v0"},
    "sandbox": {"kind": "local"},
    "rollout": {"group_size": 2, "max_turns": 2, "max_tokens": 4096, "turn_tokens": 8},
    "trainer": {"steps": 1, "groups_per_step": 2},
    "threads": 1,
    "evaluation": {"episodes": 0},
    "tracking": {"to": []},
}


@pytest.mark.slow
@pytest.mark.limits
def test_the_sixty_lines_of_the_guide_are_served_and_trained_on(tmp_path: Path) -> None:
    """In a sandbox of their own, the oracle plays them in ``tests/docs/test_docs.py``."""
    installed = install(GUIDE, LIFT, tmp_path)

    def success(policy: str, url: str) -> float:
        command = ["-m", "envkit", "eval", "Totals-v0", "--policy", policy, "--episodes", "3", "--json", "--url", url]
        printed = run_command(sys.executable, *command, cwd=tmp_path, PYTHONPATH=str(installed))
        (found,) = (json.loads(line) for line in printed.splitlines() if line.startswith("{"))
        assert (found["episodes"], found["void"]) == (3, 0)
        return float(found["metrics"]["success"]["mean"])

    with serving("local", tmp_path, "envs.sandboxes=1", "envs.warm=0", environments=installed) as gateway:
        assert (success("oracle", gateway.url), success("nop", gateway.url)) == (1.0, 0.0)

    model = write_chat(tmp_path / "model", seed=5, max_tokens=4096)
    (tmp_path / "totals.yaml").write_text(json.dumps({**TRAINING, "engine": {"model": str(model)}}))
    command = [sys.executable, "-m", "envkit", "train", "totals.yaml", "--output", "run"]
    env = {**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"}
    with Program(command, cwd=tmp_path, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        owner = owners.owner_name(process.pid)
        output, _ = process.communicate(timeout=PATIENCE_S)
    assert process.returncode == 0, output.decode()
    fates: dict[str, int] = json.loads((tmp_path / "run" / "summary.json").read_text())["accounting"]
    assert fates["asked"] == fates["trained"] == 4
    assert fates["tokens_sampled"] == fates["tokens_trained"] > 0
    assert processes_of(owner) == []
    assert not [folder for root in run_dirs.roots() for folder in root.glob(f"{owner}*")]


MARKERS = [new_marker() for _ in range(4)]
KILLED, WRONG = 2, 1


class Sums(ToolEnv):
    tools = (bash, submit)
    spec = SandboxSpec(memory_mib=256)

    async def start(self, seed: int, options: Options) -> str:
        return f"Episode {seed}"

    async def grade(self) -> float | None:
        return float((await self.sandbox.exec(["cat", "answer"])).stdout == "right\n")


envkit.register("SumsOfTest-v0", Sums, needs={"sandbox"})


def policy() -> ScriptedEngine:
    """Write an answer; in the first attempt, wait until somebody ends the ``sleep``; submit."""
    turns: Counter[str] = Counter()

    def say(call: Call) -> str:
        assert call.session is not None
        index, attempt = int(call.session.split("/")[1]), int(call.session.rpartition(".")[2])
        turns[call.session] += 1
        answer = "wrong" if index == WRONG else "right"
        sleep = f"sleep {MARKERS[index]}" if attempt == 0 else "true"
        script = [write_call("bash", command=f"echo {answer} > answer"), write_call("bash", command=sleep)]
        return [*script, write_call("submit")][turns[call.session] - 1]

    return ScriptedEngine(say)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may kill the processes of a sandbox")
def test_a_killed_sandbox_voids_exactly_its_episode_whose_retry_has_the_right_reward() -> None:
    limits = RolloutLimits(max_turns=5, max_tokens=10_000, turn_tokens=200, step_timeout_s=60, retries=1)

    async def kill_one() -> None:
        await until(lambda: all(sleepers(marker) for marker in MARKERS), 30)
        (sleeper,) = sleepers(MARKERS[KILLED])
        os.kill(agent_above(sleeper), signal.SIGKILL)
        await until(lambda: not sleepers(MARKERS[KILLED]), 30)
        for marker in MARKERS[:KILLED] + MARKERS[KILLED + 1 :]:
            os.kill(sleepers(marker)[0], signal.SIGTERM)

    async def main() -> None:
        async with open_tool_pool("local") as pool, slots(4, {}, Resources(pool)) as host:
            rollout = Rollout(host, PolicyPlayer(policy(), LetterRenderer(), limits), limits, num_envs=4)
            tasks = [Task("SumsOfTest-v0", seed) for seed in range(4)]
            async with clock.background_tasks() as background:
                background.start_soon(kill_one)
                result = await rollout.groups(tasks, 1, phase="train-1", temperature=1.0, seed=7)
            check(result)
            assert sum(pool.counts().states.values()) == 0
            assert pool.counts().starts == 5  # 4 episodes and a retry

    def check(result: RolloutResult) -> None:
        (lost,) = result.void
        assert (lost.task.seed, lost.outcome.stop, lost.attempt) == (KILLED, StopReason.SANDBOX_LOST, 0)
        assert str(lost.outcome.cause) == "killed by signal 9 (SIGKILL)"
        played: list[Any] = [(one.outcome.stop, one.attempt, one.outcome.reward) for one in result.trajectories]
        rewards = [0.0 if index == WRONG else 1.0 for index in range(4)]
        assert played == [(StopReason.TERMINATED, int(index == KILLED), rewards[index]) for index in range(4)]

    before = traces()
    run(main, 90)
    assert traces() == before
