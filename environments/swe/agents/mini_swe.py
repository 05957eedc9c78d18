"""mini-swe-agent's way of working: its prompts, its commands and how it sees their results, without a model.

The agent answers with one block of code per turn, which bash runs in a new process in the same folder. The next message
has the exit code and the output, of a long one the first and last 5,000 characters. An answer without exactly one block
is rejected with an explanation. The agent submits with a command whose first line of output is `SENTINEL`.

The prompts are Jinja templates. Those of an installed mini-swe-agent are read from its configuration, so that results
are comparable; `OWN_PROMPTS` has the same structure in other words.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import cast

from envkit.errors import UsageError

from ...tools import write_call

SENTINEL = "COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
MAX_STEPS = 250
"""Default number of answers in an episode."""

_SHOWN = 5000
"""Characters of each end of a long output that the agent sees."""
_END = re.compile(
    r"(?:\n|\A)\[(?:exit code (-?\d+)|stopped after (\S+) s, the time limit of a command)\]"
    r"((?:\n\[(?:a process was killed|the shell has ended)[^\n]*\])*)\Z"
)
"""The last lines of a result of the tool bash."""
_CUT = re.compile(r"\n\.\.\. ([\d,]+) characters cut \.\.\.\n")
_CUT_TOLERANCE = 100


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompts:
    """Templates and settings of the agent.

    Attributes:
        source: Where they are from, such as ``mini-swe-agent 2.4.6``.
        system: Template of the system prompt.
        instance: Template of the first message; its variable is ``task``.
        observation: Template of a result; its variable ``output`` is an `Output`.
        format_error: Template of the message after an answer without exactly one command. Its variables are
            ``actions``, the commands; ``error``; and ``finish_reason``, why the answer ended.
        action: Pattern of a command in an answer.
        folder: Name of the package's folder in the templates, which the actual folder replaces; may be empty.
        variables: Environment variables of the commands.
        max_steps: Maximum number of answers.
        max_format_errors: Number of rejected answers in a row after which the episode ends.
    """

    source: str
    system: str
    instance: str
    observation: str
    format_error: str
    action: str
    folder: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)
    max_steps: int = MAX_STEPS
    max_format_errors: int = 3


@dataclass(frozen=True, slots=True)
class Output:
    """Result of a command; the names of its attributes are those in mini-swe-agent's templates.

    Attributes:
        output: What the command wrote, standard error included.
        returncode: Its exit code; -1 if it was stopped.
        exception_info: Why it was stopped; otherwise empty.
    """

    output: str
    returncode: int
    exception_info: str = ""

    @property
    def submission(self) -> str | None:
        """What the agent submits, after the line with the sentinel; None if the command does not submit."""
        first, _, rest = self.output.lstrip().partition("\n")
        return rest if first.strip() == SENTINEL and self.returncode == 0 else None


OWN_PROMPTS = Prompts(
    source="envkit",
    system="""\
You repair software. You work in a shell, one command at a time.

Write a short line of reasoning, and then exactly one block of code with a command:

```bash
ls
```

An answer with no block, or with several, is not run.
""",
    instance="""\
Here is a report of a problem in the package in the current folder:

<report>
{{ task }}
</report>

Change the package's source so that the problem is gone. Tests of your own are welcome, but only changes of existing
source files count: leave the existing tests and the configuration as they are.

How to proceed: find the relevant code, reproduce the problem, change the source, and run your reproduction and the
tests again. Each command runs in a new shell in the same folder: `cd` and variables do not last, and programs that wait
for input do not work. Commands can be joined with `&&`.

When you are done, submit with this command alone. You cannot continue after it:

```bash
echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT
```
""",
    observation="""\
{% if output.exception_info %}<problem>{{ output.exception_info }}</problem>
{% endif %}<returncode>{{ output.returncode }}</returncode>
{% if output.output|length < 10000 %}<output>
{{ output.output }}</output>{% else %}The output is too long; print less of it, for example with head, sed or grep.
<output_head>
{{ output.output[:5000] }}
</output_head>
<left_out>{{ output.output|length - 10000 }} characters</left_out>
<output_tail>
{{ output.output[-5000:] }}
</output_tail>{% endif %}""",
    format_error="""\
{% if finish_reason == "length" %}The answer was cut off at its limit of tokens; write a shorter one.
{% endif %}Nothing was run: {{ error }}. Write exactly one block, such as

```bash
ls
```
""",
    action=r"```(?:bash|sh)\s*\n(.*?)\n```",
    variables={"PAGER": "cat"},
)


def prompts_of(config: Mapping[str, object], source: str) -> Prompts:
    """Return the prompts of a configuration of mini-swe-agent, version 1 or 2, which asks for a block of code.

    Raises:
        UsageError: A template is missing.
    """
    agent, model, environment = (
        cast("Mapping[str, object]", config.get(name) or {}) for name in ("agent", "model", "environment")
    )

    def template(*places: tuple[Mapping[str, object], str]) -> str:
        found = next((section[key] for section, key in places if isinstance(section.get(key), str)), None)
        if found is None:
            raise UsageError(f"mini_swe: the configuration of {source} has no {places[0][1]}; install another version")
        return str(found)

    system = template((agent, "system_template"))
    marker = "mswea_bash_command" if "```mswea_bash_command" in system else "bash"
    variables = cast("Mapping[str, object]", environment.get("env") or {})
    return Prompts(
        source=source,
        system=system,
        instance=template((agent, "instance_template")),
        observation=template((model, "observation_template"), (agent, "action_observation_template")),
        format_error=template((model, "format_error_template"), (agent, "format_error_template")),
        action=str(model.get("action_regex") or rf"```{marker}\s*\n(.*?)\n```"),
        folder=str(environment.get("cwd") or ""),
        variables={name: str(value) for name, value in variables.items()},
        max_steps=int(cast("int", agent.get("step_limit") or MAX_STEPS)),
    )


def commands_of(answer: str, prompts: Prompts) -> list[str]:
    """Return the commands in an answer; exactly one makes it valid."""
    found = (match[1] for match in re.finditer(prompts.action, answer, re.DOTALL))
    return [command.strip() for command in found]


def call_of(command: str, prompts: Prompts, folder: str) -> str:
    """Return the call of the tool bash that runs a command in a new process, in `folder` if it is not empty.

    A line with a dot follows the output, because the tool removes the line ends at its end.
    """
    variables = [f"{name}={value}" for name, value in prompts.variables.items()]
    start = f"cd {shlex.quote(folder)} && " if folder else ""
    process = shlex.join(["env", *variables, "bash", "-c", command])
    return write_call("bash", command=f"{start}{process} 2>&1; code=$?; echo .; (exit $code)")


def output_of(result: str) -> Output:
    """Return the output in a result of `call_of`.

    The environment may have cut the middle of a long result. Blanks take its place, so that the length and both ends
    are those of the output.
    """
    cut = _CUT.search(result, _SHOWN - _CUT_TOLERANCE)
    if cut and len(result) - cut.end() >= _SHOWN - _CUT_TOLERANCE:
        result = result[: cut.start()] + " " * int(cut[1].replace(",", "")) + result[cut.end() :]
    end = _END.search(result)
    if end is None:
        return Output("", -1, result)
    text = result[: end.start()]
    if end[1] is None:
        return Output(f"{text}\n" if text else "", -1, f"the command took more than {end[2]} s and was stopped")
    return Output(text.removesuffix("."), int(end[1]), end[3].strip())
