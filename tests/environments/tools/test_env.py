"""Environments with tools: an episode's sandbox, its limits, and its end."""

from __future__ import annotations

import json
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any, ClassVar

import anyio
import msgspec
import pytest

from envkit import clock, registry
from envkit.env import AsyncEpisode
from envkit.environments.tasks import in_fresh_sandbox
from envkit.environments.tools import ToolEnv, bash, submit, view_file
from envkit.errors import CapacityError, EnvError, OptionError, SandboxLostError, StepOrderError
from envkit.protocols import Sandbox
from envkit.types import ExecResult, Options, Reset, SandboxSpec, Step, Submission, Task
from envkit.wiring.environments import Resources, open_env
from tests.environments.tools.pools import NODE_LOST, OUT_OF_MEMORY, pool_of
from tests.sandbox.fake.backend import Command, Fate


async def lookup(word: str) -> str:
    """Look a word up."""
    return {"cat": "an animal"}[word]


async def wait(seconds: float) -> str:
    """Wait."""
    await anyio.sleep(seconds)
    return "done"


class Work(ToolEnv):
    tools = (bash, view_file, submit, lookup, wait)
    system = "Work."
    options: ClassVar[Options] = {"files": 1}
    max_turns = 4
    command_timeout_s = 20.0
    episode_timeout_s = 50.0
    max_output = 200

    async def start(self, seed: int, options: Options) -> str:
        await self.sandbox.write("notes.txt", b"one\ntwo\n")
        return f"task {seed} with {options['files']} files"


class Graded(Work):
    async def grade(self) -> float | None:
        await self.sandbox.read("notes.txt")
        return float(self.submitted == "42")


def call(name: str, **arguments: object) -> str:
    return json.dumps({"name": name, "arguments": arguments})


def answer(command: Command) -> ExecResult:
    """Run ``sleep N`` in N seconds; print what follows ``print``."""
    word, _, rest = command.argv[-1].partition(" ")
    if word == "sleep":
        return ExecResult(0, duration_s=float(rest))
    return ExecResult(0, rest.encode())


ANSWERS = Fate(answer=answer)


def played(
    *actions: str,
    env: type[ToolEnv] = Work,
    fate: Fate = ANSWERS,
    **options: Any,
) -> tuple[Reset, list[Step], Any]:
    """Play the actions in one episode, and grade it if it is graded; return the reset, the steps and the grade."""

    async def main() -> tuple[Reset, list[Step], Any]:
        async with pool_of(fate) as (pool, _):
            work = env(sandboxes=pool)
            episode = AsyncEpisode(work, Task("Work-v0", 3, options))
            try:
                start = await episode.reset()
                steps = [await episode.step(action) for action in actions]
                return start, steps, await episode.grade() if start.is_graded else None
            finally:
                await work.close()

    return clock.run(main, virtual=True)


def test_a_reset_returns_the_task_the_system_prompt_the_tools_and_whether_there_is_a_grader() -> None:
    start, _, _ = played(files=2)
    assert (start.observation.text, start.system, start.is_graded) == ("task 3 with 2 files", "Work.", False)
    assert [tool["function"]["name"] for tool in start.tools] == ["bash", "view_file", "submit", "lookup", "wait"]
    assert start.info["metrics"]["tool_call_ok"] == "mean"  # type: ignore[index,call-overload]
    assert played(env=Graded)[0].is_graded


def test_a_tool_answers_in_the_role_tool_and_submit_ends_the_episode() -> None:
    _, steps, grade = played(call("bash", command="print hi"), call("submit", answer="42"), env=Graded)
    assert [(step.observation.text, step.observation.role) for step in steps] == [
        ("hi\n[exit code 0]", "tool"),
        ("42", "tool"),
    ]
    assert [(step.reward, step.terminated, step.truncated) for step in steps] == [
        (0.0, False, False),
        (0.0, True, False),
    ]
    assert steps[0].info["action_is_valid"] is steps[0].info["tool_call_ok"] is True
    assert grade == 1.0


def test_wrong_calls_are_answered_and_counted_by_their_status() -> None:
    _, steps, _ = played("I think.", call("bsh"), call("bash"), '{"name')
    texts = [step.observation.text for step in steps]
    assert texts[0].startswith("Error: the answer has no tool call; to call a tool, write one JSON object, such as {")
    assert texts[1] == "Error: there is no tool 'bsh'; did you mean 'bash'?"
    assert [step.observation.role for step in steps] == ["user", "tool", "tool", "user"]
    for step, status in zip(steps, ("no_call", "unknown_tool", "bad_arguments", "unclosed"), strict=True):
        assert [name for name, is_set in step.info.items() if is_set] == [f"tool_call_{status}"]


def test_an_episode_is_truncated_after_its_last_turn() -> None:
    _, steps, grade = played(*["..."] * 4, env=Graded)
    assert [step.truncated for step in steps] == [False, False, False, True]
    assert steps[-1].observation.text.endswith("\nThe episode is over: its limit is 4 turns.")
    assert grade == 0.0
    with pytest.raises(StepOrderError):
        played(*["..."] * 5)


def test_a_command_stops_at_its_limit_and_an_episode_ends_when_its_tools_have_used_up_the_time() -> None:
    _, steps, _ = played(*[call("bash", command="sleep 30")] * 3)
    assert [step.observation.text for step in steps] == [
        "[stopped after 20 s, the time limit of a command]",
        "[stopped after 20 s, the time limit of a command]",
        "[stopped after 10 s, the time limit of a command]\nThe episode is over: its tools have used up 50 s.",
    ]
    assert [step.truncated for step in steps] == [False, False, True]


