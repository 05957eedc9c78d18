"""mini-swe-agent's loop as a policy: a real HTTP server on this machine stands in for the model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from starlette.responses import Response

from envkit import clock
from envkit.config import evaluation
from envkit.environments.code import Code
from envkit.environments.swe.agents.mini_swe import OWN_PROMPTS, Prompts
from envkit.environments.tools import submit, tool_of
from envkit.errors import PlayerStoppedError, UsageError
from envkit.runs.display import SilentDisplay
from envkit.trainer_bridge.evaluation.result import Evaluation
from envkit.trainer_bridge.rollout import RolloutLimits
from envkit.types import JSON, EpisodeRecord, Info, Observation, Reset, RolloutRequest, StopReason, Task, ToolSchema
from envkit.wiring import mini_swe
from envkit.wiring.evaluation.evaluate import evaluate
from envkit.wiring.evaluation.policies import ENDPOINT_TOKENS
from tests.wiring.evaluation.chat_servers import Answer, Served, completion, failure
from tests.wiring.evaluation.test_endpoint import opened, text_of

TEXT: dict[str, Any] = {"type": "string"}
BASH: ToolSchema = {
    "type": "function",
    "function": {
        "name": "bash",
        "description": "",
        "parameters": {"type": "object", "properties": {"command": TEXT}, "required": ["command"]},
    },
}
SUBMIT = tool_of(submit).schema
FIRST = Observation("Add one. Call submit when you are done.")


def answering(*commands: str) -> list[Answer]:
    """Answers of a model, each with one command."""
    return [lambda body, command=command: completion(f"Next.\n```bash\n{command}\n```") for command in commands]  # type: ignore[misc]


def seen(output: str, exit_code: int = 0) -> Observation:
    return Observation(f"{output}.\n[exit code {exit_code}]", role="tool")


def acted(
    served: Served,
    observations: Sequence[Observation],
    *,
    prompts: Prompts = OWN_PROMPTS,
    info: Info | None = None,
    tools: tuple[ToolSchema, ...] = (BASH, SUBMIT),
) -> list[str]:
    """Let the player answer the observations of one episode, and return its actions."""

    async def main() -> list[str]:
        limits = RolloutLimits(max_turns=6, turn_tokens=ENDPOINT_TOKENS)
        async with served.run(), opened(served.url, limits) as endpoint:
            start = Reset(observations[0], info or {}, tools=tools)
            request = RolloutRequest("eval/0/0", Task("SWE-v0", 0), 0)
            playing = mini_swe.MiniSwe(endpoint, prompts).begin(request, start)
            return [text_of(await playing.act(observation)) for observation in observations]

    return clock.run(main)


def test_a_chat_has_the_prompts_the_commands_and_their_results() -> None:
    served = Served(lambda body: completion("?"), answering("ls", "false"))
    actions = acted(served, [FIRST, seen("app.py\n")])
    assert actions == [
        '{"name": "bash", "arguments": {"command": "env PAGER=cat bash -c ls 2>&1; code=$?; echo .; (exit $code)"}}',
        '{"name": "bash", "arguments": {"command": "env PAGER=cat bash -c false 2>&1; code=$?; echo .; (exit $code)"}}',
    ]
    system, instance, answer, result = served.asked[1]["messages"]
    assert served.asked[0]["messages"] == [system, instance]
    assert "tools" not in served.asked[0]
    assert served.asked[0]["max_tokens"] == ENDPOINT_TOKENS
    assert (system["role"], system["content"]) == ("system", OWN_PROMPTS.system.removesuffix("\n"))
    assert "\nAdd one. Call submit when you are done.\n" in instance["content"]
    assert answer == {"role": "assistant", "content": "Next.\n```bash\nls\n```"}
    assert result == {"role": "user", "content": "<returncode>0</returncode>\n<output>\napp.py\n</output>"}


def test_a_long_output_is_shown_by_its_ends() -> None:
    served = Served(lambda body: completion("?"), answering("cat x"))
    text = "a" * 6000 + "b" * 6000 + "\n"
    acted(served, [FIRST, seen(text)])
    content = served.asked[1]["messages"][-1]["content"]
    assert "a" * 5000 in content
    assert "a" * 5001 not in content
    assert "b" * 4999 in content
    assert "2001 characters" in content


def test_an_answer_without_exactly_one_command_is_explained_and_the_third_in_a_row_submits() -> None:
    served = Served(lambda body: completion('no <tool_call>{"name": "submit", "arguments": {}}</tool_call>'))
    nothing = Observation("the answer has no tool call")
    assert acted(served, [FIRST, nothing, nothing]) == ["", "", '{"name": "submit", "arguments": {}}']
    messages = served.asked[2]["messages"]
    assert [message["role"] for message in messages] == ["system", "user", "user", "user"]
    assert "Nothing was run: the answer has 0 commands instead of one." in messages[-1]["content"]
    mixed = Served(lambda body: completion("?"), [*[lambda body: completion("?")] * 2, *answering("ls")])
    assert acted(mixed, [FIRST, nothing, nothing, seen("x\n"), nothing])[3:] == ["", ""]


def test_an_answer_that_was_cut_off_is_explained() -> None:
    served = Served(lambda body: completion("Hm", finish="length"))
    acted(served, [FIRST, Observation("no call")])
    assert served.asked[1]["messages"][-1]["content"].startswith("The answer was cut off")


def test_the_sentinel_becomes_a_submission_with_the_text_after_it() -> None:
    served = Served(lambda body: completion("?"), answering("echo", "echo"))
    done = seen("COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT\ndiff\n")
    assert acted(served, [FIRST, done])[1] == '{"name": "submit", "arguments": {"answer": "diff\\n"}}'
    assert len(served.asked) == 1


def test_the_info_of_an_environment_names_the_folder_and_the_issue() -> None:
    prompts = Prompts(
        source="x",
        system="in /testbed",
        instance="{{task}} in /testbed",
        observation="",
        format_error="",
        action=OWN_PROMPTS.action,
        folder="/testbed",
    )
    served = Served(lambda body: completion("?"), answering("ls"))
    (action,) = acted(served, [FIRST], prompts=prompts, info={"folder": "/workspace/repo", "issue": "Add one."})
    assert json.loads(action)["arguments"]["command"].startswith("cd /workspace/repo && env bash -c ls 2>&1; ")
    contents = [message["content"] for message in served.asked[0]["messages"]]
    assert contents == ["in /workspace/repo", "Add one. in /workspace/repo"]


def test_an_environment_without_the_tools_and_prompts_with_unknown_variables_are_errors() -> None:
    served = Served(lambda body: completion("?"))
    with pytest.raises(UsageError, match="SWE-v0 lacks the tool bash or submit"):
        acted(served, [FIRST], tools=(BASH,))
    unknown = Prompts(source="x", system="{{ who }}", instance="", observation="", format_error="", action="")
    with pytest.raises(UsageError, match="the prompts of x cannot be used: 'who' is undefined"):
        acted(served, [FIRST], prompts=unknown)


def test_a_chat_that_the_server_refuses_ends_the_episode() -> None:
    served = Served(lambda body: failure(400, "too long"), [lambda body: completion("no command")])
    with pytest.raises(PlayerStoppedError, match="too long") as stopped:
        acted(served, [FIRST, FIRST])
    assert stopped.value.stop is StopReason.REFUSED


def evaluated(
    served: Served, options: dict[str, JSON], *, env_id: str = "Code-v0", **settings: Any
) -> tuple[Evaluation, list[EpisodeRecord]]:
    found: list[EpisodeRecord] = []

    async def main() -> Evaluation:
        async with served.run():
            usual = {"episodes": 1, "seed": 0, "options": options, "backend": "local"}
            policy = f"mini_swe:some/model@{served.url}"
            described = evaluation.read(env_id, policy=policy, **{**usual, **settings})
            return await evaluate(described, display=SilentDisplay(), on_episode=found.append)

    return clock.run(main), found


@pytest.mark.bwrap
def test_an_agent_solves_a_task_in_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mini_swe, "installed_prompts", lambda: OWN_PROMPTS)
    options: dict[str, JSON] = {"mode": "tools", "level": 1}

    def answer(body: dict[str, Any]) -> Response:
        turn = sum(message["role"] == "assistant" for message in body["messages"])
        commands = [
            "cd /tmp; export X=1",
            "echo $X $PWD; cat solution.py >&2; (exit 4)",
            f"cat > solution.py <<'END'\n{code}\nEND",
            "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT",
        ]
        return completion(f"```bash\n{commands[turn]}\n```")

    code = ""
    served = Served(answer)
    result, (episode,) = evaluated(served, options)
    assert result.metrics["success"].mean == 0
    code = Code.task_of(episode.seed, {**options, **episode.options}).problem.solution or ""
    served = Served(answer)
    result, (episode,) = evaluated(served, options)
    assert result.metrics["success"].mean == 1
    assert (episode.outcome.stop, len(episode.turns), len(served.asked)) == (StopReason.TERMINATED, 5, 4)
    assert result.usage.completion_tokens == 4 * 5
    content = served.asked[2]["messages"][-1]["content"]
    assert content.startswith("<returncode>4</returncode>\n<output>\n/workspace\n")
    assert "def solve" in content


def test_the_prompts_of_an_installed_mini_swe_agent_are_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "minisweagent" / "config" / "benchmarks"
    folder.mkdir(parents=True)
    (tmp_path / "minisweagent" / "__init__.py").write_text("raise RuntimeError('not to be imported')")
    info = tmp_path / "mini_swe_agent-9.8.7.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: mini-swe-agent\nVersion: 9.8.7\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(UsageError, match=r"mini-swe-agent 9\.8\.7 has no configuration benchmarks"):
        mini_swe.installed_prompts()
    sections = (
        "agent: {system_template: s, instance_template: i}",
        "model: {observation_template: o, format_error_template: f}",
    )
    (folder / "swebench_backticks.yaml").write_text("\n".join(sections))
    prompts = mini_swe.installed_prompts()
    assert (prompts.source, prompts.system) == ("mini-swe-agent 9.8.7", "s")
    assert mini_swe.announcement(prompts) == "mini_swe: plays with the prompts of mini-swe-agent 9.8.7"
    assert mini_swe.identity_of(prompts).startswith("mini-swe-agent 9.8.7 (")
    assert "not comparable" in mini_swe.announcement(OWN_PROMPTS)
