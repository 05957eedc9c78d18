"""The agent's commands, results and prompts, without a model."""

from __future__ import annotations

import json
import os
import subprocess
from typing import Any

import pytest

from envkit.environments.swe.agents.mini_swe import (
    OWN_PROMPTS,
    SENTINEL,
    Output,
    call_of,
    commands_of,
    output_of,
    prompts_of,
)
from envkit.environments.tools import cut_middle, format_result
from envkit.errors import UsageError
from envkit.types import ExecResult


@pytest.mark.parametrize(
    ("answer", "commands"),
    [
        ("Look.\n```bash\nls -a\n```", ["ls -a"]),
        ("```bash\ncat > x <<'END'\na\n\nb\nEND\n```\n", ["cat > x <<'END'\na\n\nb\nEND"]),
        ("```bash\nls\n```\nand\n```bash\npwd\n```", ["ls", "pwd"]),
        ("```python\nprint(1)\n```", []),
        ("```bash\nls", []),
        ("ls", []),
    ],
)
def test_the_commands_of_an_answer_are_its_blocks_of_bash(answer: str, commands: list[str]) -> None:
    assert commands_of(answer, OWN_PROMPTS) == commands


def test_a_command_runs_in_a_process_of_its_own_with_one_output(tmp_path: Any) -> None:
    call = json.loads(call_of('cd / && X=1; echo "it\'s $PAGER" >&2; exit 3', OWN_PROMPTS, str(tmp_path)))
    assert call["name"] == "bash"
    done = subprocess.run(
        ["bash", "-c", f"{call['arguments']['command']}\necho $? $PWD $X"], capture_output=True, text=True, check=True
    )
    assert (done.stdout, done.stderr) == (f"it's cat\n.\n3 {tmp_path}\n", "")


def result(stdout: str, exit_code: int | None = 0, **fields: Any) -> ExecResult:
    return ExecResult(exit_code, stdout.encode(), **fields)


@pytest.mark.parametrize(
    "text",
    ["a\nb\n", "", "\n\nno end", "blank lines\n\n\n", "[exit code 7]\n", "a\n[exit code 0]\n[x]\n", ".", "a.\n.\n"],
)
def test_a_result_of_the_tool_bash_is_read_back(text: str) -> None:
    done = subprocess.run(
        ["bash", "-c", json.loads(call_of('printf "%s" "$X"; exit 3', OWN_PROMPTS, ""))["arguments"]["command"]],
        env={**os.environ, "X": text},
        capture_output=True,
        check=False,
    )
    assert output_of(format_result(ExecResult(done.returncode, done.stdout), 60.0)) == Output(text, 3)


def test_a_command_that_was_stopped_has_its_output_and_the_reason() -> None:
    stopped = result("a\n", None, timed_out=True, is_shell_lost=True)
    reason = "the command took more than 60 s and was stopped"
    assert output_of(format_result(stopped, 60.0)) == Output("a\n", -1, reason)
    killed = result("a\n.\n", 137, is_out_of_memory=True)
    reason = "[a process was killed because the memory is full]"
    assert output_of(format_result(killed, 60.0)) == Output("a\n", 137, reason)


def test_a_result_that_is_an_error_of_the_tool_is_a_problem() -> None:
    assert output_of("Error: bash did not finish within 60 s") == Output(
        "", -1, "Error: bash did not finish within 60 s"
    )


def test_both_ends_and_the_length_of_a_long_result_survive_the_cut_of_the_environment() -> None:
    text = "".join(f"{number:06}\n" for number in range(3000))
    found = format_result(result(f"{text}.\n"), 60.0)
    output = output_of(cut_middle(found, 10_100)).output
    assert (len(output), output[:5000], output[-5000:]) == (len(text), text[:5000], text[-5000:])
    nearly = output_of(cut_middle(found, 10_000)).output
    assert (len(nearly), nearly[-4900:]) == (len(text), text[-4900:])
    short = cut_middle(found, 2000)
    assert "19,015 characters cut" in output_of(short).output


@pytest.mark.parametrize(
    ("output", "submission"),
    [
        (Output(f"{SENTINEL}\n", 0), ""),
        (Output(f"\n  {SENTINEL} \ndiff\nend\n", 0), "diff\nend\n"),
        (Output(f"{SENTINEL}\n", 1), None),
        (Output(f"done {SENTINEL}\n", 0), None),
        (Output(f"x\n{SENTINEL}\n", 0), None),
        (Output("", 0), None),
    ],
)
def test_a_command_submits_if_it_succeeds_and_its_first_line_is_the_sentinel(
    output: Output, submission: str | None
) -> None:
    assert output.submission == submission


AGENT = {"system_template": "s", "instance_template": "i {{task}}"}
MODEL = {"observation_template": "o", "format_error_template": "f"}


def test_prompts_are_read_from_configurations_of_both_versions() -> None:
    new = prompts_of(
        {
            "agent": {**AGENT, "system_template": "```mswea_bash_command\n", "step_limit": 7},
            "model": MODEL,
            "environment": {"cwd": "/testbed", "env": {"PAGER": "cat", "TQDM_DISABLE": 1}},
        },
        "version 2",
    )
    assert (new.observation, new.format_error, new.max_steps, new.folder) == ("o", "f", 7, "/testbed")
    assert new.variables == {"PAGER": "cat", "TQDM_DISABLE": "1"}
    assert commands_of("```bash\nls\n```\n```mswea_bash_command\npwd\n```", new) == ["pwd"]
    old = prompts_of(
        {"agent": {**AGENT, "action_observation_template": "o", "format_error_template": "f"}}, "version 1"
    )
    assert (old.observation, old.format_error, old.max_steps) == ("o", "f", 250)
    assert commands_of("```bash\nls\n```", old) == ["ls"]
    assert (
        prompts_of({"agent": AGENT, "model": {**MODEL, "action_regex": "<a>(.*?)</a>"}}, "x").action == "<a>(.*?)</a>"
    )


def test_a_configuration_without_a_template_is_an_error() -> None:
    with pytest.raises(UsageError, match="the configuration of version 3 has no observation_template; install another"):
        prompts_of({"agent": AGENT}, "version 3")