def test_a_tool_that_does_not_know_its_limit_is_cancelled_a_little_later() -> None:
    _, (step,), _ = played(call("wait", seconds=99))
    assert step.observation.text == "Error: wait did not finish within 20 s"


def test_the_middle_of_a_long_result_is_cut() -> None:
    _, (step,), _ = played(call("bash", command=f"print {'a' * 6000}{'b' * 6000}"))
    text = step.observation.text
    assert text.startswith("a" * 100 + "\n... 11,814 characters cut ...\n")
    assert text.endswith("b\n[exit code 0]")


def test_a_limit_is_also_an_option_and_an_unknown_option_is_refused() -> None:
    _, steps, _ = played("...", max_turns=1)
    assert steps[0].truncated
    with pytest.raises(OptionError, match="file: no such option; did you mean 'files'"):
        played(file=1)
    with pytest.raises(OptionError, match="max_turns: must be an integer from 1 to 100000, got 0"):
        played(max_turns=0)


def test_a_missing_file_is_a_result_and_a_bug_of_a_tool_is_an_error() -> None:
    _, (step,), _ = played(call("view_file", path="/absent"))
    assert step.observation.text == "Error: /absent: there is no such file"
    with pytest.raises(EnvError, match="Work-v0 raised KeyError in step: 'dog'"):
        played(call("lookup", word="dog"))


def test_an_agent_that_ends_its_sandbox_ends_the_episode_with_reward_0_and_without_a_grader() -> None:
    fate = Fate(dies_after_s=10, cause=OUT_OF_MEMORY, answer=answer)
    _, (step,), grade = played(call("bash", command="sleep 15"), env=Graded, fate=fate)
    assert (step.terminated, step.reward, grade) == (True, 0.0, 0.0)
    assert step.info["sandbox_ended"] == msgspec.to_builtins(OUT_OF_MEMORY)
    assert step.observation.text == "The sandbox has ended: out of memory (limit 64 MiB). The episode is over."


def test_a_sandbox_that_the_agent_ends_before_the_grader_is_graded_with_0() -> None:
    fate = Fate(dies_after_s=10, cause=OUT_OF_MEMORY, answer=answer)
    assert played(call("wait", seconds=15), call("submit"), env=Graded, fate=fate)[2] == 0.0


@pytest.mark.parametrize("actions", [[call("bash", command="sleep 15")], [call("wait", seconds=15), call("submit")]])
def test_any_other_loss_of_the_sandbox_is_raised(actions: list[str]) -> None:
    with pytest.raises(SandboxLostError, match="the node is gone"):
        played(*actions, env=Graded, fate=Fate(dies_after_s=10, cause=NODE_LOST, answer=answer))


def test_every_episode_has_a_sandbox_of_its_own_with_the_spec_of_its_task_and_close_releases_it() -> None:
    class Sized(Work):
        def lease(self, seed: int, options: Options) -> AbstractAsyncContextManager[Sandbox]:
            return self.sandboxes.lease(SandboxSpec(memory_mib=100 + seed), wait_s=1)

    async def main() -> None:
        async with pool_of(ANSWERS) as (pool, backend):
            work = Sized(sandboxes=pool)
            for seed in (1, 2):
                await work.reset(seed=seed, options={})
            await work.close()
            await work.close()
            assert [sandbox.spec.memory_mib for sandbox in backend.sandboxes] == [101, 102]
            assert all(sandbox.is_gone for sandbox in backend.sandboxes)

    clock.run(main, virtual=True)


def test_a_submission_has_the_submitted_text_and_the_files_that_exist() -> None:
    class Collected(Work):
        async def grade(self) -> float | None:
            submission = await self.submission("notes.txt", "absent.txt")
            return float(submission == Submission("42", {"notes.txt": b"one\ntwo\n"}))

    assert played(call("submit", answer="42"), env=Collected)[2] == 1.0


async def judge(sandbox: Sandbox) -> float:
    return float((await sandbox.exec(["check"])).exit_code == 0)


def test_a_submission_releases_the_sandbox_so_that_a_grader_with_a_sandbox_has_room() -> None:
    class Regraded(Work):
        spec = SandboxSpec(memory_mib=4096)  # all memory of the pool

        async def grade(self) -> float | None:
            await self.submission("notes.txt")
            return await in_fresh_sandbox(self.sandboxes, self.spec, judge, ended=lambda cause: 0.0)

    assert played(call("submit"), env=Regraded)[2] == 1.0


def test_an_episode_waits_ten_minutes_for_room() -> None:
    async def main() -> None:
        async with pool_of(ANSWERS) as (pool, _), anyio.create_task_group() as group:
            full, work = Work(sandboxes=pool), Work(sandboxes=pool)
            full.spec = work.spec = SandboxSpec(memory_mib=4096)  # all memory of the pool

            async def release(after_s: float) -> None:
                await anyio.sleep(after_s)
                await full.close()

            await full.reset(seed=0, options={})
            group.start_soon(release, 590)
            await work.reset(seed=1, options={})
            with pytest.raises(CapacityError):
                await full.reset(seed=2, options={})
            await work.close()

    clock.run(main, virtual=True)


def test_an_environment_with_tools_gets_a_judge_and_data(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "words").mkdir()
    monkeypatch.setenv("ENVKIT_DATA", str(tmp_path))
    monkeypatch.setattr(registry, "_SPECS", dict(registry._SPECS))
    registry.register("Work-v0", Work, needs={"sandbox", "judge"}, data={"words": print})
    resources = Resources.unused()
    work = open_env("Work-v0", resources, files=2)
    assert isinstance(work, Work)
    assert (work.sandboxes, work.judge) == (resources.sandboxes, resources.judge)
    assert work.data == {"words": tmp_path / "words"}
