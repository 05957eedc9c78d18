"""Episodes of foreign agents that end early. What becomes of their calls is in ``tests/conformance/agents``."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anyio
import pytest

from envkit import clock
from envkit.errors import DeadlineError, SandboxEndedError, SandboxLostError
from envkit.trainer_bridge.agents.episode import AgentEndedError, AgentEpisode
from envkit.trainer_bridge.agents.messages import CallRefusedError, ModelRequest
from envkit.trainer_bridge.agents.programs import ProgramAgent
from envkit.trainer_bridge.agents.proxy import AgentProxy
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import Cause, CauseKind, StopReason, Task
from tests.trainer_bridge.agents.agents import LetterEngine, Scripted, ask, play_agent, played, user
from tests.trainer_bridge.fakes import Answer, ScriptedEpisode, ScriptedHost


def test_an_agent_that_fails_before_its_first_call_is_void_and_later_it_counts() -> None:
    async def fails(task: AgentEpisode) -> None:
        raise AgentEndedError("exit code 127: mini: not found")

    async def fails_later(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        raise AgentEndedError("exit code 1")

    assert played(fails).trajectory.outcome.stop is StopReason.AGENT_FAILED
    done = played(fails_later, "one")
    assert done.trajectory.outcome.stop is StopReason.TERMINATED
    assert done.player.failures == {"exit code 1": 1}


def test_an_agent_whose_sandbox_does_not_reach_the_policy_is_void() -> None:
    def inside(sandbox: object) -> Any:
        raise SandboxEndedError("s", "the relay did not start in the sandbox; it needs python3")

    class WithSandbox(ScriptedEpisode):
        sandbox: Any = object()

    class Host(ScriptedHost):
        @asynccontextmanager
        async def lease(self, task: Task) -> AsyncIterator[ScriptedEpisode]:
            yield WithSandbox([Answer("Fix it.")])

    async def main() -> None:
        agent = ProgramAgent(["true"], {}, AgentProxy(), "", inside)
        done = await play_agent(agent, LetterEngine(), host=Host(lambda task, lease: []))
        assert done.trajectory.outcome.stop is StopReason.AGENT_FAILED
        assert "it needs python3" in (done.trajectory.outcome.error or "")

    clock.run(main, virtual=True)


@pytest.mark.parametrize(("by_agent", "stop"), [(False, StopReason.SANDBOX_LOST), (True, StopReason.TERMINATED)])
def test_a_sandbox_that_is_lost_while_the_agent_works_makes_the_episode_void_unless_the_agent_ended_it(
    by_agent: bool, stop: StopReason
) -> None:
    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        raise SandboxLostError("lost", Cause(CauseKind.KILLED, "signal 9", by_agent=by_agent))

    done = played(run, "one")
    assert done.trajectory.outcome.stop is stop


def test_an_agent_that_takes_too_long_is_cut_off_with_what_it_has_done() -> None:
    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        await anyio.sleep_forever()

    done = played(run, "one", limits=RolloutLimits(max_turns=5, max_tokens=500, turn_tokens=50, player_timeout_s=60))
    assert done.trajectory.outcome.stop is StopReason.PLAYER_TIMEOUT
    assert done.num_trained == 4


@pytest.mark.parametrize(("after_s", "answers", "masked"), [(0, ["two"], {}), (1, ["~one", "two"], {"aborted": 4})])
def test_a_call_that_was_stopped_costs_no_budget(after_s: int, answers: list[str], masked: dict[str, int]) -> None:
    async def main(task: AgentEpisode) -> None:
        stopped = task.start(ModelRequest(messages=(user("a?"),)))
        if after_s:
            await anyio.sleep(after_s)
        stopped.abort()
        with pytest.raises(CallRefusedError, match="stopped"):
            await stopped.replies()
        await ask(task, user("a?"))
        with pytest.raises(CallRefusedError, match="limit of 1 calls"):
            await ask(task, user("b?"))

    done = played(main, *answers, limits=RolloutLimits(max_turns=1, max_tokens=4000, turn_tokens=200))
    assert (done.num_trained, done.masked) == (4, masked)


def test_the_engine_forgets_the_session_of_a_call_that_failed() -> None:
    engine = LetterEngine(DeadlineError("no answer"))

    async def fails(task: AgentEpisode) -> None:
        await ask(task, user("a?"))

    async def main() -> None:
        done = await play_agent(Scripted(fails), engine)
        assert done.trajectory.outcome.stop is StopReason.NO_COMPLETION

    clock.run(main, virtual=True)
    assert engine.forgotten == ["train/0/0.0.0"]
