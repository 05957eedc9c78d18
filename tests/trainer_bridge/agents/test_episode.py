"""Episodes of foreign agents: what is trained is what was sampled, where it was sampled, once."""

from __future__ import annotations

import anyio
import pytest

from envkit.errors import SandboxLostError
from envkit.trainer_bridge.agents.episode import AgentEndedError, AgentEpisode
from envkit.trainer_bridge.agents.messages import AgentToolCall, CallRefusedError, ChatMessage, ModelRequest
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import Cause, CauseKind, StopReason
from tests.trainer_bridge.agents.agents import TOOL, ask, assistant, of, played, system, user
from tests.trainer_bridge.fakes import Answer, ScriptedHost

START, END = "<|im_start|>", "<|im_end|>"


def turn(role: str, text: str) -> str:
    return f"{START}{role}\n{text}{END}\n"


def test_a_chat_that_grows_is_one_sample_with_the_tokens_as_they_were_sampled() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, system("Be brief."), user("a?"))
        second = await ask(task, system("Be brief."), user("a?"), of(first), user("b?"))
        await ask(task, system("Be brief."), user("a?"), of(first), user("b?"), of(second), user("c?"))

    done = played(run, "one", "two", "three")
    head = turn("system", "Be brief.") + turn("user", "a?") + f"{START}assistant\n"
    first, second = (f"{turn('user', text)}{START}assistant\n" for text in ("b?", "c?"))
    assert done.texts == [f"{head}[one{END}]\n{first}[two{END}]\n{second}[three{END}]"]
    assert done.trajectory.outcome.stop is StopReason.TERMINATED


def test_forks_and_parallel_calls_are_samples_of_their_own_that_train_a_shared_answer_once() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"))
        async with anyio.create_task_group() as tasks:
            for text in ("b?", "c?"):
                tasks.start_soon(lambda text=text: ask(task, user("a?"), of(first), user(text)))  # type: ignore[misc]

    done = played(run, "one", "two", "three")
    head = turn("user", "a?") + f"{START}assistant\n"
    assert sorted(done.texts) == sorted(
        [
            f"{head}[one{END}]\n{turn('user', 'b?')}{START}assistant\n[two{END}]",
            f"{head}one{END}\n{turn('user', 'c?')}{START}assistant\n[three{END}]",
        ]
    )


def test_several_answers_to_one_request_all_train() -> None:
    async def run(task: AgentEpisode) -> None:
        call = task.start(ModelRequest(messages=(user("a?"),), n=3))
        replies = await call.replies()
        assert [one.content for one in replies] == ["x", "y", "z"]
        for index in range(3):
            call.delivered(index)
        await ask(task, user("a?"), of(replies[1]), user("b?"))

    done = played(run, "x", "y", "z", "w")
    assert len(done.samples) == 3
    assert done.num_trained == 2 * 4
    assert any("[y<|im_end|>]" in text and "[w<|im_end|>]" in text for text in done.texts)


@pytest.mark.parametrize("sent", [" one ", "one\n"])
def test_an_answer_that_the_client_trims_is_the_same(sent: str) -> None:
    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        await ask(task, user("a?"), assistant(sent.strip()), user("b?"))

    done = played(run, sent, "two")
    assert len(done.samples) == 1
    assert done.num_trained == len(sent) + 1 + 4


def test_an_answer_that_the_client_rewrites_is_not_trained_on_where_it_is_quoted() -> None:
    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        await ask(task, user("a?"), assistant("ONE"), user("b?"))
        await ask(task, user("summary: one"))

    done = played(run, "one", "two", "three")
    assert [text.count("[") for text in done.texts] == [1, 1, 1]
    assert done.num_trained == 4 + 4 + 6


def test_other_tools_or_another_system_prompt_are_another_root() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, system("1"), user("a?"))
        await ask(task, system("2"), user("a?"), of(first), user("b?"))
        await ask(task, system("1"), user("a?"), of(first), user("b?"), tools=(TOOL,))

    assert len(played(run, "one", "two", "three").samples) == 3


def test_text_that_the_client_appends_to_an_answer_is_context_in_the_same_sample() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"), stop=("Observation:",))
        assert first.content == "do it\n"
        second = await ask(task, user("a?"), assistant(first.content + "Observation: done\n"), stop=("Observation:",))
        assert second.content == "fine"

    done = played(run, "do it\nObservation: made up", "fine")
    assert done.texts == [
        f"{turn('user', 'a?')}{START}assistant\n[do it\nObservation:] done\n{END}\n{START}assistant\n[fine{END}]"
    ]
    assert done.trajectory.turns[0].call is not None
    assert done.trajectory.turns[0].call.cause == "stop"


def test_a_begun_answer_goes_on_with_exactly_the_text_that_was_sent() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"), assistant("def f( "), continues=True)
        assert first.content == "x): y"
        await ask(task, user("a?"), assistant("def f( x): y"), user("b?"))

    done = played(run, "x): y", "two")
    assert done.texts == [
        f"{turn('user', 'a?')}{START}assistant\ndef f( [x): y{END}]\n{turn('user', 'b?')}{START}assistant\n[two{END}]"
    ]


def test_an_answer_that_was_cut_goes_on_in_the_same_sample() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"))
        assert first.finish == "length"
        await ask(task, user("a?"), of(first), continues=True)

    done = played(run, "one...", " two")
    assert done.texts == [f"{turn('user', 'a?')}{START}assistant\n[one... two{END}]"]


def test_tool_calls_are_read_and_their_tokens_kept() -> None:
    call = '<tool_call>\n{"name":  "bash", "arguments": {"command": "ls"}}\n</tool_call>'

    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"), tools=(TOOL,))
        assert (first.content, first.finish) == ("I look.", "tool_calls")
        assert first.calls == (AgentToolCall("bash", {"command": "ls"}),) * 2
        results = [ChatMessage("tool", text, answers=number) for number, text in enumerate(("x", "y"))]
        await ask(task, user("a?"), of(first), *results, tools=(TOOL,))

    done = played(run, f"I look.\n{call}{call}", "two")
    (text,) = done.texts
    assert f"[I look.\n{call}{call}{END}]" in text
    assert text.endswith(f"[two{END}]")


@pytest.mark.parametrize("text", ["<tool_call>{broken", '<tool_call>{"name": "bash", "arguments": {"comm...'])
def test_a_broken_call_is_text(text: str) -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"), tools=(TOOL,))
        assert (first.content, first.calls) == (text, ())
        await ask(task, user("a?"), of(first), user("b?"), tools=(TOOL,))

    assert len(played(run, text, "two").samples) == 1


# --- What is not trained on ------------------------------------------------------------------------------------------


def test_probes_train_nothing_and_cost_no_budget() -> None:
    async def run(task: AgentEpisode) -> None:
        for _ in range(3):
            await ask(task, user("quota"), max_tokens=1)
        assert task.count(ModelRequest(messages=(user("a?"),))) > 0
        await ask(task, user("a?"))

    done = played(run, "...", "...", "...", "one", limits=RolloutLimits(max_turns=1, max_tokens=500, turn_tokens=50))
    assert done.num_trained == 4
    assert [one.call.cause for one in done.trajectory.turns if one.call] == ["probe"] * 3 + [""]


def test_an_answer_that_the_client_did_not_read_is_neither_trained_on_nor_continued() -> None:
    async def run(task: AgentEpisode) -> None:
        await task.start(ModelRequest(messages=(user("a?"),))).replies()
        await ask(task, user("a?"), assistant("one"), user("b?"))

    done = played(run, "one", "two")
    assert done.texts == [
        f"{turn('user', 'a?')}{turn('assistant', 'one')}{turn('user', 'b?')}{START}assistant\n[two{END}]"
    ]
    assert done.trajectory.turns[0].call is not None
    assert done.trajectory.turns[0].call.cause == "unread"


def test_a_client_that_cuts_an_answer_continues_what_it_read() -> None:
    async def run(task: AgentEpisode) -> None:
        call = task.start(ModelRequest(messages=(user("a?"),)))
        await call.replies()
        call.delivered(0, 5)
        await ask(task, user("a?"), assistant("one"), user("b?"))

    done = played(run, "one and the rest", "two")
    assert done.texts == [
        f"{turn('user', 'a?')}{START}assistant\n[one]{END}\n{turn('user', 'b?')}{START}assistant\n[two{END}]"
    ]


def test_a_call_in_progress_at_the_end_is_aborted_and_not_trained_on() -> None:
    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        task.start(ModelRequest(messages=(user("b?"),)))
        await anyio.sleep(1)

    done = played(run, "one", "~two")
    assert done.num_trained == 4
    assert done.trajectory.turns[1].call is not None
    assert done.trajectory.turns[1].call.cause == "aborted"


def test_calls_that_are_not_selected_are_context_of_those_that_are() -> None:
    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"), model="small")
        await ask(task, user("a?"), of(first), user("b?"), model="large")

    done = played(run, "one", "two", selects=lambda request: request.model == "large")
    assert done.texts == [
        f"{turn('user', 'a?')}{START}assistant\none{END}\n{turn('user', 'b?')}{START}assistant\n[two{END}]"
    ]


# --- Limits, ends and actions ----------------------------------------------------------------------------------------


def test_limits_refuse_a_call_and_the_agent_may_end_its_work() -> None:
    refused = []

    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"))
        for messages in ((user("a?"), of(first), user("b?" * 100)), (user("b?"),)):
            with pytest.raises(CallRefusedError) as error:
                await ask(task, *messages)
            refused.append(error.value.kind)

    done = played(run, "one", limits=RolloutLimits(max_turns=1, max_tokens=100, turn_tokens=20))
    assert refused == ["context", "budget"]
    assert done.trajectory.outcome.stop is StopReason.TERMINATED


def test_the_actions_of_an_agent_belong_to_its_last_call_and_so_do_their_rewards() -> None:
    host = ScriptedHost(lambda task, lease: [Answer("start"), Answer("x", 0.25), Answer("y", 0.5), Answer("z", 1.0)])

    async def run(task: AgentEpisode) -> None:
        first = await ask(task, user("a?"))
        await ask(task, user("side call"))
        assert await task.step("go") == {"observation": "x"}
        assert await task.step("on") == {"observation": "y"}
        await ask(task, user("a?"), of(first), user("b?"))
        assert await task.step("end") == {"observation": "z"}

    done = played(run, "one", "side", "two", host=host)
    assert done.host.episodes[0].actions == ["go", "on", "end"]
    assert [one.rewards.tolist() for one in done.samples] == [[0.0, 0.75, 1.0]] * 2
    assert [[*dict.fromkeys(one.turn_ids.tolist())] for one in done.samples] == [[0, 2], [1]]
    assert done.trajectory.outcome.reward == 1.75


def test_the_end_of_the_environment_ends_the_agent() -> None:
    host = ScriptedHost(lambda task, lease: [Answer("start"), Answer("won", 1.0, "terminated")])
    after = []

    async def run(task: AgentEpisode) -> None:
        await ask(task, user("a?"))
        with pytest.raises(CallRefusedError) as error:
            await task.step("go")
        after.append(error.value.kind)

    done = played(run, "one", host=host)
    assert done.trajectory.outcome.reward == 1.0
    assert done.trajectory.outcome.stop is StopReason.TERMINATED


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
